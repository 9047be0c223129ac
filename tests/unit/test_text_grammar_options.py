"""What settings say about grammars: the white space of JSON, and how large schemas and tools may be."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from luce.config.settings import Config
from luce.errors import RequestError
from luce.models.calls import Json
from luce.models.tool_formats import TOOL_FORMATS
from luce.text.call_format import CallableTool, CallFormat
from luce.text.grammar import CompiledGrammar, GrammarCompiler, WantedReply
from luce.text.grammar_options import GrammarOptions
from luce.text.reply_format import ReplyFormat
from tests.support.call_walks import spelled, walk
from tests.support.masks import allowed_ids
from tests.support.tool_templates import byte_tokenizer, format_named

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "first": {"type": "integer", "minimum": 0, "maximum": 9},
        "second": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
        "third": {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"enum": ["x"]}},
            "required": ["a", "b"],
        },
    },
    "required": ["first", "second", "third"],
    "additionalProperties": False,
}
SCHEMA["properties"]["third"] |= {"required": ["a", "b"], "additionalProperties": False}
JSON_DIALECTS = [calls.format for calls in TOOL_FORMATS if isinstance(calls.arguments, Json) and not calls.message]


def compiled(options: GrammarOptions, wanted: WantedReply, name: str = "hermes") -> CompiledGrammar:
    compiler = GrammarCompiler(byte_tokenizer(name), byte_tokenizer(name).vocab, options)
    try:
        return compiler.wait(wanted)
    finally:
        compiler.close()


def options(**settings: Any) -> GrammarOptions:
    return GrammarOptions.of(Config(**settings))


def forced(grammar: CompiledGrammar, seed: int) -> tuple[str, float]:
    """A random reply, and the share of its tokens that were the only ones allowed."""
    constraint, random = grammar.constraint(), np.random.default_rng(seed)
    ids: list[int] = []
    alone = 0
    while not constraint.over:
        now = sorted(allowed_ids(constraint) - byte_tokenizer("hermes").eos_ids)
        alone += len(now) == 1
        ids.append(int(random.choice(now)))
        constraint.push(ids[-1])
    return spelled("hermes", ids), alone / len(ids)


def test_compact_json_is_that_of_json_dumps_and_more_of_it_is_forced() -> None:
    wanted = WantedReply(ReplyFormat("json_schema", SCHEMA))
    compact, flexible = (compiled(options(json_spacing=mode), wanted) for mode in ("compact", "flexible"))
    spaced = 0
    for seed in range(5):
        text, share = forced(compact, seed)
        assert text == json.dumps(json.loads(text))
        other, less = forced(flexible, seed)
        spaced += other != json.dumps(json.loads(other))
        assert share > less
    assert spaced


@pytest.mark.parametrize("name", JSON_DIALECTS)
def test_compact_calls_are_those_of_json_dumps(name: str) -> None:
    form = CallFormat(format_named(name), (CallableTool("go", SCHEMA),), required=True, parallel=False)
    for seed in range(3):
        text = walk(name, compiled(options(json_spacing="compact"), WantedReply(None, form), name).constraint(), seed)
        assert text is not None
        whole = spelled(name, text)
        begin = whole.index('{"')
        value, _ = json.JSONDecoder().raw_decode(whole, begin)
        assert whole[begin:].startswith(json.dumps(value))


def test_schemas_and_tools_have_the_limits_of_the_settings() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x" * 1500]}}}
    body = WantedReply(ReplyFormat("json_schema", schema))
    form = CallFormat(format_named("hermes"), (CallableTool("go", schema),), required=True)
    for wanted, name in ((body, "schema_max_kib"), (WantedReply(None, form), "tools_max_kib")):
        with pytest.raises(RequestError, match=r"1 KiB, expected at most 1$") as refused:
            compiled(options(**{name: 1}), wanted)
        assert refused.value.code == "schema_too_complex"
        compiled(options(**{name: 2}), wanted)
