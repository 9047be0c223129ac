"""`luce rm`."""

from __future__ import annotations

from pathlib import Path

import pytest

from luce.cli.main import main
from luce.hub.installed import installed
from luce.hub.lookup import resolve_model
from tests.support.hub_server import HubServer

REPO = "org/some-GGUF"


@pytest.fixture(autouse=True)
def two_models(hub: HubServer) -> None:
    hub.repositories[REPO] = {"some-Q4_K_M.gguf": b"GGUF" * 1000, "some-Q8_0.gguf": b"GGUF" * 2000}
    for quant in ("Q4_K_M", "Q8_0"):
        resolve_model(f"{REPO}:{quant}")


def test_removed(capsys: pytest.CaptureFixture[str]) -> None:
    # Two names of one model are one model.
    assert main(["rm", f"{REPO}:Q4_K_M", f"{REPO}:some-Q4_K_M.gguf"]) == 0
    assert capsys.readouterr().out == f"{REPO}:Q4_K_M: removed, 4.0 kB\n"
    assert [model.name for model in installed()] == [f"{REPO}:Q8_0"]


def test_a_wrong_name_removes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rm", f"{REPO}:Q4_K_M", "other"]) == 2
    assert capsys.readouterr().err == "luce: luce rm other: not a model that Luce holds; `luce models` lists them\n"
    assert len(installed()) == 2


def test_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rm"]) == 2
    assert capsys.readouterr().err == "luce: luce rm: name a model; `luce models` lists them\n"


def test_what_did_not_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = next((tmp_path / "hub").glob("*/blobs")) / "12.luce.incomplete"
    left.write_bytes(b"x" * 10)
    assert main(["rm", "--incomplete"]) == 0
    assert capsys.readouterr().out == f"{left}: removed, 10 B\n"
    assert not left.exists() and len(installed()) == 2
