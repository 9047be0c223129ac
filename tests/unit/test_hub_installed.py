"""The models on a machine: in the layouts of Luce, the hub's library, LM Studio and ollama."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from luce.hub.installed import find, installed
from luce.hub.lookup import resolve_model
from luce.hub.names import RepositoryName
from tests.support.hub_server import HubServer

REPO = "org/some-GGUF"


@pytest.fixture
def home(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, with a hub that has models."""
    hub.repositories[REPO] = {
        "some-Q4_K_M.gguf": b"GGUFfour",
        "a-Q8_0.gguf": b"GGUFa",
        "b-Q8_0.gguf": b"GGUFb!",
        **{f"big-F16-0000{n}-of-00002.gguf": b"GGUF" + bytes(n) for n in (1, 2)},
    }
    monkeypatch.delenv("OLLAMA_MODELS")
    return tmp_path / "home"


def put(path: Path, data: bytes = b"GGUFx") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def listed() -> list[tuple[str, str, str, int, int]]:
    return [(m.place, m.name, m.title, len(m.files), m.size) for m in installed()]


def test_nothing(home: Path) -> None:
    assert installed() == []


def test_models_of_the_hub(home: Path) -> None:
    for wanted in ("Q4_K_M", "a-Q8_0.gguf", "b-Q8_0.gguf", "F16"):
        resolve_model(f"{REPO}:{wanted}")
    assert listed() == [
        ("hub", f"{REPO}:a-Q8_0.gguf", "", 1, 5),
        ("hub", f"{REPO}:b-Q8_0.gguf", "", 1, 6),
        ("hub", f"{REPO}:F16", "", 2, 11),
        ("hub", f"{REPO}:Q4_K_M", "", 1, 8),
    ]
    # What is listed is what may be typed.
    for model in installed():
        assert resolve_model(model.name, fetch=False) == model.files[0]


def test_own_models(home: Path, hub: HubServer, tmp_path: Path) -> None:
    put(tmp_path / "luce" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    hub.files["/x.gguf"] = b"GGUFurl"
    path = resolve_model(f"{hub.bytes_url}/x.gguf")
    assert {entry[:2] for entry in listed()} == {("luce", "smollm2"), ("luce", str(path))}


def test_models_of_lm_studio(home: Path, tmp_path: Path) -> None:
    first = put(home / ".lmstudio" / "models" / "pub" / "Model-GGUF" / "Model-Q4_K_M.gguf")
    put(home / ".lmstudio" / "models" / "pub" / "Model-GGUF" / "mmproj-model.gguf")
    put(home / ".cache" / "lm-studio" / "models" / "pub" / "Old-GGUF" / "Old.gguf")
    other = put(tmp_path / "elsewhere" / "pub" / "Moved-GGUF" / "Moved-Q8_0.gguf")
    settings = {"downloadsFolder": str(tmp_path / "elsewhere")}
    put(home / ".lmstudio" / "settings.json", json.dumps(settings).encode())
    assert [entry[:2] for entry in listed()] == [
        ("LM Studio", "pub/Model-GGUF:Q4_K_M"),
        ("LM Studio", "pub/Moved-GGUF:Q8_0"),
        ("LM Studio", "pub/Old-GGUF:Old.gguf"),
    ]
    assert resolve_model("pub/Model-GGUF:Q4_K_M", fetch=False) == first
    assert resolve_model("pub/Moved-GGUF", fetch=False) == other


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"downloadsFolder": 3}', '{"downloadsFolder": "/nowhere"}'])
def test_settings_of_another_version_of_lm_studio(home: Path, text: str) -> None:
    put(home / ".lmstudio" / "settings.json", text.encode())
    put(home / ".lmstudio" / "models" / "pub" / "m" / "m-Q4_0.gguf")
    assert [entry[1] for entry in listed()] == ["pub/m:Q4_0"]


def manifest(folder: Path, place: str, digest: str, kind: str = "application/vnd.ollama.image.model") -> None:
    layers = [{"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:1", "size": 1}]
    layers += [{"mediaType": kind, "digest": digest, "size": 5}]
    put(folder / "manifests" / place, json.dumps({"schemaVersion": 2, "layers": layers}).encode())


def test_models_of_ollama(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home / ".ollama" / "models"
    blob = put(folder / "blobs" / "sha256-ab")
    manifest(folder, "registry.ollama.ai/library/llama3.2/3b", "sha256:ab")
    manifest(folder, "registry.ollama.ai/someone/tuned/latest", "sha256:ab")
    manifest(folder, "hf.co/org/repo/Q4_K_M", "sha256:ab")
    # Without its bytes, without a model, and no manifest at all.
    manifest(folder, "registry.ollama.ai/library/gone/1b", "sha256:cd")
    manifest(folder, "registry.ollama.ai/library/embed/1b", "sha256:ab", kind="application/other")
    put(folder / "manifests" / "registry.ollama.ai" / "library" / "broken" / "1b", b"{")
    put(folder / "manifests" / "registry.ollama.ai" / "library" / "odd" / "1b", b'{"layers": [{}]}')
    assert {entry[:3] for entry in listed()} == {
        ("ollama", "~/.ollama/models/blobs/sha256-ab", title)
        for title in ("llama3.2:3b", "someone/tuned:latest", "hf.co/org/repo:Q4_K_M")
    }
    assert resolve_model("~/.ollama/models/blobs/sha256-ab") == blob
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "other"))
    assert installed() == []


def test_a_digest_that_is_a_path(home: Path, tmp_path: Path) -> None:
    put(tmp_path / "home" / "secret.gguf")
    put(home / ".ollama" / "models" / "blobs" / "sha256-ab")
    manifest(home / ".ollama" / "models", "registry.ollama.ai/library/evil/1b", "../../../secret.gguf")
    assert installed() == []


def test_a_part_is_missing(home: Path, tmp_path: Path) -> None:
    path = resolve_model(f"{REPO}:F16")
    path.unlink()
    assert installed() == [] and find(RepositoryName(REPO)) is None


def test_the_hub_comes_before_lm_studio(home: Path) -> None:
    other = put(home / ".lmstudio" / "models" / REPO / "some-Q4_K_M.gguf")
    assert find(RepositoryName(REPO, "Q4_K_M")) == other
    ours = resolve_model(f"https://huggingface.co/{REPO}/blob/main/a-Q8_0.gguf", newest=True)
    assert find(RepositoryName(REPO, "a-Q8_0.gguf")) == ours
    assert find(RepositoryName(REPO, "Q4_K_M")) == other


def test_a_revision_is_not_another_one(home: Path) -> None:
    path = resolve_model(f"{REPO}:Q4_K_M")
    assert find(RepositoryName(REPO, "Q4_K_M", "main")) == path
    assert find(RepositoryName(REPO, "Q4_K_M", "v2")) is None
    assert find(RepositoryName(REPO, "Q4_K_M", "a" * 40)) == path


def test_a_quant_of_two_files_is_none(home: Path) -> None:
    for wanted in ("a-Q8_0.gguf", "b-Q8_0.gguf"):
        resolve_model(f"{REPO}:{wanted}")
    assert find(RepositoryName(REPO, "Q8_0")) is None
