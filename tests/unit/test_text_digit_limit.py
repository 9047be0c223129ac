"""luce/text/digit_limit.py: replies of models whose favourites are digits, spaces and line feeds end."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce.text.constraint import GrammarConstraint
from luce.text.digit_limit import MOST_DIGITS, DigitLimit, DigitRun
from luce.text.grammar import GrammarCompiler
from luce.text.tokenizer import Tokenizer
from tests.support.masks import allowed_ids
from tests.support.vocabulary import byte_level

TOKENIZER = Tokenizer(byte_level(("1 2", "12 3", ", 4"), control=("<end>",), eos_token_id=259))
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab)
END = 259


def reply(schema: Any, favourite: str, most: int = 2000) -> str:
    """The text of a model that takes the first token which is one of the favourite characters, else the first one."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    constraint = COMPILER.constraint(form)
    assert isinstance(constraint, GrammarConstraint)
    found = b""
    for _ in range(most):
        if constraint.over:
            return found.decode()
        allowed = sorted(allowed_ids(constraint))
        liked = [
            token for token in allowed if token != END and TOKENIZER.token_bytes(token).decode("latin") in favourite
        ]
        token = liked[-1] if liked else END if END in allowed else allowed[-1]
        assert constraint.allows(token)
        constraint.push(token)
        found += b"" if token == END else TOKENIZER.token_bytes(token)
    raise AssertionError(f"no end: {found[-200:]!r}")


@pytest.mark.parametrize("favourite", ["0123456789", "9", " ", "\n", "\n 1", "123", "."])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number"},
        {"type": "integer"},
        {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False},
        {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
    ],
)
def test_no_favourite_goes_on_for_ever(schema: Any, favourite: str) -> None:
    text = reply(schema, favourite)
    value = json.loads(text)
    assert type(value) in (int, float, dict, list)
    assert max(map(len, re.findall(r"\d+", text)), default=0) <= MOST_DIGITS + 2
    if schema == {"type": "integer"}:
        assert abs(value) < 2**63


def test_digits_in_strings_do_not_count() -> None:
    text = reply({"type": "string", "pattern": "^[0-9]{70}$"}, "9")
    assert json.loads(text) == "9" * 70


@given(st.text(alphabet='0123 "\\,a', max_size=80), st.integers(0, 80))
def test_the_run_of_digits_is_that_of_the_text(text: str, cut: int) -> None:
    run = DigitRun().behind(text[:cut].encode()).behind(text[cut:].encode())
    outside = re.sub(r'"(?:[^"\\]|\\.)*("|\\?$)', '"', text)
    in_string = outside.endswith('"') and run.in_string
    tail = re.search(r"[0-9]*$", outside)
    assert tail is not None and run.digits == (0 if in_string else len(tail[0]))


def test_a_special_token_begins_another_text() -> None:
    """A quotation mark in the reasoning in front of JSON opens no string in it."""
    limit = DigitLimit(TOKENIZER)
    run = DigitRun()
    for token in [*b'5 "12', END, *b"34"]:
        run = limit.behind(run, token)
    assert run == DigitRun(in_string=False, digits=2)
