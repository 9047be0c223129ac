"""The verb run, on a tiny model and on scripted ones."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from luce.cli import run as run_verb
from luce.cli.arguments import settings
from luce.cli.main import main, parse
from tests.support.scripted_chat import LoadedModel, ScriptedModel
from tests.support.standard_streams import TerminalStream, no_input
from tests.support.terminal import ROOT
from tools.terminal import interruptible

__all__ = ["no_input"]
MODEL = ROOT / "tests/reference/qwen3-a-MIX.gguf"
THINKING = ["<think>", "h", "m", "</think>", "yes", "."]


def test_flags_as_people_type_them(scripted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = scripted("Fine.")
    assert main(["run", "x.gguf", "hi", "--temp", "0", "-n", "2k", "--seed", "3"]) == 0
    assert model.options == [{"max_tokens": 2048, "seed": 3}]
    assert settings(parse(["run", "x.gguf", "hi", "--temp", "0.5", "--max-ctx", "4k"])).temperature == 0.5
    assert main(["run", "x.gguf", "hi", "--seed", "x"]) == 2
    assert capsys.readouterr().err.startswith("luce: --seed: expected an integer in ")


def test_a_prompt_that_does_not_fit_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for context, advice in (("256", "shorten it, or raise --max-ctx (the model"), ("4096", "shorten it: the model")):
        assert main(["run", str(MODEL), "word " * 5000, "--max-ctx", context]) == 1
        error = capsys.readouterr().err
        assert re.fullmatch(r"luce: the prompt has [\d,]+ tokens and the context [\d,]+: .* \d,\d+ tokens\)?\n", error)
        assert advice in error


def test_a_schema_that_cannot_be_enforced_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "not": {}}')
    command = ["run", str(MODEL), "hi", "--schema", str(schema), "--max-ctx", "256", "--kv-cache-dir", "off"]
    assert main(command) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"luce: --schema {schema}: ") and printed.err.count("\n") == 1
    assert "not" in printed.err and printed.out == ""


def test_run_needs_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(MODEL)]) == 2
    assert capsys.readouterr().err == "luce: PROMPT: missing; give a prompt or pipe one in\n"


def test_run_is_the_same_twice(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["run", str(MODEL), "ab", "-s", "S", "-o", "temperature=0", "--max-tokens", "4", "--max-ctx", "512"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    *tokens, end = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "".join(token["text"] for token in tokens) + "\n" == text
    assert {token["event"] for token in tokens} == {"token"}
    assert (end["event"], end["reason"], end["predicted_tokens"]) == ("end", "length", 4)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(*replies: Any) -> LoadedModel:
        model = LoadedModel(*replies)
        monkeypatch.setattr(run_verb, "open_model", lambda path, config, on_progress: model)
        return model

    return install


def test_run_joins_prompt_and_input(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = scripted("Fine.")
    monkeypatch.setattr("sys.stdin", io.StringIO("a file\n"))
    assert main(["run", "x.gguf", "sum up", "-s", "S", "-o", "seed=3", "-o", "top-k=2"]) == 0
    system = {"role": "system", "content": "S"}
    assert model.prompts == [[system, {"role": "user", "content": "sum up\n\na file\n"}]]
    assert model.options == [{"seed": 3, "top_k": 2}]
    assert capsys.readouterr() == ("Fine.\n", "")


def test_run_prints_the_text_that_a_deadline_cuts_off(scripted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    scripted("Fine,", "Fine,").held = " thanks"
    assert main(["run", "x.gguf", "hi"]) == 0
    assert capsys.readouterr().out == "Fine, thanks\n"
    assert main(["run", "x.gguf", "hi", "--json"]) == 0
    *tokens, end = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "".join(token["text"] for token in tokens) == "Fine,"
    assert (end["reason"], end["text"]) == ("deadline", " thanks")


def test_run_keeps_reasoning_off_standard_output(scripted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = scripted(THINKING, THINKING, THINKING, ["<think>", "h"])
    assert main(["run", "x.gguf", "hi"]) == 0
    assert capsys.readouterr() == ("yes.\n", "")
    assert main(["run", "x.gguf", "hi", "--think", "show"]) == 0
    assert capsys.readouterr() == ("yes.\n", "hm\n\n")
    assert main(["run", "x.gguf", "hi", "--think", "off"]) == 0
    assert model.chat.variables == [{}, {}, {"enable_thinking": False}]
    capsys.readouterr()
    assert main(["run", "x.gguf", "hi", "--think", "show"]) == 0  # a reply without an answer
    assert capsys.readouterr() == ("", "h\n\n")


def test_run_marks_reasoning_in_its_events(scripted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    scripted(THINKING, ["<think>", "h", " "])
    assert main(["run", "x.gguf", "hi", "--json"]) == 0
    *tokens, end = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [token["reasoning"] for token in tokens] == ["", "h", "m", "", "", ""]
    assert [token["text"] for token in tokens] == ["", "", "", "", "yes", "."]
    assert [token["id"] for token in tokens] == [1, 2, 3, 4, 5, 6]
    assert (end["text"], end["reasoning"]) == ("", "")
    model = scripted(["<think>", "h"])
    model.held = "m"
    assert main(["run", "x.gguf", "hi", "--json"]) == 0
    end = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (end["text"], end["reasoning"]) == ("", "m")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "maybe",
            "--think: expected show, hide, default, on, off, minimal, low, medium, high, xhigh, max or a number of "
            "tokens, got 'maybe'",
        ),
        ("low", "--think: think low: the model's chat template has no enable_thinking or thinking"),
        ("off", "--think: think off: the model's chat template has no enable_thinking or thinking"),
        ("9", "--think: think 9: this model has no marker that ends its reasoning"),
    ],
)
def test_run_refuses_think(scripted: Any, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = scripted("Fine.")
    model.chat.template.source, model.chat.marked = "{{ messages }}", False
    assert main(["run", "x.gguf", "hi", "--think", value]) == 2
    assert capsys.readouterr().err == f"luce: {message}\n"


@pytest.mark.parametrize(
    ("value", "budget", "variables"),
    [
        ("2k", 2048, {"enable_thinking": True}),
        ("0", 0, {"enable_thinking": True}),
        ("off", 0, {"enable_thinking": False}),
        ("medium", 400, {"enable_thinking": True}),
        ("on", None, {"enable_thinking": True}),
        ("default", None, {}),
    ],
)
def test_run_limits_the_reasoning(scripted: Any, value: str, budget: int | None, variables: dict[str, Any]) -> None:
    model = scripted("Fine.", "Fine.")
    assert main(["run", "x.gguf", "hi", "--think", value]) == 0
    assert model.options[0].get("reasoning_budget") == budget
    assert model.chat.variables == [variables]
    model.chat.template.source = "{{ messages }}{{ reasoning_effort }}<think>"
    assert main(["run", "x.gguf", "hi", "--think", "low"]) == 0
    assert model.chat.variables[1] == {"reasoning_effort": "low"} and model.options[1]["reasoning_budget"] == 100


def test_run_without_a_template_continues_the_text(scripted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = scripted()
    model.chat.template = None
    given: list[Any] = []

    def generate(ids: Any, *, split: bool, **options: Any) -> Any:
        given.append((ids, split))
        return ScriptedModel("more").generate(b"[]", split=True, **options)

    model.generate = generate
    assert main(["run", "x.gguf", "Once upon"]) == 0
    assert given == [("Once upon", False)]
    assert capsys.readouterr().out == "more\n"


def test_run_without_a_template_takes_no_system_message(scripted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    scripted().chat.template = None
    assert main(["run", "x.gguf", "Once upon", "-s", "Be brief."]) == 2
    message = "luce: --system: the model file has no chat template; leave it out, or set --chat-template\n"
    assert capsys.readouterr().err == message


def test_run_takes_a_prompt_behind_flags(scripted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = scripted("Fine.")
    assert main(["run", "x.gguf", "--max-tokens", "4", "hi"]) == 0
    assert model.prompts == [[{"role": "user", "content": "hi"}]]
    assert main(["run", "x.gguf", "--max-tokens", "4", "hi", "there"]) == 2
    assert capsys.readouterr().err == "luce: there: unknown (luce run --help tells more)\n"


def test_run_strips_control_characters_on_a_terminal_only(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, expected in ((TerminalStream(), "a[31mb\n"), (io.StringIO(), "a\x1b[31mb\n")):
        scripted("a\x1b[31mb")
        monkeypatch.setattr("sys.stdout", stream)
        assert main(["run", "x.gguf", "hi"]) == 0
        assert stream.getvalue() == expected


def test_run_ends_with_130_on_ctrl_c() -> None:
    code = (
        "import sys\nfrom luce.cli import run as run_verb\nfrom luce.cli.main import main\n"
        "from tests.support.scripted_chat import HANG, LoadedModel\n"
        "run_verb.open_model = lambda path, config, on_progress: LoadedModel(['begun', HANG])\n"
        "sys.exit(main(['run', 'x.gguf', 'hi']))"
    )
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, preexec_fn=interruptible, **pipes) as child:  # type: ignore[call-overload]
        assert child.stdout.read(5) == "begun"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate()
    assert child.returncode == 130
    # The shell's prompt begins a line of its own.
    assert (out, err) == ("\n", "")
