"""Keyword arguments against Python's own parser, in any pieces."""

from __future__ import annotations

import ast
import json
import keyword
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from luce.text.keyword_reader import KeywordReader, is_keyword
from luce.text.tool_history import call_text
from tests.support.tool_templates import format_named

# repr escapes what is not printable in ways that JSON has not.
_TEXTS = st.text(
    st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp", "Zs"]) | st.sampled_from(" \n\t'\"\\")
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=8,
)
_ARGUMENTS = st.dictionaries(_TEXTS | st.sampled_from(["city", "días", "_x", "a-b"]), _VALUES, max_size=4)


def read(text: str, cuts: list[int]) -> tuple[str, KeywordReader, str]:
    """What goes out of a text that comes in pieces, the reader, and the text that it leaves."""
    reader, out, at = KeywordReader(), "", 0
    for end in [*sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]:
        more, at = reader.read(text[:end], at)
        out += more
        json.loads(out + reader.closing)
    return out, reader, text[at:]


def evaluated(call: str) -> dict[str, Any]:
    """The arguments of a call as Python reads them."""
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call) and not node.args
    found: dict[str, Any] = {}
    for each in node.keywords:
        value = ast.literal_eval(each.value)
        found |= value if each.arg is None else {each.arg: value}
    return found


# Python normalises the one name, and its identifiers have characters like that of the other.
@example({"µ": 1, "a·": 2}, [], False)
@given(_ARGUMENTS, st.lists(st.integers(0, 10**6), max_size=5), st.booleans())
def test_what_python_reads(arguments: dict[str, Any], cuts: list[int], by_repr: bool) -> None:
    if by_repr:
        parts = (f"{k}={v!r}" if is_keyword(k) else f"**{{{k!r}: {v!r}}}" for k, v in arguments.items())
        call = f"f({', '.join(parts)})"
    else:
        call = call_text(format_named("lfm2"), "f", arguments)
    # Words of the language are names for the reader alone.
    if not any(map(keyword.iskeyword, arguments)):
        assert evaluated(call) == arguments
    out, reader, rest = read(call.removeprefix("f("), cuts)
    assert reader.done and rest == ")" and json.loads(out) == arguments


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (")", {}),
        (" a = 1 ,\n b = [1, 2,],)", {"a": 1, "b": [1, 2]}),
        ("a=true, b=null)", {"a": True, "b": None}),
        ("**{'a b': 1, \"c\": {'d': (None)}})", None),
        ("**{'a b': 1, \"c\": {'d': None},}, e='x')", {"a b": 1, "c": {"d": None}, "e": "x"}),
        ('a="it\\\'s")', {"a": "it's"}),
        ("3)", None),
        ("a)", None),
        ("a=)", None),
        ("a=f(1))", None),
        ("**{}, a=1)", None),
        ("*b)", None),
        ("a=1 b=2)", None),
        ("a=1]", None),
    ],
)
def test_what_else_comes(text: str, expected: dict[str, Any] | None) -> None:
    for cuts in ([], list(range(len(text)))):
        out, reader, _ = read(text, cuts)
        assert reader.done == (expected is not None) and reader.failed == (expected is None)
        assert expected is None or json.loads(out) == expected
