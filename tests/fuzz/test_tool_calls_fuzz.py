"""Calls as models write them, which no template prints: JSON texts with any numbers, escapes and white space, in every
dialect, in random pieces. The judge is json.loads, which keeps the numbers' texts here."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from luce.text.reply_parser import CallArguments, CallStarted, Part, TextPart
from tests.support.call_parts import fed, parser, pieces, printed
from tests.support.tool_templates import TEMPLATES

TOOLS: dict[str, Any] = {"write": {"type": "object", "properties": {"n": {"type": "number"}, "o": {"type": "object"}}}}
#: stands in the printed call for what is written in its place
_NUMBER, _OBJECT = 918273645, {"stand": 546372819}
#: calls whose objects are JSON
_JSON = sorted(TEMPLATES.keys() - {"gemma4", "seed_oss"})

_NUMBERS = st.from_regex(
    re.compile(r"-?(0|[1-9][0-9]{0,40})(\.[0-9]{1,5})?([eE][-+]?[0-9]{1,3})?", re.ASCII), fullmatch=True
)
_SPACES = st.sampled_from(["", "", " ", "\n  "])
_STRINGS = st.lists(
    st.sampled_from(
        [
            *(r"\u0000", r"\ud83d\ude00", r"\ud800", r"\udc00", r"\u003c", r"\"", r"\\", r"\/", r"\n", r"\\ud800"),
            *("}", "{", "]", ",", ":", "'", "é", "\U0001f600", "\u2028", "<think>", "[ARGS]", "```"),
            *("<parameter=o>", "<arg_key>", "<tool_call>", "a", " ", "null", "<|call|>"),
        ]
    ),
    max_size=6,
).map(lambda parts: f'"{"".join(parts)}"')


def _joined(brackets: str, items: list[str], space: str) -> str:
    return brackets[0] + space + f"{space},{space}".join(items) + space + brackets[1]


def _objects(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    members = st.lists(st.tuples(_STRINGS, values), max_size=3, unique_by=lambda pair: plain(json.loads(pair[0])))
    return st.builds(
        lambda pairs, space: _joined("{}", [f"{key}{space}:{space}{value}" for key, value in pairs], space),
        members,
        _SPACES,
    )


_VALUES = st.recursive(
    _NUMBERS | _STRINGS | st.sampled_from(["true", "false", "null", "{}", "[]", '""']),
    lambda inner: _objects(inner) | st.builds(_joined, st.just("[]"), st.lists(inner, max_size=3), _SPACES),
    max_leaves=6,
)


def plain(value: Any) -> Any:
    """The value with U+FFFD for halves of surrogate pairs, which no reply can hold."""
    if isinstance(value, str):
        return re.sub("[\ud800-\udfff]", "\ufffd", value)
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def exact(text: str) -> Any:
    """A JSON value, its numbers as they are written."""
    return plain(json.loads(text, parse_int=lambda n: ["number", n], parse_float=lambda n: ["number", n]))


def arguments(parts: list[Part]) -> Any:
    """The arguments of the one call of a reply, which must be valid JSON that can be sent."""
    assert sum(isinstance(part, CallStarted) for part in parts) == 1, parts
    text = "".join(part.fragment for part in parts if isinstance(part, CallArguments))
    assert not any(part.text.strip() for part in parts if isinstance(part, TextPart)), parts
    text.encode()
    return exact(text)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", sorted(TEMPLATES))
@settings(max_examples=20, deadline=None, derandomize=True)
@given(number=_NUMBERS, cuts=st.lists(st.integers(0, 10_000), max_size=12))
@example(number="1e400", cuts=[40, 41, 42])
@example(number="-0", cuts=[])
@example(number="123456789012345678901234567890123456789", cuts=[50])
def test_numbers_come_as_they_were_written(name: str, special: bool, number: str, cuts: list[int]) -> None:
    text = printed(name, "", [("write", {"n": _NUMBER})]).replace(str(_NUMBER), number)
    parts = fed(parser(name, TOOLS, special=special), pieces(name, text, cuts, special=special))
    assert arguments(parts) == {"n": ["number", number]}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", _JSON)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(value=_objects(_VALUES), cuts=st.lists(st.integers(0, 10_000), max_size=12))
def test_objects_come_as_they_were_written(name: str, special: bool, value: str, cuts: list[int]) -> None:
    shown = json.dumps(_OBJECT)
    text = printed(name, "", [("write", {"o": _OBJECT})])
    assert text.count(shown) == 1
    parts = fed(parser(name, TOOLS, special=special), pieces(name, text.replace(shown, value), cuts, special=special))
    assert arguments(parts) == {"o": exact(value)}
    whole = fed(parser(name, TOOLS, special=special), pieces(name, text.replace(shown, value), special=special))
    assert whole == parts


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    at=st.integers(0, 10_000),
    instead=st.sampled_from(["", "nobody", '"', "{", "\n", "<"]),
    special=st.booleans(),
    cuts=st.lists(st.integers(0, 10_000), max_size=6),
)
def test_a_call_of_nobody_comes_back_as_its_text(
    name: str, at: int, instead: str, special: bool, cuts: list[int]
) -> None:
    """A name that is no tool's makes no call, wherever else the text is spoilt: every character comes back."""
    text = printed(name, "", [("write", {"n": 5, "o": {"a": ["b"]}})]).replace("write", "nobody")
    text = text[: at % len(text)] + instead + text[at % len(text) :]
    found = parser(name, TOOLS, special=special)
    parts = fed(found, pieces(name, text, cuts, special=special))
    assert all(isinstance(part, TextPart) for part in parts)
    assert "".join(part.text for part in parts if isinstance(part, TextPart)) == text
