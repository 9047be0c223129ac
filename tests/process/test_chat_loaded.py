"""The chat at a pseudo-terminal with what answers it for real: a model that is loaded again, and a server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from luce.errors import LuceError
from luce.hub.lookup import resolve_model
from tests.support.other_server import OtherServer, delta
from tests.support.terminal import CTRL_C, CTRL_D, Terminal


def test_continue_restores_the_keys_and_values_from_disk(tmp_path: Path) -> None:
    try:
        model = resolve_model("smollm2", fetch=False)
    except LuceError as error:
        pytest.skip(f"{error} (luce pull smollm2 brings the file)")
    flags = ("--max-ctx", "512", "--cache-dir", str(tmp_path / "kv"), "--cache-min-tokens", "16")

    def ask(message: str, *more: str) -> str:
        terminal = Terminal(tmp_path / "state", str(model), *flags, *more, command=("luce", "chat"))
        terminal.command("/set max_tokens 4", "max_tokens 4")
        terminal.send(f"{message}\r")
        # Its reply is drawn, and may end before the fourth token.
        terminal.until(lambda: " · ctx " in terminal.text and terminal.at_prompt)
        terminal.send(CTRL_D)
        assert terminal.ended() == 0
        return terminal.text

    first = re.search(r"prompt (\d+) · ctx", ask("Count from one to three."))
    second = re.search(r"prompt (\d+) \((\d+) cached\) · ctx", ask("More.", "-c"))
    assert first is not None and second is not None
    assert int(second[2]) >= int(first[1])


def test_ctrl_c_stops_the_reply_of_a_server(tmp_path: Path) -> None:
    server = OtherServer()
    server.hangs, server.body = True, delta(content="Hello")
    terminal = Terminal(tmp_path / "state", "--server", server.url, command=("luce", "chat"))
    terminal.send("hi\r")
    terminal.until(lambda: re.search("^Hello", terminal.text, re.M) is not None)
    terminal.send(CTRL_C)
    terminal.until(lambda: "(stopped)" in terminal.text and terminal.at_prompt)
    assert server.left.wait(30), "the request goes on"
    terminal.command(f"/export {tmp_path / 'talk.md'}", "wrote")
    assert "## assistant (stopped)\n\nHello" in (tmp_path / "talk.md").read_text()
    server.left.clear()
    server.body = b""
    terminal.send("again\r")
    terminal.until(lambda: len(server.requests) == 2)
    terminal.send(CTRL_C)  # before the first token
    terminal.until(lambda: terminal.text.count("(stopped)") == 2 and terminal.at_prompt)
    assert server.left.wait(30)
    terminal.close()
    server.close()
