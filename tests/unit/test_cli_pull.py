"""`luce pull`: the path on standard output, everything else on standard error."""

from __future__ import annotations

from pathlib import Path

import pytest

from luce.cli.main import main
from luce.hub.packaged import ALIASES, PackagedModel
from tests.support.hub_server import NEWER, HubServer

REPO = "org/some-GGUF"


@pytest.fixture(autouse=True)
def model(hub: HubServer) -> None:
    hub.repositories[REPO] = {"some-Q4_K_M.gguf": b"GGUF" * 1000, "some-Q8_0.gguf": b"GGUF" * 2000}


def test_the_path_alone_is_printed(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", f"{REPO}:Q8_0"]) == 0
    printed = capsys.readouterr()
    assert Path(printed.out.rstrip("\n")).read_bytes() == b"GGUF" * 2000
    assert printed.err.splitlines() == [
        f"luce: looking for {REPO}:Q8_0",
        "luce: downloading some-Q8_0.gguf, 8.0 kB",
        "luce: checking some-Q8_0.gguf",
    ]


def test_the_default_says_why(
    hub: HubServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUCE_TARGET_DEVICES", "cpu:0")
    assert main(["pull", REPO]) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("/some-Q4_K_M.gguf\n")
    assert f"luce: {REPO}: takes Q4_K_M (4.0 kB): fits cpu:0 with " in printed.err


def test_a_newer_commit(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    main(["pull", f"{REPO}:Q4_K_M"])
    hub.commit = NEWER
    hub.repositories[REPO]["some-Q4_K_M.gguf"] = b"GGUF newer"
    capsys.readouterr()
    assert main(["pull", f"{REPO}:Q4_K_M"]) == 0
    assert Path(capsys.readouterr().out.rstrip("\n")).read_bytes() == b"GGUF newer"


def test_no_network_and_the_model_is_here(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    main(["pull", f"{REPO}:Q4_K_M"])
    path = capsys.readouterr().out
    hub.close()
    assert main(["pull", f"{REPO}:Q4_K_M"]) == 0
    printed = capsys.readouterr()
    assert printed.out == path
    assert printed.err.splitlines()[-1].endswith("is there a network?; the file that is here is used")


def test_no_network(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    hub.close()
    assert main(["pull", REPO]) == 7
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"luce: model '{REPO}': {hub.url}: ")


def test_a_wrong_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("luce: model 'nothing': no such file")


def test_an_alias_that_is_here_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ALIASES, "tiny", PackagedModel("none==1", "0" * 64, "Tiny.gguf"))
    path = tmp_path / "luce" / "models" / "Tiny.gguf"
    path.parent.mkdir(parents=True)
    path.touch()
    assert main(["pull", "tiny"]) == 0
    assert capsys.readouterr() == (f"{path}\n", "")


def test_a_path_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "/nowhere.gguf"]) == 3
    assert capsys.readouterr().err == "luce: /nowhere.gguf: no such file\n"


def test_a_directory_is_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["pull", str(tmp_path)]) == 3
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"luce: {tmp_path}: is a directory\n")
