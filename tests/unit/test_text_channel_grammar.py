"""luce/text/channel_grammar.py: which replies in harmony's format the grammars of bodies and calls allow. Expectations
are written by hand from openai/harmony's docs/format.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from luce.engine.sequence import Constraint
from luce.models.calls import Calls
from luce.models.tool_formats import HERMES
from luce.text.call_format import CallableTool, CallFormat
from luce.text.call_parser import CallParser
from luce.text.channel_splitter import ChannelSplitter
from luce.text.constraint import GrammarConstraint
from luce.text.grammar import GrammarCompiler, WantedReply
from luce.text.reasoning import Place, ReasoningTokens
from luce.text.reply_format import ReplyFormat
from luce.text.reply_parser import CallArguments, CallStarted, Part, ReplyParser, TextPart
from tests.support.harmony import channels, dialect, marks, tokenizer
from tests.support.masks import allowed_ids

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
BODY = ReplyFormat("json_schema", {**PARAMETERS, "properties": {"b": {"const": 1}}, "required": ["b"]})
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
#: 50 digits, and an odd number of quotes, in front of JSON
ANALYSIS = f'<|channel|>analysis<|message|>Think "it, {"1" * 30}.{NEXT}'
PREAMBLE = f"<|channel|>commentary<|message|>Plan.{NEXT}"
CALL = '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"a": 1}'
IN_ROLE = ' to=functions.get<|channel|>commentary <|constrain|>json<|message|>{"a": 1}'
AS_RENDERED = ' to=functions.get<|channel|>commentary json<|message|>{"a": 1}'


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    found = GrammarCompiler(tokenizer(), tokenizer().vocab)
    yield found
    found.close()


def tools(calls: Calls | None = None, **options: bool) -> CallFormat:
    known = CallableTool("get", PARAMETERS), CallableTool("stop", None)
    return CallFormat(calls or dialect().calls, known, **options)


def constraint(compiler: GrammarCompiler, wanted: WantedReply, place: Place) -> Constraint:
    # What the markers of the reasoning are does not matter to a reply of channels.
    found = ReasoningTokens(0, 1, place == "reasoning", channels=(channels(), place))
    return compiler.wait(wanted, found).constraint(found)


def allows(state: Constraint, text: str) -> bool:
    """Whether the reply may be this text: every token may come, and the reply may end."""
    for token in tokenizer().encode(text, specials=True):
        if state.over or token not in allowed_ids(state):
            return False
        state.push(token)
    assert isinstance(state, GrammarConstraint)
    return state.over or state.may_end


#: what a reply begins with, by where the prompt ends
OPENINGS: dict[Place, str] = {"header": "", "reasoning": f"more{NEXT}", "content": f"more{NEXT}"}


@pytest.mark.parametrize("place", OPENINGS)
def test_text_may_end_with_a_call(compiler: GrammarCompiler, place: Place) -> None:
    opening, wanted = OPENINGS[place], WantedReply(None, tools())
    for text in (
        *(CALL, IN_ROLE, AS_RENDERED, ANALYSIS + CALL, ANALYSIS + ANALYSIS + AS_RENDERED, PREAMBLE + CALL),
        *(ANALYSIS + PREAMBLE + ANALYSIS + CALL, f"{FINAL}Hi", f"{ANALYSIS}{FINAL}Hi 5.<|end|>", f"{FINAL}"),
        "<|channel|>commentary<|message|>Only this",
        CALL.replace("get", "stop").replace('"a": 1', ""),
    ):
        assert allows(constraint(compiler, wanted, place), opening + text), text
    for text in (
        *(ANALYSIS, CALL.replace('"a"', '"b"'), IN_ROLE.replace("get", "gets"), CALL[:-1], f"{FINAL}Hi{NEXT}"),
        *("<|channel|>summary<|message|>x", CALL.replace("commentary", "analysis"), f"{CALL}x", CALL * 2),
        *("<|channel|>analysis<|message|>x", "<|start|>assistant" + CALL),
    ):
        assert not allows(constraint(compiler, wanted, place), opening + text), text
    assert allows(constraint(compiler, wanted, place), "Hi") is (place == "content")


@pytest.mark.parametrize("place", OPENINGS)
def test_a_call_that_must_come_comes_behind_the_reasoning(compiler: GrammarCompiler, place: Place) -> None:
    opening, wanted = OPENINGS[place], WantedReply(None, tools(required=True))
    for text in (CALL, IN_ROLE, AS_RENDERED):
        assert allows(constraint(compiler, wanted, place), opening + text), text
    # One message of reasoning.
    assert allows(constraint(compiler, wanted, place), opening + ANALYSIS + CALL) is (place != "reasoning")
    for text in (ANALYSIS + ANALYSIS + CALL, PREAMBLE + CALL, f"{FINAL}Hi", f"{ANALYSIS}{FINAL}Hi", ANALYSIS, "Hi", ""):
        assert not allows(constraint(compiler, wanted, place), opening + text), text


@pytest.mark.parametrize("place", OPENINGS)
@pytest.mark.parametrize(
    ("form", "body", "other"),
    [
        (BODY, '{"b": 1}', '{"b": 2}'),
        (ReplyFormat("json_object", None), '{"b": [1]}', "[1]"),
        (ReplyFormat("regex", "[ab]+"), "ab", "c"),
        (ReplyFormat("choice", ("yes", "no")), "no", "maybe"),
        (ReplyFormat("grammar", 'start: "x"+'), "xx", "xy"),
    ],
    ids=lambda part: part.kind if isinstance(part, ReplyFormat) else "",
)
def test_a_body_is_the_final_message(
    compiler: GrammarCompiler, place: Place, form: ReplyFormat, body: str, other: str
) -> None:
    opening, wanted = OPENINGS[place], WantedReply(form)
    if place == "content":
        # The prompt has begun the final message.
        assert allows(constraint(compiler, wanted, place), body)
        assert not allows(constraint(compiler, wanted, place), other)
        assert not allows(constraint(compiler, wanted, place), FINAL + body)
        return
    assert allows(constraint(compiler, wanted, place), opening + FINAL + body)
    assert allows(constraint(compiler, wanted, place), opening + ANALYSIS + FINAL + body) is (place == "header")
    for text in (ANALYSIS * 2 + FINAL + body, body, FINAL + other, PREAMBLE + FINAL + body, ANALYSIS + CALL, ANALYSIS):
        assert not allows(constraint(compiler, wanted, place), opening + text), text


def test_a_reply_is_a_call_or_the_body(compiler: GrammarCompiler) -> None:
    wanted = WantedReply(BODY, tools())
    for text in (ANALYSIS + CALL, f'{ANALYSIS}{FINAL}{{"b": 1}}', CALL):
        assert allows(constraint(compiler, wanted, "header"), text), text
    for text in (f"{ANALYSIS}{FINAL}Hi", PREAMBLE + CALL, f'{FINAL}{{"a": 1}}'):
        assert not allows(constraint(compiler, wanted, "header"), text), text
    # Inside the final message nothing but the body is left.
    assert allows(constraint(compiler, wanted, "content"), '{"b": 1}')
    assert not allows(constraint(compiler, wanted, "content"), f"more{NEXT}{CALL}")


def test_calls_of_another_dialect_stand_in_the_final_message(compiler: GrammarCompiler) -> None:
    call = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'
    for required in (True, False):
        wanted = WantedReply(None, tools(HERMES, required=required))
        assert allows(constraint(compiler, wanted, "header"), ANALYSIS + FINAL + call)
        assert allows(constraint(compiler, wanted, "header"), f"{FINAL}So: {call}") is not required
        assert not allows(constraint(compiler, wanted, "header"), ANALYSIS + FINAL + call.replace("1", "x"))
        assert not allows(constraint(compiler, wanted, "header"), call)


@pytest.mark.parametrize("required", [True, False])
def test_what_the_grammar_allows_is_read_as_text_or_a_valid_call(compiler: GrammarCompiler, required: bool) -> None:
    wanted, known = WantedReply(None, tools(required=required)), {"get": PARAMETERS, "stop": None}
    ended = called = 0
    for seed in range(40):
        state, random = constraint(compiler, wanted, "header"), np.random.default_rng(seed)
        parser = ReplyParser(
            ChannelSplitter(marks(), marks().marked("<|start|>assistant"), calls=True), CallParser(marks(), known)
        )
        parts: list[Part] = []
        for _ in range(600):
            assert isinstance(state, GrammarConstraint)
            now = allowed_ids(state) - tokenizer().eos_ids
            if state.over or not now or (state.may_end and random.random() < 0.3):
                break
            special = [token for token in now if token > 255]
            chosen = special if special and random.random() < 0.5 else sorted(now)
            token = int(random.choice(chosen))
            state.push(token)
            text = marks().of_token.get(token) or chr(token) if token < 128 or token > 255 else "?"
            parts += parser.push(token, text)
        else:
            continue
        parts += parser.flush("")
        ended += 1
        started = [part.name for part in parts if isinstance(part, CallStarted)]
        assert not parser.bad_calls and not parser.cut_calls and len(started) <= 1
        called += len(started)
        if started:
            arguments = json.loads("".join(part.fragment for part in parts if isinstance(part, CallArguments)))
            jsonschema.validate(arguments, known[started[0]] or {"type": "object"})
        assert started or not required
        assert not (required and any(isinstance(part, TextPart) for part in parts))
    assert ended > 20 and called > 5
