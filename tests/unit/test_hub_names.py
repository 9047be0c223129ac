"""What names of models mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from luce.errors import UsageError
from luce.hub.names import RepositoryName, WebName, parse_name
from luce.hub.packaged import ALIASES

REPO = RepositoryName("org/Model-1.5_GGUF")
FILE = RepositoryName("org/Model-1.5_GGUF", "q4/a b-Q4_K_M.gguf", "v2")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("org/Model-1.5_GGUF", REPO),
        ("org/Model-1.5_GGUF:q4_k_m", RepositoryName(REPO.repository, "q4_k_m")),
        ("org/Model-1.5_GGUF:sub/a.gguf", RepositoryName(REPO.repository, "sub/a.gguf")),
        ("hf.co/org/Model-1.5_GGUF", REPO),
        ("hf.co/org/Model-1.5_GGUF:UD-Q4_K_XL", RepositoryName(REPO.repository, "UD-Q4_K_XL")),
        ("huggingface.co/org/Model-1.5_GGUF:Q8_0", RepositoryName(REPO.repository, "Q8_0")),
        ("https://huggingface.co/org/Model-1.5_GGUF", REPO),
        ("https://hf.co/org/Model-1.5_GGUF/blob/v2/q4/a%20b-Q4_K_M.gguf", FILE),
        ("https://huggingface.co/org/Model-1.5_GGUF/resolve/v2/q4/a%20b-Q4_K_M.gguf?download=true", FILE),
        ("huggingface.co/org/Model-1.5_GGUF/resolve/v2/q4/a%20b-Q4_K_M.gguf", FILE),
        ("http://mirror.example:8080/hf/org/Model-1.5_GGUF", REPO),
        ("https://example.org/models/x.gguf", WebName("https://example.org/models/x.gguf")),
        ("https://example.org/models/x.gguf?key=1", WebName("https://example.org/models/x.gguf?key=1")),
        ("SmolLM2", ALIASES["smollm2"]),
        ("other.gguf", Path("other.gguf")),
        ("folder/other.gguf", Path("folder/other.gguf")),
        ("./other", Path("other")),
        ("../other", Path("../other")),
        ("/other", Path("/other")),
        ("a/b/c", Path("a/b/c")),
        ("~nobody-at-all/other", Path("~nobody-at-all/other")),
    ],
)
def test_names(text: str, meant: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example:8080/hf")
    assert parse_name(text) == meant


def test_what_exists_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "model").touch()
    (tmp_path / "org" / "folder").mkdir()
    (tmp_path / "smollm2").touch()
    assert parse_name("org/model") == Path("org/model")
    assert parse_name("org/folder") == Path("org/folder")
    assert parse_name("smollm2") == Path("smollm2")
    # A folder of an alias's name is no model.
    (tmp_path / "smollm2").unlink()
    (tmp_path / "smollm2").mkdir()
    assert parse_name("smollm2") == ALIASES["smollm2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "other",
            r"^model 'other': no such file, and neither an alias \(smollm2\) nor ORG/REPO of the Hugging Face hub$",
        ),
        ("", r"^model '': no such file"),
        ("https://", r"^model 'https://': the URL names no host$"),
        ("https://[::1/x.gguf", r"^model 'https://\[::1/x.gguf': Invalid IPv6 URL$"),
        ("https://example.org/x.safetensors", r"the URL of a model ends in \.gguf$"),
        ("https://huggingface.co/datasets/org/data", r"is a dataset of the hub, not a model$"),
        ("hf.co/org", r"^model 'hf.co/org': "),
        ("https://huggingface.co/org/repo/blob/main/config.json", r"config.json is not a .gguf file$"),
    ],
)
def test_what_means_nothing(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_name(text)
    assert caught.value.param == "model"
    assert "\n" not in str(caught.value)


def test_a_name_is_shown_as_it_is_given() -> None:
    assert [str(name) for name in (REPO, RepositoryName("a/b", "Q8_0"))] == ["org/Model-1.5_GGUF", "a/b:Q8_0"]
