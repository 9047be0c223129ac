"""The chat at a pseudo-terminal: a child process with a scripted model, and its screen."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.terminal import CTRL_C, CTRL_D, CTRL_G, CTRL_Z, ROOT, UP, Terminal


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def terminal(state: Path) -> Iterator[Terminal]:
    terminal = Terminal(state)
    yield terminal
    terminal.close()


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
    terminal.send("unwanted too")
    terminal.until(lambda: "unwanted too" in terminal.text)
    terminal.send(CTRL_C)  # however quickly: only an empty line is left
    terminal.until(lambda: "unwanted" not in terminal.text and terminal.at_prompt)
    while terminal.press(CTRL_C, "(press again to leave"):  # two within a second; a slow machine may need more
        pass
    assert terminal.ended() == 0


def test_ctrl_d_leaves(terminal: Terminal) -> None:
    terminal.send(CTRL_D)
    assert terminal.ended() == 0


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
    terminal.close()


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
    terminal.close()


def test_suspend_and_continue(state: Path) -> None:
    # Only with a shell that waits for it can a process be suspended.
    terminal = Terminal(state, shell="set -m; {}; echo suspended; fg >/dev/null")
    terminal.send(CTRL_Z)
    terminal.until(lambda: "suspended" in terminal.text and terminal.at_prompt)
    terminal.say("again")
    terminal.send(CTRL_D)
    assert terminal.ended() == 0


def test_reasoning_is_folded(terminal: Terminal) -> None:
    terminal.send("think\r")
    terminal.until(lambda: "so it is" in terminal.text and terminal.at_prompt)
    assert re.search(r"^▸ thought for \d+\.\d s\n\nso it is\n", terminal.text, re.M)
    assert "thought\n" not in terminal.text and "<think>" not in terminal.text
    terminal.command("/set think show", "think default, shown")
    terminal.send("think\r")
    terminal.until(lambda: "first thought\nsecond\n\nso it is\n" in terminal.text and terminal.at_prompt)


def test_reasoning_and_speed_show_while_they_come(terminal: Terminal) -> None:
    terminal.send("ponder\r")
    terminal.until(
        lambda: re.search(r"first thought\nsecond and third\n5 tok · [\d.]+ tok/s", terminal.text) is not None
    )
    terminal.send(CTRL_C)
    terminal.until(lambda: "(stopped)" in terminal.text and terminal.at_prompt)
    terminal.command("/show reasoning", "second and third")


def test_resize_during_a_reply(terminal: Terminal) -> None:
    terminal.send("slow\r")
    terminal.until(lambda: "word word" in terminal.text)
    terminal.resize(12, 30)
    terminal.until(lambda: re.search(r"^(word ?){6}$", terminal.text, re.M) is not None)
    terminal.send(CTRL_C)
    terminal.until(lambda: "(stopped)" in terminal.text and terminal.at_prompt)
    terminal.command("/show tokens", "2. assistant")


def test_continue(state: Path) -> None:
    first = Terminal(state)
    first.say("remember this")
    first.send(CTRL_D)
    assert first.ended() == 0
    second = Terminal(state, "--continue")
    assert "2 messages; your last one: remember this" in second.text
    second.command("/show tokens", "2. assistant")
    second.close()


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
