"""luce/text/json_reader.py, with json.loads as the judge."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce.text.json_reader import JsonReader, json_text, string_of

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
_CONTAINERS = st.lists(_VALUES) | st.dictionaries(st.text(), _VALUES)


def given_out(text: str, cuts: list[int]) -> tuple[str, JsonReader, str]:
    """What goes out of a text in pieces, its reader, and what was not read."""
    reader, buffer, at, out = JsonReader(), "", 0, ""
    ends = sorted({*(cut % (len(text) + 1) for cut in cuts), len(text)})
    for begin, end in zip([0, *ends], ends, strict=False):
        buffer += text[begin:end]
        piece, at = reader.read(buffer, at)
        out += piece
    return out, reader, buffer[at:]


@settings(max_examples=100, deadline=None)
@given(_CONTAINERS, st.sampled_from([None, 1, "\t"]), st.booleans(), st.lists(st.integers(0, 9999), max_size=9))
def test_valid_json_goes_out_as_it_came(value: Any, indent: Any, ascii: bool, cuts: list[int]) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    out, reader, rest = given_out(text + " x", cuts)
    assert out == text and reader.done and not reader.failed and rest == " x" and not reader.closing


@settings(max_examples=100, deadline=None)
@given(_CONTAINERS, st.integers(0, 9999))
def test_a_value_that_stops_anywhere_is_made_whole(value: Any, at: int) -> None:
    text = json.dumps(value)
    out, reader, _ = given_out(text[: at % len(text)], [])
    whole = json.loads(
        (out or ("{" if isinstance(value, dict) else "["))
        + (reader.closing if out else "}" if isinstance(value, dict) else "]")
    )
    assert isinstance(whole, type(value))
    if isinstance(value, dict):
        assert set(whole) <= set(value)


@settings(max_examples=200, deadline=None)
@given(st.text('{}[]",:\\ntfue0-1.\n', max_size=30).map("{".__add__), st.lists(st.integers(0, 99), max_size=5))
def test_what_goes_out_of_garbage_is_valid_and_does_not_depend_on_the_pieces(text: str, cuts: list[int]) -> None:
    out, reader, _ = given_out(text, [])
    json.loads(out + reader.closing)
    assert given_out(text, cuts)[0] == out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": "x\ny\t\x01"}', {"a": "x\ny\t\x01"}),
        ('{"a": True, "b": [None, False]}', {"a": True, "b": [None, False]}),
        ('{"a": [1, 2, ], }', {"a": [1, 2]}),
        (r'{"p": "C:\dir \ud83d \ude00"}', {"p": "C:\\dir \ufffd \ufffd"}),
        (r'{"p": "\ud83d\ude00"}', {"p": "\U0001f600"}),
        # As Python prints it.
        *(
            (repr(value), value)
            for value in [{"a": ["it's", 'say "x"', "C:\\dir\n"], "": [True, None, -1.5]}, {"'": "'\""}]
        ),
    ],
)
def test_what_models_write_beside_json_is_read(text: str, expected: Any) -> None:
    out, reader, _ = given_out(text, list(range(len(text))))
    assert reader.done and json.loads(out) == expected


@pytest.mark.parametrize(
    "text", ['{"a": nope}', "{a: 1}", '{"a" 1}', '{"a": 01}', '{"a": 1 2}', "[1}", '{"a": .5}', "x"]
)
def test_other_texts_fail(text: str) -> None:
    out, reader, _ = given_out(text + " ", [])
    assert reader.failed and not reader.done
    json.loads(out + reader.closing)


def test_depth_has_a_limit() -> None:
    _, reader, _ = given_out("[" * 10_000, [])
    assert reader.failed and len(reader.closing) < 1000


def test_text_of_a_string_goes_out_at_once() -> None:
    reader = JsonReader()
    assert reader.read('{"a": "on', 0)[0] == '{"a": "on'


@given(_VALUES)
def test_json_text_reads_values_of_every_type(value: Any) -> None:
    found = json_text(f" {json.dumps(value)}\n")
    assert found is not None
    read = json.loads(found)
    assert read == value or (isinstance(value, float) and math.isclose(read, value))


@pytest.mark.parametrize("text", ["", "abc", "1 2", '"a', "[1", "{} x", "NaN", "Infinity", "0x1", "'a'"])
def test_json_text_is_none_for_other_texts(text: str) -> None:
    assert json_text(text) is None
    assert json_text("True") == "true" and json_text("1.50") == "1.50"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (r'"\ud800"', "\ufffd"),
        (r'"a\uDC00\ud83d\ude00\ud83d"', "a\ufffd\U0001f600\ufffd"),
        (r'"\\ud800 \u0041"', r"\ud800 A"),
    ],
)
def test_half_a_surrogate_pair_is_the_replacement_character(text: str, said: str) -> None:
    # json.loads gives the half itself, which no encoding of a reply can hold.
    assert string_of(text) == said
    assert json_text(text) == json.dumps(said, ensure_ascii=False)
    assert json.loads(json_text(f"[{text}]") or "") == [said]
