"""The keys of the chat's prompt at a pseudo-terminal. One child serves all tests of this file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.terminal import CTRL_C, CTRL_G, CTRL_J, CTRL_R, ENTER, ESCAPE, HINT, TAB, UP, Terminal


class Shared:
    """The child of all tests; a new one behind a test that left it elsewhere than at the prompt."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._terminal: Terminal | None = None

    def fresh(self) -> Terminal:
        if self._terminal is not None and not self._terminal.at_prompt:
            self.close()
        if self._terminal is None:
            self._terminal = Terminal(self._state)
        self._terminal.clear()
        return self._terminal

    def close(self) -> None:
        if self._terminal is not None:
            self._terminal.close()
            self._terminal = None


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    shared = Shared(tmp_path_factory.mktemp("state"))
    yield shared
    shared.close()


@pytest.fixture
def terminal(shared: Shared) -> Terminal:
    return shared.fresh()


def search(terminal: Terminal, text: str, match: str) -> None:
    """Search backwards until the match shows."""
    terminal.send(CTRL_R)
    terminal.until(lambda: "I-search backward:" in terminal.text)
    terminal.send(text)
    terminal.until(lambda: match in terminal.text)


def test_enter_takes_what_was_found(terminal: Terminal) -> None:
    for message in ("alpha one", "beta two"):
        terminal.say(message)
    search(terminal, "alp", ">>> alpha one")
    terminal.send(ENTER)
    terminal.until(lambda: "I-search" not in terminal.text and terminal.line == ">>> alpha one")
    terminal.send(ENTER)
    terminal.until(lambda: terminal.text.count("you said alpha one") == 2 and terminal.at_prompt)


def test_a_search_shows_no_hint(terminal: Terminal) -> None:
    terminal.say("gamma")
    search(terminal, "gam", ">>> gamma")
    assert HINT not in terminal.text
    terminal.send(CTRL_G)
    terminal.until(lambda: terminal.at_prompt)


@pytest.mark.parametrize("key", [CTRL_C, CTRL_G], ids=["ctrl-c", "ctrl-g"])
def test_search_is_left(terminal: Terminal, key: str) -> None:
    terminal.say("delta")
    search(terminal, "del", ">>> delta")
    terminal.send(key)
    terminal.until(lambda: "I-search" not in terminal.text and terminal.at_prompt)
    assert "press again" not in terminal.text
    terminal.say("still here")


def test_new_lines_are_not_typed_into_a_search(terminal: Terminal) -> None:
    terminal.say("epsilon")
    search(terminal, "eps", ">>> epsilon")
    terminal.send(CTRL_J)
    terminal.until(lambda: "I-search" not in terminal.text and terminal.line == ">>> epsilon")
    terminal.send(CTRL_C)
    terminal.until(lambda: terminal.at_prompt)


def test_arrows_search_by_prefix(terminal: Terminal) -> None:
    for message in ("zeta one", "other", "zeta two"):
        terminal.say(message)
    terminal.send("zet" + UP)
    terminal.until(lambda: terminal.line == ">>> zeta two")
    terminal.send(UP)
    terminal.until(lambda: terminal.line == ">>> zeta one")
    terminal.send(CTRL_C)
    terminal.until(lambda: terminal.at_prompt)


def test_commands_complete(terminal: Terminal) -> None:
    terminal.send("/sho" + TAB)
    terminal.until(lambda: ">>> /show" in terminal.text)
    terminal.send(" dev" + TAB)
    terminal.until(lambda: ">>> /show devices" in terminal.text)
    terminal.command("", "3.0 MiB")


def test_enter_takes_a_completion_and_does_not_send_it(terminal: Terminal) -> None:
    terminal.send("/re" + TAB)  # several commands begin so
    terminal.until(lambda: "/regen" in terminal.text and "/retry" in terminal.text)
    terminal.send(TAB)
    terminal.until(lambda: re.match(r">>> /re\w+$", terminal.line) is not None)
    chosen = terminal.line
    terminal.send(ENTER)
    # The menu below the line is gone, the line is still there.
    terminal.until(lambda: terminal.text.strip().splitlines()[-1] == chosen)
    assert "luce:" not in terminal.text
    terminal.send(CTRL_C)
    terminal.until(lambda: terminal.at_prompt)


@pytest.mark.parametrize("key", [CTRL_C, CTRL_G], ids=["ctrl-c", "ctrl-g"])
def test_a_completion_is_left(terminal: Terminal, key: str) -> None:
    terminal.send("/re" + TAB)
    terminal.until(lambda: "/regen" in terminal.text and "/retry" in terminal.text)
    terminal.send(key)
    terminal.until(lambda: terminal.text.strip() == ">>> /re")
    assert "press again" not in terminal.text
    terminal.send(CTRL_C)
    terminal.until(lambda: terminal.at_prompt)


@pytest.mark.parametrize(
    "typed",
    [f"one{CTRL_J}two", "one\x1b\rtwo", "one\\\rtwo", '"""\rone\rtwo\r"""', "\x1b[200~one\ntwo\x1b[201~"],
    ids=["ctrl-j", "alt-enter", "backslash", "quotes", "paste"],
)
def test_several_lines(terminal: Terminal, typed: str) -> None:
    terminal.send(typed)
    terminal.until(lambda: "two" in terminal.text)
    assert "you said" not in terminal.text
    terminal.send(ENTER)
    terminal.until(lambda: "you said one\ntwo" in terminal.text and terminal.at_prompt)
    terminal.send("/show tokens\r")
    terminal.until(lambda: re.search(r"1\. user +7\b", terminal.text) is not None and terminal.at_prompt)


def test_a_paste_of_commands_is_one_message(terminal: Terminal) -> None:
    terminal.send("\x1b[200~text\n/bye\n\x1b[201~")
    terminal.until(lambda: "/bye" in terminal.text)
    terminal.send(ENTER)
    terminal.until(lambda: "you said text\n/bye" in terminal.text and terminal.at_prompt)


def test_escape_in_a_search_keeps_the_match(terminal: Terminal) -> None:
    terminal.say("eta")
    search(terminal, "eta", ">>> eta")
    terminal.send(ESCAPE)
    terminal.until(lambda: "I-search" not in terminal.text and terminal.line == ">>> eta")
    terminal.send(ENTER)
    terminal.until(lambda: terminal.text.count("you said eta") == 2 and terminal.at_prompt)


def test_resize_at_the_prompt(terminal: Terminal) -> None:
    terminal.send("a line of forty columns, which will wrap.")
    terminal.until(lambda: "wrap." in terminal.text)
    terminal.resize(12, 30)
    terminal.until(lambda: terminal.line.endswith("wrap.") and not terminal.line.startswith(">>>"))
    terminal.resize(24, 80)
    terminal.until(lambda: terminal.line.startswith(">>> a line") and terminal.line.endswith("wrap."))
    terminal.send(ENTER)
    terminal.until(lambda: "you said a line" in terminal.text and terminal.at_prompt)
