"""Grammars of calls of a few tools in every format, and what they allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jsonschema

from luce.engine.sequence import Constraint
from luce.text.call_format import CallableTool, CallFormat
from luce.text.grammar import CompiledGrammar, GrammarCompiler, WantedReply
from luce.text.reply_format import ReplyFormat
from luce.text.tokenizer import Tokenizer
from tests.support.call_parts import printed
from tests.support.call_walks import ends, spelled, walk
from tests.support.masks import allowed_ids
from tests.support.tool_templates import TEMPLATES, byte_tokenizer, format_named

PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "inner": {"$ref": "#/$defs/place"}},
    "required": ["x"],
    "additionalProperties": False,
}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["celsius", "kelvin"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 20},
        "hourly": {"type": "boolean"},
        "near": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
        "place": {"$ref": "#/$defs/place"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["city", "days"],
    "$defs": {"place": PLACE},
}
TOOLS = (CallableTool("weather", PARAMETERS), CallableTool("stop", None), CallableTool("weather_now", PARAMETERS))
KNOWN = {tool.name: tool.parameters for tool in TOOLS}
#: made once: jsonschema.validate looks at the schema each time
VALIDATORS = {name: jsonschema.Draft202012Validator(schema or {"type": "object"}) for name, schema in KNOWN.items()}
CALLS: list[tuple[str, Any]] = [
    ("weather", {"city": "Oslo\n\nä<b>", "unit": "kelvin", "days": 3, "hourly": True}),
    ("weather_now", {"city": "x", "days": 20, "near": [1.5, -2], "place": {"x": 1, "inner": {"x": 2}}, "either": None}),
]
NAMES = sorted(TEMPLATES)


def compiled(name: str, form: CallFormat, *, special: bool = True, body: ReplyFormat | None = None) -> CompiledGrammar:
    tokenizer = byte_tokenizer(name, special=special)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab)
    try:
        return compiler.wait(WantedReply(body, form))
    finally:
        compiler.close()


def wanted(name: str, *tools: CallableTool, **options: bool) -> CallFormat:
    return CallFormat(format_named(name), tools or TOOLS, **options)


def text_of(name: str, calls: Sequence[tuple[str, Any]]) -> str:
    """Calls as the dialect's template prints them, without what stands before the first."""
    dialect = format_named(name)
    if dialect.section != ("", ""):
        # Jinja's trim_blocks takes the line feed in front of the bracket.
        return printed(name, "", calls).lstrip("\n").replace("}]</tool_call>", "}\n]</tool_call>")
    return dialect.between.join(printed(name, "", [call]).lstrip("\n") for call in calls)


def accepts(tokenizer: Tokenizer, constraint: Constraint, text: str) -> bool:
    """Whether the reply may be this text: every token may come, and the reply may end."""
    for token in tokenizer.encode(text, specials=True):
        if constraint.over or token not in allowed_ids(constraint):
            return False
        constraint.push(token)
    return ends(constraint)


def walked(name: str, constraint: Constraint, seed: int, *, special: bool = True) -> str | None:
    """The text of a random reply; None if it has no end."""
    ids = walk(name, constraint, seed, special=special)
    return None if ids is None else spelled(name, ids, special=special)
