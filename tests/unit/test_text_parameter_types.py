"""luce/text/parameter_types.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from luce.text.parameter_types import Parameter, decides_early, names_in, parameter_of, typed, written


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": "STRING"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": ["a", "b"]}, {"string"}),
        (
            {"enum": [1, "b", None, True, 1.5, [], {}]},
            {"integer", "string", "null", "boolean", "number", "array", "object"},
        ),
        ({"const": 5}, {"integer"}),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"type": "null"}]}]}, {"string", "null"}),
        ({"allOf": [{"$ref": "#/$defs/path"}]}, {"string"}),
        ({"$ref": "#/definitions/a~1b"}, {"array"}),
        ({"$ref": "#/definitions/50%25"}, {"number"}),
        ({"$ref": "#/%64efinitions/m~0n"}, {"boolean"}),
        ({"$ref": "#here"}, {"integer"}),
        ({"$ref": "#nowhere"}, set()),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "http://elsewhere"}, set()),
        ({"description": "anything"}, set()),
        ({"type": 5, "anyOf": "x"}, set()),
        (True, set()),
    ],
)
def test_types_of_a_schema(schema: Any, types: set[str]) -> None:
    root = {
        "properties": {"p": schema},
        "$defs": {"path": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}},
        "definitions": {
            "a/b": {"type": "array"},
            "50%": {"type": "number"},
            "m~n": {"type": "boolean"},
            "deep": {"items": {"$anchor": "here", "type": "integer"}},
        },
    }
    assert parameter_of(root, "p").types == types


@pytest.mark.parametrize("schema", [None, {}, {"properties": None}, {"properties": {"q": {"type": "string"}}}])
def test_a_parameter_without_a_schema_has_any_type(schema: Any) -> None:
    assert parameter_of(schema, "p") == Parameter(frozenset())


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("5", {"string"}, '"5"'),
        (' a "b"\n', {"string"}, '" a \\"b\\"\\n"'),
        ("5", {"integer"}, "5"),
        ("1.0", {"number"}, "1.0"),
        ("x", {"integer"}, '"x"'),
        ("True", {"boolean"}, "true"),
        ("None", {"null", "string"}, "null"),
        ("5", {"integer", "string"}, "5"),
        ("5.5", {"integer", "string"}, '"5.5"'),
        ('"5"', {"integer", "string"}, '"\\"5\\""'),
        ("[1]", {"string", "object"}, '"[1]"'),
        ('{"a": True}', {"object"}, '{"a": true}'),
        ("5", set(), "5"),
        ("null", set(), "null"),
        ("hello", set(), '"hello"'),
        ('"quoted"', set(), '"\\"quoted\\""'),
        ('"quoted"', {"json"}, '"quoted"'),
    ],
)
def test_typed(text: str, types: set[str], expected: str) -> None:
    assert typed(text, Parameter(frozenset(types))) == expected


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"enum": ["7", 8, None]}, ("7", 8, None)),
        ({"const": "7"}, ("7",)),
        ({"type": ["string", "number"], "enum": ["7", 8, 1.5, True, None]}, ("7", 8, 1.5)),
        ({"$ref": "#/$defs/mode"}, (1, "1")),
        ({"$ref": "#/$defs/loop"}, ()),
        ({"type": "string", "enum": "abc"}, ()),
        ({"type": "string"}, ()),
    ],
)
def test_values_of_a_schema(schema: Any, values: tuple[Any, ...]) -> None:
    root = {"properties": {"p": schema}, "$defs": {"mode": {"enum": [1, "1"]}, "loop": {"$ref": "#/$defs/loop"}}}
    assert parameter_of(root, "p").values == values


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        # No other value is written as the string is.
        (["7", 8], ["7", "8"]),
        (["null", "true", "x"], ["null", "true", "x"]),
        ([7, "7", "seven"], ["7", '"7"', "seven"]),
        ([None, "null", "None", True, "true"], ["null", '"null"', '"None"', "true", '"true"']),
        ([1.5, "1.50", "1.5"], ["1.5", "1.50", '"1.5"']),
        ([{"a": [1]}, '{"a": [1]}', '{"a":[1]}'], ['{"a": [1]}', '"{\\"a\\": [1]}"', '{"a":[1]}']),
        (['"q"', 1, " 1"], ['"q"', "1", '" 1"']),
    ],
)
def test_each_value_of_an_enum_has_a_text_of_its_own(values: list[Any], texts: list[str]) -> None:
    assert [written(value, values) for value in values] == texts
    parameter = parameter_of({"properties": {"p": {"enum": values}}}, "p")
    for value, text in zip(values, texts, strict=True):
        read = json.loads(typed(text, parameter))
        assert (type(read), read) == (type(value), value)


def test_a_text_that_is_no_value_of_an_enum_is_typed_as_any() -> None:
    parameter = parameter_of({"properties": {"p": {"enum": ["7", 8]}}}, "p")
    assert typed("9", parameter) == "9" and typed("x", parameter) == '"x"'
    # More digits than Python makes an int of.
    assert typed("9" * 5000, parameter) == "9" * 5000


def test_names_in_a_schema_at_any_depth() -> None:
    schema = {
        "properties": {"a b": {"items": {"anyOf": [{"required": ["c:d"]}]}}, "e": {"const": {"f,": [{"g}": 1}]}}},
        "required": ["later"],
    }
    assert {"a b", "c:d", "f,", "g}", "later"} <= set(names_in(schema))
    assert names_in({"a": {"ab": {}}, "b": {}, "required": True}) == ["required", "ab", "a", "b"]
    assert names_in(None) == []


def test_what_streams_before_it_is_whole() -> None:
    assert decides_early(frozenset({"string"}), "5")
    assert decides_early(frozenset({"string", "integer"}), "x")
    assert not decides_early(frozenset({"string", "integer"}), "5")
    assert not decides_early(frozenset({"integer"}), "x")
    assert not decides_early(frozenset(), "x")
