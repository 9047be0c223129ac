"""The arguments of `luce join`."""

from __future__ import annotations

from pathlib import Path

import pytest

from luce.cli.main import main


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directories of this test's own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "luce join needs TOKEN, or --cluster NAME of a cluster that this machine has joined"),
        (["luce1.x", "--cluster", "home"], "luce join needs TOKEN, or --cluster NAME"),
        (["luce1.x"], "TOKEN: not a join token: "),
        (["secret"], "TOKEN: not a join token: it does not begin with luce1."),
        (["luce1.x", "--devices", "gpu"], "--devices gpu: expected backend:index"),
        (["luce1.x", "--devices", "tcp://far:9/cpu:0"], "--devices tcp://far:9/cpu:0: is not a device of this machine"),
        (["luce1.x", "--devices", "cpu:0", "--model-dir", "/none"], "--model-dir /none: is not a directory"),
        (["--cluster", "home", "--devices", "cpu:0"], "cluster home: "),
        (["--cluster", "a/b", "--devices", "cpu:0"], "cluster 'a/b': a name has a..z, 0..9 and -"),
    ],
)
def test_what_it_does_not_take(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["join", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"luce: {message}") and list(folder.iterdir()) == []
