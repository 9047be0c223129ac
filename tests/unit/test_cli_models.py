"""`luce models`: what is on the machine, and what to begin with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from luce.cli.main import main
from luce.hub.lookup import resolve_model
from luce.hub.names import RepositoryName, parse_name
from luce.hub.packaged import ALIASES
from luce.hub.reporting import size_text
from luce.models.recommended import AS_OF, RECOMMENDED, RecommendedModel
from luce.models.registry import FAMILIES
from tests.support.hub_server import HubServer

REPO = "org/some-GGUF"
GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "models.md"


def test_no_models_yet(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert capsys.readouterr().out.startswith("No models yet: `luce models --recommended` names some")
    assert main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_table_and_json(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repositories[REPO] = {"some-Q4_K_M.gguf": b"GGUF" * 1000}
    path = resolve_model(REPO)
    blob = tmp_path / "ollama" / "blobs" / "sha256-ab"
    manifest = tmp_path / "ollama" / "manifests" / "registry.ollama.ai" / "library" / "evil\x1b[31m" / "3b"
    for file in (blob, manifest):
        file.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(b"GGUF")
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:ab"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    left = path.resolve().with_name("cd.luce.incomplete")
    left.write_bytes(b"x" * 2000)
    assert main(["models"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["MODEL", "size", "from", "changed"]
    assert lines[1][:4] == [f"{REPO}:Q4_K_M", "4.0", "kB", "hub"]
    assert lines[2][:4] == [str(blob), "4", "B", "ollama:"] and "\x1b" not in "".join(lines[2])
    assert " ".join(lines[3]).startswith("1 downloads did not end (2.0 kB): `luce pull` goes on with them")
    assert main(["models", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)[0]
    modified = first.pop("modified")
    assert modified == path.stat().st_mtime
    assert first == {
        "name": f"{REPO}:Q4_K_M",
        "title": "",
        "place": "hub",
        "path": str(path),
        "files": 1,
        "bytes": 4000,
    }


def test_recommended_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--recommended"]) == 0
    out = capsys.readouterr().out
    assert out.rstrip().endswith(f"As of {AS_OF}.")
    assert all(model.name in out for model in RECOMMENDED)
    assert main(["models", "--recommended", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [model.name for model in RECOMMENDED]


@pytest.mark.parametrize("model", RECOMMENDED, ids=lambda model: model.name)
def test_a_recommended_model_runs_here(model: RecommendedModel) -> None:
    assert model.family in FAMILIES
    meant = parse_name(model.name)
    assert meant in ALIASES.values() or (isinstance(meant, RepositoryName) and meant.wanted)
    # Weights with room for a context, and not so little that a smaller device would do.
    assert model.size < 0.94 * model.memory * 1e9


def test_they_are_in_order() -> None:
    assert list(RECOMMENDED) == sorted(RECOMMENDED, key=lambda model: model.memory)


def test_the_guide_has_the_same_table() -> None:
    text = GUIDE.read_text()
    for model in RECOMMENDED:
        size = size_text(model.size)
        row = f"| {model.memory} GB | `{model.name}` | {model.model} | {size} | `{model.family}` | {model.licence} |"
        assert row in text, row
    assert len(re.findall(r"^\| \d+ GB ", text, re.MULTILINE)) == len(RECOMMENDED)
    assert f"as of {AS_OF}" in text
