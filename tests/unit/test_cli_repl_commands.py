"""The chat's commands and messages, with a scripted model and scripted keys."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from luce.cli.repl import conversation
from luce.cli.repl.show import TOPICS
from luce.errors import BackendError, ContextError
from tests.support.scripted_chat import ScriptedModel
from tests.support.talk import Keys, Talk


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
    assert [message.content for message in talk.session.conversation.messages] == ["hi", "Hello, you"]


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
    assert talk.session.conversation.for_template() == [user("one"), assistant("c")]


def test_retry_edits_the_last_message() -> None:
    keys = Keys("one", "/retry", "other")
    talk = Talk(ScriptedModel("a", "b"), keys)
    assert keys.defaults[2] == "one"
    assert talk.model.prompts[1] == [user("other")]


def test_retry_that_ends_keeps_the_turn() -> None:
    talk = Talk(ScriptedModel("a"), Keys("one", "/retry"))
    assert talk.session.conversation.for_template() == [user("one"), assistant("a")]


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
        ("/set max_tokens 0", "luce: /set max_tokens: expected an integer in 1..2147483647 (4k is 4096), got '0'\n"),
        ("/set port 80", "luce: /set port: expected one of temperature, "),
        ("/set colour", "luce: /set: expected one of temperature, "),
        ("/set verbose maybe", "luce: /set verbose: expected on or off, got 'maybe'\n"),
        (
            "/show x",
            "luce: /show: expected info or parameters or system or template or tokens or devices or "
            "cache or reasoning, got 'x'\n",
        ),
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


def test_show_cuts_no_path_at_a_terminal() -> None:
    model = ScriptedModel()
    model.path = Path("/folder" * 20) / "model.gguf"
    notes = Talk(model, Keys("/show info"), width=80).notes
    assert "\u2026" not in notes and str(model.path) in "".join(notes.split())


def test_help_is_not_cut_at_a_terminal() -> None:
    notes = Talk(ScriptedModel(), Keys("/?"), width=80).notes
    first = "".join(line[:40].strip() for line in notes.splitlines())
    assert "\u2026" not in notes and f"/show{'|'.join(TOPICS)}" in first


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
        "/glob",
        "/unread",
    ]:
        assert name in notes.split()


def test_save_and_load(state: Path) -> None:
    first = Talk(ScriptedModel("ä\n"), Keys("one", "/save my talk"), system="S")
    path = state / "chats" / "my talk.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    second = Talk(ScriptedModel("b"), Keys("/load my talk", "two"))
    assert second.model.prompts == [[*first.session.conversation.for_template(), user("two")]]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"messages": [{"role": "system", "content": ""}]}', b"\xff"])
def test_load_of_another_file(state: Path, content: bytes) -> None:
    path = state / "chats" / "x.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    talk = Talk(ScriptedModel("a"), Keys("one", "/load x"))
    assert talk.notes.startswith(f"luce: {path}: ")
    assert talk.notes.count("\n") == 1
    assert talk.session.conversation.for_template() == [user("one"), assistant("a")]


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
    assert talk.session.conversation.for_template() == [user("one"), assistant("a")]


def test_notes_of_an_interactive_chat_have_no_escape_of_the_model() -> None:
    talk = Talk(ScriptedModel(), Keys("/set system \x1b]0;x\x07y", "/show system"))
    assert talk.notes.endswith("]0;xy\n")


def think(*pieces: str) -> list[str]:
    return ["<think>", *pieces, "</think>", "the answer"]


def test_read_that_does_not_fit_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("x" * 5000)
    talk = Talk(ScriptedModel("a", "b"), Keys("one", f"/read {path}", "two"))
    used = len(json.dumps([user("one"), assistant("a")]))
    assert talk.notes == (
        f"luce: /read {path}: 5,000 tokens do not fit: {4096 - used:,} of the context's 4,096 are free\n"
    )
    assert talk.model.prompts[1] == [user("one"), assistant("a"), user("two")]


def test_a_second_read_counts_the_first(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("x" * 2500)
    talk = Talk(ScriptedModel("a"), Keys(f"/read {path}", f"/read {path}", "two"))
    assert "2,500 tokens do not fit: 1,5" in talk.notes
    assert talk.model.prompts == [[user("x" * 2500 + "\n\ntwo")]]


def test_a_text_far_too_long_is_refused_by_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("x" * 100_000)
    model = ScriptedModel()
    counted = []
    tokenize = model.tokenize
    model.tokenize = lambda text, **options: counted.append(len(text)) or tokenize(text, **options)  # type: ignore
    talk = Talk(model, Keys(f"/read {path}"))
    assert "at least 65,536 tokens do not fit: 4,096 of" in talk.notes
    assert counted == [16 * 4096]


def test_unread(tmp_path: Path) -> None:
    one, two = tmp_path / "1.txt", tmp_path / "2.txt"
    one.write_text("first")
    two.write_text("second")
    keys = Keys(f"/read {one}", f"/read {two}", "/unread", "hi", "/unread")
    talk = Talk(ScriptedModel("a"), keys)
    assert talk.model.prompts == [[user("first\n\nhi")]]
    assert talk.notes.splitlines()[-1] == "luce: /unread: there is no text in front of your next message"


def test_a_failed_message_keeps_its_texts_until_they_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("content")
    model = ScriptedModel([ContextError("too long")], [ContextError("too long")], "fine")
    talk = Talk(model, Keys(f"/read {path}", "one", "two", "/unread", "three"))
    assert talk.notes.count(f"luce: too long; /unread drops {path}\n") == 2
    assert model.prompts == [[user("content\n\none")], [user("content\n\ntwo")], [user("three")]]


def test_read_refuses_what_has_no_end() -> None:
    assert Talk(ScriptedModel(), Keys("/read /dev/zero")).notes == "luce: /read /dev/zero: not a regular file\n"


def test_glob(tmp_path: Path) -> None:
    for name in ("b.md", "a.md", "c.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    talk = Talk(ScriptedModel("a"), Keys(f"/glob {tmp_path}/*.md", "sum up"))
    files = [f"{tmp_path}/{name}:\n\ntext of {name}" for name in ("a.md", "b.md")]
    assert talk.model.prompts == [[user("\n\n".join([*files, "sum up"]))]]
    assert f"{tmp_path}/b.md, 12 bytes\n2 files, 24 bytes, " in talk.notes


def test_glob_asks_for_large_files_together(tmp_path: Path) -> None:
    for name in ("1", "2"):
        (tmp_path / name).write_text("x" * 60_000)
    keys = Keys(f"/glob {tmp_path}/*", answer=False)
    Talk(ScriptedModel(), keys)
    assert keys.questions == ["2 files have 120,000 bytes; read them?"]


def test_glob_takes_all_files_or_none(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("text")
    (tmp_path / "2").write_bytes(b"\xff")
    talk = Talk(ScriptedModel("a"), Keys(f"/glob {tmp_path}/*", "hi"))
    assert f"luce: /glob {tmp_path}/2: not a text file in UTF-8\n" in talk.notes
    assert talk.model.prompts == [[user("hi")]]
    assert Talk(ScriptedModel(), Keys("/glob /nowhere/*")).notes == "luce: /glob /nowhere/*: no file matches\n"


def test_commands_run_only_where_the_flag_allows_it() -> None:
    talk = Talk(ScriptedModel(), Keys("!echo hi"))
    assert talk.notes == "luce: !echo hi: commands run only with luce chat --allow-shell\n"
    assert talk.status == 2


def test_output_of_a_command_goes_in_front_of_the_next_message() -> None:
    keys = Keys("!printf 'a\\033[1mb\\n'; exit 3", "what?")
    talk = Talk(ScriptedModel("x"), keys, allow_shell=True)
    assert talk.notes.startswith("a[1mb\nexit status 3\n")
    assert talk.model.prompts[0][0]["content"].endswith("\na\x1b[1mb\n\nwhat?")


def test_think_is_a_variable_of_the_template() -> None:
    keys = Keys("/set think off", "one", "/set think on", "two", "/set think default", "three")
    talk = Talk(ScriptedModel("a", "b", "c"), keys)
    assert talk.model.chat.variables == [{"enable_thinking": False}, {"enable_thinking": True}, {}]
    assert [options.get("reasoning_budget") for options in talk.model.options] == [0, None, None]


def test_think_takes_efforts_and_budgets() -> None:
    keys = Keys("/set think high", "one", "/set think 1k", "two", "/set think 0", "three")
    talk = Talk(ScriptedModel("a", "b", "c"), keys)
    assert talk.model.chat.variables == [{"enable_thinking": True}] * 3
    assert [options["reasoning_budget"] for options in talk.model.options] == [800, 1024, 0]
    assert "think high, folded\nthink 1024, folded\nthink 0, folded\n" in talk.notes


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "/set think -1",
            "/set think: expected show, hide, default, on, off, minimal, low, medium, high, xhigh, max or ",
        ),
        ("/set think maybe", "/set think: expected show, hide, default, on, off, minimal, low, medium, high, xhigh, "),
        ("/set format /nowhere", "/set format /nowhere: No such file or directory"),
    ],
)
def test_settings_that_the_model_does_not_know(command: str, message: str) -> None:
    talk = Talk(ScriptedModel("a"), Keys(command, "one"))
    assert talk.notes.startswith(f"luce: {message}")
    assert talk.model.prompts == [[user("one")]]


def test_reasoning_is_kept_apart(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Talk(ScriptedModel(think("hm")), Keys("one", "/show reasoning"))
    assert capsys.readouterr() == ("the answer\n", "")
    assert talk.session.conversation.for_template()[1] == {**assistant("the answer"), "reasoning_content": "hm"}
    assert talk.notes == "hm\n"


def test_reasoning_of_a_pipe_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    Talk(ScriptedModel(think("h\x1b]m", "m")), Keys("/set think show", "one"))
    assert capsys.readouterr() == ("the answer\n", "h]mm\n\n")


def test_show_cache() -> None:
    notes = Talk(ScriptedModel(), Keys("/show cache")).notes
    assert "3.0 of 1,024 MiB, 2 snapshots" in notes
    assert "3 of 4 prompts" in notes


def test_load_lists_what_is_saved(state: Path) -> None:
    Talk(ScriptedModel("a"), Keys("tell me about\nfoxes", "/save animals"))
    (state / "chats" / "broken.json").write_text("{")
    lines = Talk(ScriptedModel(), Keys("/load")).notes.splitlines()
    assert any(
        re.search(r"animals +\d{4}-\d\d-\d\d \d\d:\d\d +2 messages +tell me about foxes", line) for line in lines
    )
    assert any("broken" in line for line in lines)
    assert "no conversation is saved" not in "".join(lines)


def test_load_without_anything_saved() -> None:
    assert Talk(ScriptedModel(), Keys("/load")).notes == "no conversation is saved; /save NAME saves this one\n"


def test_the_last_conversation_is_kept(state: Path) -> None:
    path = state / "last-chat.json"
    Talk(ScriptedModel("a"), Keys("one"), keep=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert conversation.read(path).for_template() == [user("one"), assistant("a")]
    Talk(ScriptedModel("b"), Keys("/set nohistory", "secret"), keep=True)
    assert "secret" not in path.read_text()


def test_a_disk_that_is_full_loses_no_reply(state: Path) -> None:
    state.write_text("a file where the directory should be")
    talk = Talk(ScriptedModel("a", "b"), Keys("one", "two"), keep=True)
    assert len(talk.model.prompts) == 2
    assert talk.notes.startswith("this conversation is not kept: ")
