"""`luce run` at a pseudo-terminal: a child process with a scripted model, and its screen."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable

import pexpect
import pyte

from tests.support.terminal import ROOT
from tools.terminal import interruptible

CODE = """
import sys
from luce.cli import run as run_verb
from luce.cli.main import main
from tests.support.scripted_chat import HANG, LoadedModel

def open_model(path, config, on_progress):
    on_progress(0.25)
    if {hang_loading}:
        sys.stdin.readline()
    return LoadedModel({reply})

run_verb.open_model = open_model
sys.exit(main(["run", "x.gguf", "hi"]))
"""


class Screen:
    """A child that runs code, and its terminal of 10 x 80."""

    def __init__(self, code: str) -> None:
        env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm-256color"}
        command = [sys.executable, "-c", code]
        self.child = pexpect.spawn(
            command[0], command[1:], dimensions=(10, 80), cwd=ROOT, env=env, echo=False, preexec_fn=interruptible
        )
        self._screen = pyte.Screen(80, 10)
        self._stream = pyte.ByteStream(self._screen)

    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display if line.strip()]

    def until(self, condition: Callable[[], bool]) -> None:
        """Read what the child writes until the screen is as expected; a spinner writes for ever."""
        for _ in range(1000):
            if condition():
                return
            try:
                self._stream.feed(self.child.read_nonblocking(65536, timeout=30))
            except (pexpect.TIMEOUT, pexpect.EOF):
                break
        raise AssertionError(f"the screen: {self.lines()}")

    def ended(self) -> int | None:
        """Wait for the child's end; its exit status."""
        while True:
            try:
                self._stream.feed(self.child.read_nonblocking(65536, timeout=30))
            except pexpect.EOF:
                self.child.close()
                return self.child.exitstatus


def test_the_load_and_the_prompt_have_bars_that_go_before_the_reply() -> None:
    screen = Screen(CODE.format(hang_loading=True, reply="['Fine', HANG]"))
    screen.until(lambda: any("loading x.gguf ━" in line and line.endswith("25%") for line in screen.lines()))
    screen.child.send("\n")
    screen.until(lambda: screen.lines()[-1:] == ["Fine"])
    assert not any("━" in line for line in screen.lines())
    screen.child.sendintr()
    assert screen.ended() == 130


def test_the_prompt_has_a_bar_until_the_first_token() -> None:
    screen = Screen(CODE.format(hang_loading=False, reply="[HANG]"))
    screen.until(
        lambda: any("reading the prompt ━" in line and line.endswith(" 50% 4/8 tokens") for line in screen.lines())
    )
    screen.child.sendintr()
    assert screen.ended() == 130
    assert not any("━" in line for line in screen.lines())


def test_reasoning_is_folded_on_standard_error() -> None:
    screen = Screen(
        CODE.format(hang_loading=False, reply="['<think>', 'first\\n', 'second', '</think>', 'Fine', HANG]")
    )
    screen.until(lambda: screen.lines()[-1:] == ["Fine"])
    assert re.fullmatch(r"▸ thought for \d+\.\d s", screen.lines()[0]) and len(screen.lines()) == 2
    screen.child.sendintr()
    assert screen.ended() == 130
