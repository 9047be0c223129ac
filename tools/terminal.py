"""A child process at a pseudo-terminal, and its screen, for tests and recordings."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pexpect
import pyte

_LINES_KEPT = 10_000


def interruptible() -> None:
    """Give a child that is about to run SIGINT's default: the tests' shell may ignore it for what runs behind `&`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class _Screen(pyte.HistoryScreen):
    """A screen that answers programs which ask it something, such as where the cursor is."""

    def __init__(self, columns: int, rows: int, send: Callable[[str], Any]) -> None:
        super().__init__(columns, rows, history=_LINES_KEPT)
        self._send = send

    def write_process_input(self, data: str) -> None:
        self._send(data)


class Terminal:
    """A child at a terminal."""

    def __init__(
        self, words: Sequence[str], *, rows: int, columns: int, env: Mapping[str, str], cwd: Path | None = None
    ) -> None:
        env = {**env, "TERM": "xterm-256color"}
        self.child = pexpect.spawn(
            words[0], [*words[1:]], dimensions=(rows, columns), cwd=cwd, env=env, preexec_fn=interruptible
        )
        self.child.delaybeforesend = None
        self.screen = _Screen(columns, rows, self.child.send)
        self._stream = pyte.ByteStream(self.screen)

    def send(self, text: str) -> None:
        """Press keys."""
        self.child.send(text)

    def read(self, seconds: float) -> bytes:
        """What the child writes next, which the screen shows then. Raises pexpect.TIMEOUT after this time, and
        pexpect.EOF at the child's end."""
        data: bytes = self.child.read_nonblocking(65536, timeout=seconds)
        self._stream.feed(data)
        return data

    @property
    def text(self) -> str:
        """What the screen shows."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    def resize(self, rows: int, columns: int) -> None:
        """Another size of terminal and screen."""
        self.screen.resize(rows, columns)
        self.child.setwinsize(rows, columns)

    def close(self) -> None:
        """End the child."""
        self.child.close(force=True)
