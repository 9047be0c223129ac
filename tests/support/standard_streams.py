"""Standard streams for tests of verbs in this process."""

from __future__ import annotations

import io

import pytest


class TerminalStream(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """The input of the importing module's tests is empty."""
    monkeypatch.setattr("sys.stdin", io.StringIO())
