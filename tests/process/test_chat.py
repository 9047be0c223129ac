"""The chat at a pseudo-terminal: a child process with a scripted model, and its screen."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pyte
import pytest

ROOT = Path(__file__).parents[2]
ROWS, COLUMNS = 24, 80
UP, CTRL_C, CTRL_D, CTRL_G, CTRL_J, CTRL_Z = "\x1b[A", "\x03", "\x04", "\x07", "\x0a", "\x1a"
HINT = "a message, or /? for help"


class Terminal:
    """A child at a terminal of 24 x 80."""

    def __init__(self, state: Path, *arguments: str, shell: str | None = None, **environment: str) -> None:
        env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "VISUAL", "EDITOR")}
        env |= {"STATE_DIRECTORY": str(state), "TERM": "xterm-256color", **environment}
        command = [sys.executable, "-m", "tests.support.scripted_chat", *arguments]
        if shell is not None:
            command = ["bash", "-c", shell.format(shlex.join(command))]
        self.child = pexpect.spawn(command[0], command[1:], dimensions=(ROWS, COLUMNS), cwd=ROOT, env=env)
        self.child.delaybeforesend = None
        self.screen = pyte.HistoryScreen(COLUMNS, ROWS, history=10000)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.until(lambda: HINT in self.text)

    def send(self, text: str) -> None:
        self.child.send(text)

    def say(self, text: str) -> None:
        """Type a line and wait for its answer and the next prompt."""
        self.send(text + "\r")
        self.until(lambda: f"you said {text}" in self.text and self.at_prompt)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    @property
    def at_prompt(self) -> bool:
        return self.screen.display[self.screen.cursor.y].startswith(f">>> {HINT}")

    def until(self, condition: Callable[[], bool]) -> None:
        """Read what the child writes until the screen is as expected."""
        while not condition():
            try:
                self._take(self.child.read_nonblocking(65536, timeout=30))
            except (pexpect.TIMEOUT, pexpect.EOF) as error:
                raise AssertionError(f"{type(error).__name__} at this screen:\n{self.text}") from None

    def ended(self) -> int:
        """Wait for the child's end; its exit status."""
        while True:
            try:
                self._take(self.child.read_nonblocking(65536, timeout=30))
            except pexpect.EOF:
                self.child.close()
                assert self.child.signalstatus is None
                return self.child.exitstatus

    def _take(self, data: bytes) -> None:
        self.raw += data
        self.stream.feed(data)
        if b"\x1b[6n" in data:  # asked for the cursor's place
            self.send(f"\x1b[{self.screen.cursor.y + 1};{self.screen.cursor.x + 1}R")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def terminal(state: Path) -> Iterator[Terminal]:
    terminal = Terminal(state)
    yield terminal
    terminal.child.close(force=True)


def test_a_conversation(terminal: Terminal, state: Path) -> None:
    terminal.say("first")
    terminal.say("second")
    assert "**" not in terminal.text
    assert re.search(r"1[0-9] tok|[2-9] tok", terminal.text)
    assert "/4,096" in terminal.text
    terminal.send(UP)
    terminal.until(lambda: ">>> second" in terminal.screen.display[terminal.screen.cursor.y])
    terminal.send(CTRL_C)
    terminal.until(lambda: terminal.at_prompt)
    terminal.send("/bye\r")
    assert terminal.ended() == 0
    history = state / "history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "+first" in history.read_text()


@pytest.mark.parametrize(
    "typed",
    [f"one{CTRL_J}two", "one\x1b\rtwo", "one\\\rtwo", '"""\rone\rtwo\r"""', "\x1b[200~one\ntwo\x1b[201~"],
    ids=["ctrl-j", "alt-enter", "backslash", "quotes", "paste"],
)
def test_several_lines(terminal: Terminal, typed: str) -> None:
    terminal.send(typed)
    terminal.until(lambda: "two" in terminal.text)
    assert "you said" not in terminal.text
    terminal.send("\r")
    terminal.until(lambda: "you said one\ntwo" in terminal.text and terminal.at_prompt)
    terminal.send("/show tokens\r")
    terminal.until(lambda: re.search(r"1\. user +7\b", terminal.text) is not None)


@pytest.mark.parametrize("message", ["hang", "slow"])
def test_ctrl_c_stops_a_reply_and_keeps_it(terminal: Terminal, message: str, tmp_path: Path) -> None:
    terminal.send(f"{message}\r")
    terminal.until(lambda: re.search(r"^(begun|word word)", terminal.text, re.M) is not None)
    terminal.send(CTRL_C)
    terminal.until(lambda: "(stopped)" in terminal.text and terminal.at_prompt)
    terminal.say("next")
    path = tmp_path / "talk.md"
    terminal.send(f"/export {path}\r")
    terminal.until(lambda: "wrote" in terminal.text)
    assert re.search(r"## assistant \(stopped\)\n\n(begun|word )", path.read_text())


def test_ctrl_c_before_the_first_token_takes_the_message_back(terminal: Terminal) -> None:
    terminal.send("silent\r")
    terminal.until(lambda: "(asked)" in terminal.text)
    terminal.send(CTRL_C)
    terminal.until(lambda: "(stopped)" in terminal.text and terminal.at_prompt)
    terminal.send("/undo\r")
    terminal.until(lambda: "luce: /undo: there is no message yet" in terminal.text and terminal.at_prompt)


def test_keys_during_a_reply_do_not_show(terminal: Terminal) -> None:
    terminal.send("slow\r")
    terminal.until(lambda: "word word" in terminal.text)
    terminal.send("typed ahead")
    terminal.until(lambda: "word word word word word word" in terminal.text)
    assert b"typed" not in terminal.raw
    terminal.send(CTRL_C)
    terminal.until(lambda: "(stopped)" in terminal.text and terminal.at_prompt)


def test_ctrl_c_at_the_prompt(terminal: Terminal) -> None:
    terminal.send("unwanted")
    terminal.until(lambda: "unwanted" in terminal.text)
    terminal.send(CTRL_C)
    terminal.until(lambda: "unwanted" not in terminal.text and terminal.at_prompt)
    time.sleep(1.1)  # the second one would leave
    terminal.send(CTRL_C)
    terminal.until(lambda: "(press again to leave" in terminal.text and terminal.at_prompt)
    terminal.send(CTRL_C)
    assert terminal.ended() == 0


def test_ctrl_d_leaves(terminal: Terminal) -> None:
    terminal.send(CTRL_D)
    assert terminal.ended() == 0


def test_commands_complete(terminal: Terminal) -> None:
    terminal.send("/sho\t")
    terminal.until(lambda: ">>> /show" in terminal.text)
    terminal.send(" dev\t")
    terminal.until(lambda: ">>> /show devices" in terminal.text)
    terminal.send("\r")
    terminal.until(lambda: "3.0 MiB" in terminal.text and terminal.at_prompt)


@pytest.mark.parametrize("start", [CTRL_G, "/edit\r"], ids=["ctrl-g", "edit"])
def test_editor(state: Path, tmp_path: Path, start: str) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nprintf "from the editor" > "$1"\n')
    editor.chmod(0o755)
    terminal = Terminal(state, EDITOR=str(editor))
    terminal.send(start)
    terminal.until(lambda: ">>> from the editor" in terminal.text)
    terminal.send("\r")
    terminal.until(lambda: "you said from the editor" in terminal.text and terminal.at_prompt)
    terminal.child.close(force=True)


def test_no_history(terminal: Terminal, state: Path) -> None:
    terminal.send("/set nohistory\r")
    terminal.until(lambda: "nohistory on" in terminal.text and terminal.at_prompt)
    terminal.say("secret")
    terminal.send(CTRL_D)
    terminal.ended()
    assert "secret" not in (state / "history").read_text()


@pytest.mark.parametrize(("arguments", "environment"), [(["--plain"], {}), ([], {"NO_COLOR": "1"})])
def test_plain(state: Path, arguments: list[str], environment: dict[str, str]) -> None:
    terminal = Terminal(state, *arguments, **environment)
    terminal.send("text\r")
    terminal.until(lambda: "you said **text**" in terminal.text and terminal.at_prompt)
    colours = re.findall(rb"\x1b\[([0-9;]*)m", terminal.raw)
    assert not any(re.search(rb"(^|;)(3[0-8]|4[0-8]|9[0-7])(;|$)", colour) for colour in colours)
    terminal.child.close(force=True)


def test_suspend_and_continue(state: Path) -> None:
    # Only with a shell that waits for it can a process be suspended.
    terminal = Terminal(state, shell="set -m; {}; echo suspended; fg >/dev/null")
    terminal.send(CTRL_Z)
    terminal.until(lambda: "suspended" in terminal.text and terminal.at_prompt)
    terminal.say("again")
    terminal.send(CTRL_D)
    assert terminal.ended() == 0


def test_pipe(state: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.scripted_chat"],
        input='one\n"""\ntwo\nlines\n"""\n/nonsense\n',
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "STATE_DIRECTORY": str(state)},
    )
    assert done.stdout == "you said **one**\nyou said **two\nlines**\n"
    assert done.stderr == "luce: /nonsense: unknown command; /? lists the commands\n"
    assert done.returncode == 2
    assert not state.exists()
