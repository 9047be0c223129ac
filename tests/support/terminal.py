"""A chat at a pseudo-terminal, and its screen."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pexpect

from tools.terminal import Terminal as AnyTerminal

ROOT = Path(__file__).parents[2]
ROWS, COLUMNS = 24, 80
UP, TAB, ENTER, ESCAPE = "\x1b[A", "\t", "\r", "\x1b"
CTRL_C, CTRL_D, CTRL_G, CTRL_J, CTRL_L, CTRL_R, CTRL_Z = "\x03", "\x04", "\x07", "\x0a", "\x0c", "\x12", "\x1a"
HINT = "a message, or /? for help"


class Terminal(AnyTerminal):
    """A child at a terminal of 24 x 80; by default a chat with a scripted model.

    shell: a command line in which `{}` stands for the child's.
    """

    def __init__(
        self, state: Path, *arguments: str, command: Sequence[str] = (), shell: str | None = None, **environment: str
    ) -> None:
        env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "VISUAL", "EDITOR")}
        env |= {"STATE_DIRECTORY": str(state), **environment}
        words = [sys.executable, "-m", *(command or ("tests.support.scripted_chat",)), *arguments]
        if shell is not None:
            words = ["bash", "-c", shell.format(shlex.join(words))]
        super().__init__(words, rows=ROWS, columns=COLUMNS, env=env, cwd=ROOT)
        self.raw = b""
        self.until(lambda: HINT in self.text)

    def read(self, seconds: float) -> bytes:
        data = super().read(seconds)
        self.raw += data
        return data

    def say(self, text: str) -> None:
        """Type a line and wait for its answer and the next prompt."""
        self.send(text + "\r")
        self.until(lambda: f"you said {text}" in self.text and self.at_prompt)

    def command(self, text: str, expected: str) -> None:
        """Type a command and wait for a text and the next prompt."""
        self.send(text + "\r")
        self.until(lambda: expected in self.text and self.at_prompt)

    def clear(self) -> None:
        """Forget the conversation, and begin at the top of the screen."""
        self.command("/clear", "the conversation is empty")
        self.send(CTRL_L)
        self.until(lambda: self.at_prompt and self.screen.cursor.y == 0)
        self.raw = b""

    @property
    def line(self) -> str:
        """The line of the cursor."""
        return self.screen.display[self.screen.cursor.y].rstrip()

    @property
    def at_prompt(self) -> bool:
        return self.line.startswith(f">>> {HINT}"[: self.screen.columns])

    def until(self, condition: Callable[[], bool]) -> None:
        """Read what the child writes until the screen is as expected."""
        while not condition():
            try:
                self.read(30)
            except (pexpect.TIMEOUT, pexpect.EOF) as error:
                raise AssertionError(f"{type(error).__name__} at this screen:\n{self.text}") from None

    def press(self, key: str, expected: str) -> bool:
        """Press a key and wait for one more occurrence of a text at the prompt; False if the child ends instead."""
        count = self.text.count(expected)
        self.send(key)
        try:
            self.until(lambda: self.text.count(expected) > count and self.at_prompt)
        except AssertionError:
            return False
        return True

    def ended(self) -> int:
        """Wait for the child's end; its exit status."""
        while True:
            try:
                self.read(30)
            except pexpect.EOF:
                self.child.close()
                assert self.child.signalstatus is None
                return self.child.exitstatus
