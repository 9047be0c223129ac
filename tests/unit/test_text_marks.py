"""luce/text/marks.py."""

from __future__ import annotations

import json

from luce.text.marks import Marks
from tests.support.tool_templates import byte_tokenizer, format_named, marks


def test_a_special_token_is_one_character_and_its_spelling_is_not() -> None:
    tokenizer = byte_tokenizer("gemma4")
    found = Marks(format_named("gemma4"), tokenizer)
    [token] = tokenizer.encode("<|tool_call>", specials=True)
    mark = found.of_token[token]
    assert len(mark) == 1 and found.is_mark(mark) and not found.is_mark("<|tool_call>")
    assert found.marked("a<|tool_call>b") == f"a{mark}b" and found.calls.trigger == mark
    assert found.spelled(f"<|tool_call>{mark}é") == "<|tool_call><|tool_call>é"
    assert found.calls.call[0] == mark and found.calls.name[0] == "call:"


def test_a_spelling_is_escaped_in_json() -> None:
    found = marks("gemma4")
    quote = found.marked('<|"|>')
    assert json.loads(found.spelled_json(f'"a{quote}"')) == 'a<|"|>'


def test_a_vocabulary_without_the_tokens_has_no_marks() -> None:
    found = marks("hermes", special=False)
    assert not found.of_token and found.calls == format_named("hermes")


def test_half_a_surrogate_pair_that_is_no_mark_is_replaced() -> None:
    assert marks("hermes").spelled("\udfff") == "\ufffd"
