"""What Luce is doing while the user waits: a spinner or a bar at a terminal, lines elsewhere for verbs that want them.

with progress.shown(f"loading {path.name}") as wait:
    model = open_model(path, config, wait.share)

with progress.shown("reading the prompt", unit="tokens") as wait:
    generation = model.generate(ids, on_progress=wait.update)
    for token in generation:
        wait.end()      # nothing of the bar stays on the screen
        print(token.text, end="", flush=True)
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

#: by unit, the columns right of a bar
_COLUMNS: dict[str, Callable[[], list[ProgressColumn]]] = {
    "": lambda: [TaskProgressColumn()],
    "tokens": lambda: [TaskProgressColumn(), MofNCompleteColumn(), TextColumn("tokens")],
    "bytes": lambda: [TaskProgressColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(compact=True)],
}
_BAR_WIDTH = 24
# Compiles its kernels at the first start on a machine, half a minute in which nothing else is to be seen.
_COMPILER = logging.getLogger("luce.cpu_kernels")


class Wait:
    """One wait. Its methods may be called on any thread, and do nothing after `end`."""

    def __init__(self, text: str, console: Console, unit: str, *, lines: bool) -> None:
        self._bar: Progress | None = None
        self._console = console
        drawn = console.is_terminal and not console.is_dumb_terminal
        self._lines = console if lines and not drawn else None
        if drawn:
            self._spinner: tuple[ProgressColumn, ...] = (
                SpinnerColumn("dots" if console.encoding.startswith("utf") else "line"),
                TextColumn("{task.description}", markup=False),
                BarColumn(_BAR_WIDTH),
            )
            self._figures = _COLUMNS[unit]()
            self._bar = Progress(
                *self._spinner,
                console=console,
                transient=True,
                # What is printed meanwhile belongs to standard output; messages go above the bar.
                redirect_stdout=False,
                redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),
            )
            self._task = self._bar.add_task(text, total=None)
            self._bar.start()
        else:
            self.step(text)

    def step(self, text: str) -> None:
        """Name what happens now; the bar becomes a spinner until the next `update`."""
        if self._bar is not None:
            self._bar.columns = self._spinner
            self._bar.remove_task(self._task)
            self._task = self._bar.add_task(text, total=None)
            self._bar.refresh()
        elif self._lines is not None:
            self._lines.print(f"luce: {text}", soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a line that stays when the bar is gone."""
        self._console.print(f"luce: {text}", soft_wrap=True)

    def update(self, done: float, total: float) -> None:
        """Show how much is done, in the wait's unit. A total of 0 is not known yet."""
        if self._bar is not None:
            self._bar.columns = (*self._spinner, *self._figures) if total else self._spinner
            self._bar.update(self._task, completed=done, total=total or None, refresh=True)

    def share(self, fraction: float) -> None:
        """Show the share that is done, 0..1."""
        self.update(fraction, 1.0)

    def end(self) -> None:
        """Take the bar off the screen. Idempotent."""
        if self._bar is not None:
            bar, self._bar = self._bar, None
            bar.stop()
        self._lines = None


class _Steps(logging.Handler):
    """Shows what is logged as the steps of a wait."""

    def __init__(self, wait: Wait) -> None:
        super().__init__(logging.INFO)
        self._wait = wait

    def emit(self, record: logging.LogRecord) -> None:
        self._wait.step(record.getMessage())


@contextlib.contextmanager
def shown(text: str, *, unit: str = "", lines: bool = False, console: Console | None = None) -> Iterator[Wait]:
    """Show on standard error, or on `console`, that `text` happens; the end of the block takes it off the screen.

    unit: of the numbers that `Wait.update` gets: "tokens", "bytes", or "" for a percentage alone. lines: where no bar
    can be drawn, print one line for this text and for each `Wait.step`; otherwise nothing is printed there. Compiling
    the kernels of the CPU is a step.
    """
    wait = Wait(
        text, Console(stderr=True, highlight=False, markup=False) if console is None else console, unit, lines=lines
    )
    steps, level = _Steps(wait), _COMPILER.level
    _COMPILER.addHandler(steps)
    _COMPILER.setLevel(logging.INFO)
    try:
        yield wait
    finally:
        _COMPILER.setLevel(level)
        _COMPILER.removeHandler(steps)
        wait.end()
