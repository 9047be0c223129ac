"""Messages of several lines, history, completion."""

from __future__ import annotations

import io
import stat
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory

from luce.cli.repl.input import CommandCompleter, HistoryFile, PipeInput, message, open_history


def messages(text: str) -> list[str]:
    pipe, found = PipeInput(io.StringIO(text)), []
    while True:
        try:
            found.append(pipe.read())
        except EOFError:
            return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("\n  \none", ["one"]),
        ("first \\\nsecond\\\n\nthird", ["first \nsecond", "third"]),
        ('"""\nfirst\n\n  second \\\n"""\nnext', ["first\n\n  second \\", "next"]),
        ('"""one line"""\n', ["one line"]),
        ('"""first\nsecond"""', ["first\nsecond"]),
        ('"""never\nclosed', ["never\nclosed"]),
        ("ends in \\", ["ends in"]),
        ("", []),
    ],
)
def test_messages_of_a_pipe(text: str, expected: list[str]) -> None:
    assert messages(text) == expected


def test_pasted_backslashes_stay() -> None:
    assert message("run \\\n  --flag ") == "run \\\n  --flag"


def test_history_is_private(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history"
    history = open_history(path)
    assert isinstance(history, HistoryFile)
    history.append_string("kept\nlines")
    history.enabled = False
    history.append_string("secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(HistoryFile(path).load_history_strings()) == ["kept\nlines"]


def test_history_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.touch(0o644)
    HistoryFile(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_history_without_a_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert isinstance(open_history(tmp_path / "file" / "history"), InMemoryHistory)


def test_completion(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    words = CommandCompleter({"/set": ("seed", "system"), "/show": (), "/load": lambda: ["talk"], "/read": None})

    def complete(text: str) -> list[str]:
        document = Document(text)
        found = words.get_completions(document, CompleteEvent(completion_requested=True))
        return [text[: len(text) + c.start_position] + c.text for c in found]

    assert complete("/s") == ["/set", "/show"]
    assert complete("/set s") == ["/set seed", "/set system"]
    assert complete("/set sy") == ["/set system"]
    assert complete("/load ") == ["/load talk"]
    assert complete(f"/read {tmp_path}/no") == [f"/read {tmp_path}/notes.txt"]
    assert complete("words") == complete("/other x") == []
