"""Bars and spinners at a terminal, lines and silence elsewhere."""

from __future__ import annotations

import io
import logging
import sys

import pyte
import pytest
from rich.console import Console

from luce.cli import progress


class Screen:
    """A terminal of 80 columns behind a Console."""

    def __init__(self) -> None:
        self.written = io.StringIO()
        self.console = Console(file=self.written, force_terminal=True, width=80, markup=False, highlight=False)

    def lines(self) -> list[str]:
        """The lines that are on the screen now."""
        screen = pyte.Screen(80, 10)
        pyte.Stream(screen).feed(self.written.getvalue().replace("\n", "\r\n"))
        return [line.rstrip() for line in screen.display if line.strip()]


def test_a_bar_at_a_terminal() -> None:
    screen = Screen()
    with progress.shown("loading [x]", console=screen.console) as wait:
        assert screen.lines()[0][2:].startswith("loading [x] ━") and "%" not in screen.lines()[0]
        wait.share(0.25)
        assert screen.lines()[0].endswith("━  25%")
        wait.step("measuring")
        assert screen.lines()[0][2:].startswith("measuring ━") and "%" not in screen.lines()[0]
        wait.update(1, 2)
        assert screen.lines()[0].endswith("━  50%")
    assert screen.lines() == []
    # The cursor is there again.
    assert screen.written.getvalue().rindex("\x1b[?25h") > screen.written.getvalue().rindex("\x1b[?25l")


@pytest.mark.parametrize(
    ("unit", "done", "total", "shown"),
    [("tokens", 512, 2048, "25%  512/2048 tokens"), ("bytes", 30_000_000, 120_000_000, "25% 30.0/120.0 MB ? --:--")],
)
def test_units(unit: str, done: int, total: int, shown: str) -> None:
    screen = Screen()
    with progress.shown("reading", unit=unit, console=screen.console) as wait:
        wait.update(done, 0)
        assert "25%" not in screen.lines()[0]
        wait.update(done, total)
        assert screen.lines()[0].endswith(shown)


def test_compiling_the_kernels_of_the_cpu_is_a_step() -> None:
    screen, log = Screen(), logging.getLogger("luce.cpu_kernels.catalogue")
    before = log.level, list(log.handlers)
    with progress.shown("loading", console=screen.console):
        log.info("compiling the kernels of the CPU, once for this machine")
        assert screen.lines()[0][2:].startswith("compiling the kernels of the CPU, once for this machine ━")
    assert (log.level, log.handlers) == before


def test_nothing_is_drawn_after_the_end() -> None:
    screen = Screen()
    with progress.shown("reading", console=screen.console) as wait:
        wait.end()
        before = screen.written.getvalue()
        wait.update(1, 2)
        wait.step("more")
        wait.end()
    assert screen.written.getvalue() == before and screen.lines() == []


def test_a_bar_leaves_standard_output_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr("sys.stdout", written)
    with progress.shown("reading", console=Screen().console):
        assert sys.stdout is written


@pytest.mark.parametrize(("lines", "expected"), [(True, "luce: one\nluce: two\n"), (False, "")])
def test_where_there_is_no_terminal(lines: bool, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.shown("one", lines=lines) as wait:
        wait.share(0.5)
        wait.step("two")
    assert capsys.readouterr() == ("", expected)


def test_a_terminal_that_cannot_move_its_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    screen = Screen()
    with progress.shown("reading", lines=True, console=screen.console) as wait:
        wait.share(0.5)
    assert screen.written.getvalue() == "luce: reading\n"


def test_a_note_stays() -> None:
    screen = Screen()
    with progress.shown("downloading", unit="bytes", console=screen.console) as wait:
        wait.update(1, 2)
        wait.note("takes [x]")
        assert screen.lines()[0] == "luce: takes [x]" and "downloading" in screen.lines()[1]
    assert screen.lines() == ["luce: takes [x]"]
