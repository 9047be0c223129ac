"""luce/text/parameter_types.py."""

from __future__ import annotations

from typing import Any

import pytest

from luce.text.parameter_types import decides_early, parameter_types, typed


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
        "definitions": {"a/b": {"type": "array"}},
    }
    assert parameter_types(root, "p") == types


@pytest.mark.parametrize("schema", [None, {}, {"properties": None}, {"properties": {"q": {"type": "string"}}}])
def test_a_parameter_without_a_schema_has_any_type(schema: Any) -> None:
    assert parameter_types(schema, "p") == set()


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
    assert typed(text, frozenset(types)) == expected


def test_what_streams_before_it_is_whole() -> None:
    assert decides_early(frozenset({"string"}), "5")
    assert decides_early(frozenset({"string", "integer"}), "x")
    assert not decides_early(frozenset({"string", "integer"}), "5")
    assert not decides_early(frozenset({"integer"}), "x")
    assert not decides_early(frozenset(), "x")
