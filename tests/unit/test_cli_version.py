"""`luce --version`: version, commit and extras."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

import pytest

import luce
from luce.cli.main import main


@pytest.fixture
def requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extras of Luce that need packages of this environment, and others."""
    metadata = importlib.metadata.metadata("numpy")
    for extra in ("here", "half", "test"):
        metadata["Provides-Extra"] = extra
    found = ["numpy>=2.0", "numpy>=2.0; extra == 'here'", 'no-such-one; extra == "half"', "numpy ; extra == 'half'"]
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: metadata)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: [*found, "numpy; extra == 'test'"])


def line(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["--version"]) == 0
    return capsys.readouterr().out


def test_the_commit_of_a_build(
    requirements: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "commit.txt").write_text("1a2b3c4d5e6f\n")
    monkeypatch.setattr(luce, "__file__", str(tmp_path / "__init__.py"))
    assert line(capsys) == f"luce {luce.__version__} (commit 1a2b3c4d5e6f, extras here)\n"


def test_the_commit_of_a_checkout(
    requirements: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(luce, "__file__", str(tmp_path / "luce" / "__init__.py"))
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout[:12]
    assert line(capsys) == f"luce {luce.__version__} (commit {commit}, extras here)\n"


def test_sources_without_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "metadata", absent)
    monkeypatch.setattr(luce, "__file__", str(tmp_path / "luce" / "__init__.py"))
    assert line(capsys) == f"luce {luce.__version__} (commit unknown, extras none)\n"
