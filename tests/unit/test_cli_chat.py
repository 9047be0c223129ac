"""The chat's commands and messages, with a scripted model and scripted keys."""

from __future__ import annotations

import io
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from luce.cli.chat import Chat
from luce.cli.turn import speed
from luce.engine.events import Finished, FinishReason, Timings
from luce.errors import BackendError, ContextError
from tests.support.scripted_chat import ScriptedModel


class Keys:
    """Messages in order; `answer` is the answer to every question."""

    def __init__(self, *messages: str, answer: bool = True) -> None:
        self._messages = list(messages)
        self.answer = answer
        self.questions: list[str] = []
        self.defaults: list[str] = []

    def read(self, default: str = "", *, editor: bool = False) -> str:
        self.defaults.append(default)
        if not self._messages:
            raise EOFError
        return self._messages.pop(0)

    def ask(self, question: str) -> bool:
        self.questions.append(question)
        return self.answer


class Talk:
    """A chat that is over: its status, replies, notes."""

    def __init__(self, model: ScriptedModel, keys: Keys, **options: Any) -> None:
        notes = io.StringIO()
        self.model = model
        console = Console(file=notes, width=200, highlight=False, markup=False)
        given = {"system": None, "rendered": None, "interactive": False, **options}
        self.chat = Chat(model, keys, console, **given)  # type: ignore[arg-type]
        self.status = self.chat.talk()
        self.notes = notes.getvalue()


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    return tmp_path / "state"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_the_conversation_has_all_messages(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Talk(ScriptedModel("Hello!", "Fine."), Keys("hi", "how are you?"), system="Be short.")
    system = {"role": "system", "content": "Be short."}
    assert talk.model.prompts == [
        [system, user("hi")],
        [system, user("hi"), assistant("Hello!"), user("how are you?")],
    ]
    assert capsys.readouterr().out == "Hello!\nFine.\n"
    assert talk.status == 0
    assert talk.notes == ""


def test_the_conversation_keeps_the_text_that_a_deadline_cuts_off() -> None:
    model = ScriptedModel("Hello,")
    model.held = " you"
    talk = Talk(model, Keys("hi"))
    assert [message.content for message in talk.chat.conversation.messages] == ["hi", "Hello, you"]


@pytest.mark.parametrize("word", ["/bye", "/exit", "/quit", "exit", "quit"])
def test_leaving(word: str) -> None:
    talk = Talk(ScriptedModel(), Keys(word, "never sent"))
    assert talk.status == 0
    assert talk.model.prompts == []


@pytest.mark.parametrize("command", ["/clear", "/reset"])
def test_clear(command: str) -> None:
    talk = Talk(ScriptedModel("a", "b"), Keys("one", command, "two"))
    assert talk.model.prompts[1] == [user("two")]


def test_undo() -> None:
    talk = Talk(ScriptedModel("a", "b", "c"), Keys("one", "two", "/undo", "three"))
    assert talk.model.prompts[2] == [user("one"), assistant("a"), user("three")]


def test_regen() -> None:
    talk = Talk(ScriptedModel("a", "b", "c"), Keys("one", "/regen", "/regen 42"))
    assert talk.model.prompts == [[user("one")]] * 3
    assert talk.model.options == [{}, {}, {"seed": 42}]
    assert talk.chat.conversation.for_template() == [user("one"), assistant("c")]


def test_retry_edits_the_last_message() -> None:
    keys = Keys("one", "/retry", "other")
    talk = Talk(ScriptedModel("a", "b"), keys)
    assert keys.defaults[2] == "one"
    assert talk.model.prompts[1] == [user("other")]


def test_retry_that_ends_keeps_the_turn() -> None:
    talk = Talk(ScriptedModel("a"), Keys("one", "/retry"))
    assert talk.chat.conversation.for_template() == [user("one"), assistant("a")]


@pytest.mark.parametrize("command", ["/regen", "/undo", "/retry"])
def test_nothing_to_take_back(command: str) -> None:
    talk = Talk(ScriptedModel(), Keys(command))
    assert talk.notes == f"luce: {command}: there is no message yet\n"
    assert talk.status == 2


def test_set_is_passed_on() -> None:
    keys = Keys(
        "/set temperature 0.5", "/set top-k 3", "/set parameter seed 9", "one", "/set temperature default", "two"
    )
    talk = Talk(ScriptedModel("a", "b"), keys)
    assert talk.model.options[0] == {"temperature": 0.5, "top_k": 3, "seed": 9}
    assert talk.model.options[1] == {"top_k": 3, "seed": 9}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("/set temperature 3", "luce: /set temperature: expected a number in [0, 2], got '3'\n"),
        ("/set frequency_penalty 2.5", "luce: /set frequency_penalty: expected a number in [-2, 2], got '2.5'\n"),
        ("/set seed x", "luce: /set seed: expected an integer in"),
        ("/set max_tokens 0", "luce: /set max_tokens: expected an integer in 1..2147483647, got '0'\n"),
        ("/set port 80", "luce: /set port: expected one of temperature, "),
        ("/set colour", "luce: /set: expected one of temperature, "),
        ("/set verbose maybe", "luce: /set verbose: expected on or off, got 'maybe'\n"),
        ("/show x", "luce: /show: expected info or parameters or system or template or tokens or devices, got 'x'\n"),
        ("/nonsense", "luce: /nonsense: unknown command; /? lists the commands\n"),
        ("/save", "luce: /save: expected a name without slashes, got ''\n"),
        ("/load ../x", "luce: /load: expected a name without slashes, got '../x'\n"),
        ("/export x.txt", "luce: /export: expected a file name that ends in .md or .json, got 'x.txt'\n"),
        ("/read /nowhere", "luce: /read /nowhere: No such file or directory\n"),
    ],
)
def test_wrong_commands_are_named_and_not_sent(command: str, message: str) -> None:
    talk = Talk(ScriptedModel(), Keys(command))
    assert talk.notes.startswith(message)
    assert talk.notes.count("\n") == 1
    assert talk.status == 2


def test_path_is_a_message() -> None:
    assert Talk(ScriptedModel("a"), Keys("/usr/bin is what?")).model.prompts == [[user("/usr/bin is what?")]]


def test_set_system() -> None:
    talk = Talk(ScriptedModel("a", "b"), Keys("/set system Be kind.", "one", "/set system", "two"))
    assert talk.model.prompts[0][0] == {"role": "system", "content": "Be kind."}
    assert talk.model.prompts[1][0] == user("one")


def test_show() -> None:
    keys = Keys("/show info", "/show parameters", "/show system", "/show template", "/show devices", "/show tokens")
    notes = Talk(ScriptedModel(), keys).notes
    assert "4,096 of 8,192 tokens" in notes
    assert "{{ messages }}" in notes
    assert "3.0 MiB" in notes
    rows = dict(line.split(maxsplit=1) for line in notes.splitlines() if len(line.split(maxsplit=1)) == 2)
    assert rows["temperature"].strip() == "0.7"
    assert rows["seed"].strip() == "random"


def test_help_names_every_command() -> None:
    notes = Talk(ScriptedModel(), Keys("/?")).notes
    for name in [
        "/help",
        "/?",
        "/bye",
        "/exit",
        "/quit",
        "/clear",
        "/reset",
        "/regen",
        "/undo",
        "/retry",
        "/set",
        "/show",
        "/save",
        "/load",
        "/export",
        "/read",
        "/edit",
    ]:
        assert name in notes.split()


def test_save_and_load(state: Path) -> None:
    first = Talk(ScriptedModel("ä\n"), Keys("one", "/save my talk"), system="S")
    path = state / "chats" / "my talk.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    second = Talk(ScriptedModel("b"), Keys("/load my talk", "two"))
    assert second.model.prompts == [[*first.chat.conversation.for_template(), user("two")]]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"messages": [{"role": "system", "content": ""}]}', b"\xff"])
def test_load_of_another_file(state: Path, content: bytes) -> None:
    path = state / "chats" / "x.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    talk = Talk(ScriptedModel("a"), Keys("one", "/load x"))
    assert talk.notes.startswith(f"luce: {path}: ")
    assert talk.notes.count("\n") == 1
    assert talk.chat.conversation.for_template() == [user("one"), assistant("a")]


def test_export(tmp_path: Path) -> None:
    markdown, plain = tmp_path / "x.md", tmp_path / "x.json"
    Talk(ScriptedModel("a"), Keys("one", f"/export {markdown}", f"/export {plain}"), system="S")
    assert markdown.read_text() == "## system\n\nS\n\n## user\n\none\n\n## assistant\n\na\n"
    assert json.loads(plain.read_text())["messages"] == [user("one"), assistant("a")]


def test_export_asks_before_it_replaces(tmp_path: Path) -> None:
    path = tmp_path / "x.md"
    path.write_text("precious")
    keys = Keys(f"/export {path}", answer=False)
    Talk(ScriptedModel(), keys)
    assert len(keys.questions) == 1
    assert path.read_text() == "precious"


def test_read_goes_in_front_of_one_message(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("content\n")
    talk = Talk(ScriptedModel("a", "b"), Keys(f"/read {path}", "sum up", "more"))
    assert talk.model.prompts[0] == [user("content\n\nsum up")]
    assert talk.model.prompts[1][-1] == user("more")


def test_read_asks_for_large_files(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("x" * 102401)
    keys = Keys(f"/read {path}", "hi", answer=False)
    talk = Talk(ScriptedModel("a"), keys)
    assert "102,401 bytes" in keys.questions[0]
    assert talk.model.prompts == [[user("hi")]]


def test_read_refuses_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"\xff\xfe")
    assert Talk(ScriptedModel(), Keys(f"/read {path}")).notes == f"luce: /read {path}: not a text file in UTF-8\n"


def test_home_directories_of_unknown_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    talk = Talk(ScriptedModel(), Keys("/read ~nobody-at-all/x", "/export ~nobody-at-all/x.md"))
    expected = "expected a path; there is no user ~nobody-at-all, got"
    assert talk.notes.splitlines() == [
        f"luce: /read: {expected} '~nobody-at-all/x'",
        f"luce: /export: {expected} '~nobody-at-all/x.md'",
    ]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("at", [0, 1])
def test_error_takes_the_turn_back(at: int, capsys: pytest.CaptureFixture[str]) -> None:
    pieces: list[Any] = ["part", BackendError("cpu:0: broke")]
    talk = Talk(ScriptedModel(pieces[1 - at :], "fine"), Keys("one", "two"))
    assert talk.notes == "luce: cpu:0: broke\n"
    assert talk.model.prompts[1] == [user("two")]
    assert talk.model.generations[0].closed
    assert talk.status == 6
    assert capsys.readouterr().out == ("part\n" if at else "") + "fine\n"


def test_error_of_regen_keeps_the_reply() -> None:
    talk = Talk(ScriptedModel("a", [ContextError("too long")]), Keys("one", "/regen"))
    assert talk.chat.conversation.for_template() == [user("one"), assistant("a")]


def test_notes_of_an_interactive_chat_have_no_escape_of_the_model() -> None:
    talk = Talk(ScriptedModel(), Keys("/set system \x1b]0;x\x07y", "/show system"))
    assert talk.notes.endswith("]0;xy\n")


def test_speed() -> None:
    def finish(cached: int) -> Finished:
        return Finished(FinishReason.EOS, "", Timings(cached_tokens=cached), 1)

    line: Callable[..., str] = speed
    times = [10.0, 10.25, 10.5, 10.75, 11.25]
    expected = "4 tok · 3.0 tok/s · first 0.25 s · prompt 4,120 (3,968 cached) · ctx 4,124/32,768"
    assert line(4, times, 4120, finish(3968), context=32768) == expected
    assert line(0, times[:1], 5, None, context=100) == "0 tok · prompt 5 · ctx 5/100"
    assert line(1, times[:2], 5, finish(0), context=100) == "1 tok · first 0.25 s · prompt 5 · ctx 6/100"
