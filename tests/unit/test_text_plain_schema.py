"""luce/text/plain_schema.py: what goes, what stays, and the path of each change."""

from __future__ import annotations

from typing import Any

import pytest

from luce.text.plain_schema import plain_schema
from luce.text.schema_limits import SchemaError

LARGEST = 2**63 - 1024
NULL = {"type": "null"}
INTEGER = {"type": "integer", "minimum": -LARGEST, "maximum": LARGEST}


def plain(schema: Any, **options: bool) -> tuple[Any, tuple[str, ...]]:
    found = plain_schema(schema, **{"strict": False, "root": False, **options})
    return found.schema, found.relaxed


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        # Annotations go; properties of that name stay.
        (
            {
                "$schema": "x",
                "$id": "y",
                "title": "T",
                "description": "D",
                "default": 1,
                "x-order": 2,
                "type": "string",
            },
            {"type": "string"},
        ),
        (
            {"properties": {"title": {"type": "string"}, "default": {}}},
            {"properties": {"title": {"type": "string"}, "default": {}}},
        ),
        # Counts, bounds and tuples of older drafts.
        ({"minLength": 2.0, "type": "string"}, {"minLength": 2, "type": "string"}),
        ({"minimum": 3, "exclusiveMinimum": True}, {"exclusiveMinimum": 3}),
        ({"maximum": 3, "exclusiveMaximum": False}, {"maximum": 3}),
        ({"items": [{"type": "null"}], "additionalItems": False}, {"prefixItems": [{"type": "null"}], "items": False}),
        ({"items": {"type": "null"}, "additionalItems": False}, {"items": {"type": "null"}}),
        ({"prefixItems": [{"type": "null"}, {"title": "T"}]}, {"prefixItems": [{"type": "null"}, {}]}),
        # What allows everything.
        ({"uniqueItems": False, "propertyNames": {}, "required": []}, {}),
        ({"propertyNames": {"type": "string"}, "then": {}, "minContains": 2}, {}),
        # One arm is that arm.
        ({"anyOf": [{"type": "null"}]}, {"type": "null"}),
        ({"title": "T", "allOf": [{"type": "null"}]}, {"type": "null"}),
        ({"type": "string", "allOf": [{"maxLength": 3}]}, {"type": "string", "allOf": [{"maxLength": 3}]}),
        ({"type": ["null"]}, {"type": "null"}),
        ({"type": ["string", "null"]}, {"type": ["string", "null"]}),
        # Arms that exclude each other.
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ({"oneOf": [{"const": 1}, {"enum": [2, "a"]}]}, {"anyOf": [{"const": 1}, {"enum": [2, "a"]}]}),
        # Integers have bounds, but for those that have them.
        ({"type": "integer"}, INTEGER),
        ({"type": ["integer", "null"]}, {**INTEGER, "type": ["integer", "null"]}),
        ({"type": "integer", "minimum": 1}, {"type": "integer", "minimum": 1, "maximum": LARGEST}),
        ({"type": "integer", "exclusiveMaximum": 1}, {"type": "integer", "exclusiveMaximum": 1, "minimum": -LARGEST}),
        ({"type": "integer", "minimum": -(2**63)}, INTEGER),
        ({"type": "integer", "exclusiveMinimum": -(2**70), "maximum": 1}, {**INTEGER, "maximum": 1}),
        (
            {"type": "integer", "minimum": -(2**63), "exclusiveMinimum": 3},
            {"type": "integer", "exclusiveMinimum": 3, "maximum": LARGEST},
        ),
        ({"type": "integer", "enum": [2**63]}, {"type": "integer", "enum": [2**63]}),
        ({"type": "number"}, {"type": "number"}),
        # Formats bind strings.
        (
            {"type": "integer", "format": "int32", "minimum": 0, "maximum": 1},
            {"type": "integer", "minimum": 0, "maximum": 1},
        ),
        ({"type": "string", "format": "date"}, {"type": "string", "format": "date"}),
        # ECMA-262's classes have no operators.
        ({"pattern": r"^[[&&~-]\<$"}, {"pattern": r"^[\[\&\&\~-]<$"}),
        # References, wherever they lead.
        (
            {"$ref": "#/definitions/a", "definitions": {"a": {"type": "null"}}},
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}},
        ),
        (
            {"properties": {"a": {"$ref": "#"}}},
            {
                "properties": {"a": {"$ref": "#/$defs/root"}},
                "$defs": {"root": {"properties": {"a": {"$ref": "#/$defs/root"}}}},
            },
        ),
        (
            {"anyOf": [{"$ref": "#there"}, {"type": "null"}], "$defs": {"x/y": {"$anchor": "there", "type": "string"}}},
            {"anyOf": [{"$ref": "#/$defs/x_1y"}, {"type": "null"}], "$defs": {"x_1y": {"type": "string"}}},
        ),
        ({"unevaluatedProperties": False, "properties": {}}, {"additionalProperties": False, "properties": {}}),
    ],
)
def test_what_means_the_same_is_made_plain_in_strict_schemas_too(schema: Any, expected: Any) -> None:
    assert plain(schema, strict=True) == (expected, ())
    assert plain(schema) == (expected, ())


@pytest.mark.parametrize(
    ("schema", "expected", "path"),
    [
        ({"properties": {"a": {"not": {}}}}, {"properties": {"a": {}}}, ".properties.a.not"),
        ({"items": {"type": "string", "format": "regex"}}, {"items": {"type": "string"}}, ".items.format"),
        ({"anyOf": [{"type": "null"}, {"pattern": "(?=a)"}]}, {"anyOf": [{"type": "null"}, {}]}, ".anyOf[1].pattern"),
        ({"pattern": r"(a)\1"}, {}, ".pattern"),
        ({"patternProperties": {"^(?!a)": {}}}, {"patternProperties": {}}, ".patternProperties.^(?!a)"),
        ({"uniqueItems": True}, {}, ".uniqueItems"),
        ({"const": [{"a": 2**64}]}, {}, ".const"),
        # The library ends the process at one of these.
        ({"enum": [{"a": [-(2**63)]}]}, {}, ".enum"),
        ({"const": -LARGEST - 1}, {}, ".const"),
        ({"propertyNames": {"pattern": "a"}}, {}, ".propertyNames"),
        ({"$ref": "other.json"}, {}, ".$ref"),
        ({"minLenght": 3}, {}, ".minLenght"),
        ({"type": "integer", "multipleOf": 12345}, INTEGER, ".multipleOf"),
        ({"type": "string", "maxLength": 100_001}, {"type": "string"}, ".maxLength"),
        ({"pattern": "(a{1000}){1000}"}, {}, ".pattern"),
        (
            {"oneOf": [{"type": "integer", "enum": [1]}, {"type": "number"}]},
            {"anyOf": [{"type": "integer", "enum": [1]}, {"type": "number"}]},
            ".oneOf",
        ),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"contains": {}}}},
            {"$ref": "#/$defs/a", "$defs": {"a": {}}},
            ".$defs.a.contains",
        ),
    ],
)
def test_what_cannot_be_enforced_goes_unless_the_schema_is_strict(schema: Any, expected: Any, path: str) -> None:
    assert plain(schema) == (expected, (path,))
    if path == ".oneOf":
        # The library decides, by what it can tell apart.
        assert plain(schema, strict=True) == (schema, ())
        return
    with pytest.raises(SchemaError) as caught:
        plain(schema, strict=True)
    assert caught.value.path == path and caught.value.code in ("unsupported_schema", "schema_too_complex")


@pytest.mark.parametrize(
    ("schema", "path", "forgiven"),
    [
        ({"properties": {"a": {"minLength": "x"}}}, ".properties.a.minLength", {"properties": {"a": {}}}),
        ({"minItems": -1}, ".minItems", {}),
        ({"minItems": 1.5}, ".minItems", {}),
        ({"maxItems": True}, ".maxItems", {}),
        ({"minimum": "1"}, ".minimum", {}),
        ({"multipleOf": 0}, ".multipleOf", {}),
        ({"type": "king"}, ".type", {}),
        ({"type": []}, ".type", {}),
        ({"type": ["string", 1]}, ".type", {}),
        ({"pattern": 1}, ".pattern", {}),
        ({"format": 1}, ".format", {}),
        ({"required": "a"}, ".required", {}),
        ({"required": True}, ".required", {}),
        ({"enum": []}, ".enum", {}),
        ({"enum": {}}, ".enum", {}),
        ({"properties": []}, ".properties", {}),
        ({"anyOf": []}, ".anyOf", {}),
        ({"anyOf": {}}, ".anyOf", {}),
        ({"items": 5}, ".items", {"items": True}),
        ({"$ref": 5}, ".$ref", {}),
        ({"$ref": "#/$defs/a"}, ".$ref", {}),
        ({"$ref": "#/required", "required": ["a"]}, ".$ref", {"required": ["a"]}),
        ({"$ref": "#nowhere"}, ".$ref", {}),
        # The first place behind the end, and one whose digits Python does not read.
        *(
            ({"anyOf": [NULL, {"$ref": f"#/anyOf/{place}"}]}, ".anyOf[1].$ref", {"anyOf": [NULL, {}]})
            for place in ("2", 5000 * "1")
        ),
        (
            {"required": ["a"], "additionalProperties": False},
            ".required",
            {"required": [], "additionalProperties": False},
        ),
    ],
)
def test_mistakes_are_refused_with_their_path_or_forgiven(schema: Any, path: str, forgiven: Any) -> None:
    for strict in (True, False):
        with pytest.raises(SchemaError) as caught:
            plain(schema, strict=strict)
        assert (caught.value.path, caught.value.code) == (path, "invalid_schema")
    assert plain(schema, forgiving=True) == (forgiven, (path,))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {
            "anyOf": [{"$ref": "#/$defs/a"}],
            "$defs": {"a": {"oneOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}},
        },
    ],
)
def test_a_schema_that_is_defined_by_itself_is_refused(schema: Any) -> None:
    with pytest.raises(SchemaError, match="refers to itself") as caught:
        plain(schema)
    assert caught.value.code == "invalid_schema"


def nested(depth: int) -> Any:
    return {"items": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (nested(65), ".items" * 65),
        ({"anyOf": [{"items": {"type": "null"}}] * 10_001}, None),
        ({"properties": {f"p{i}": {} for i in range(2001)}}, ".properties"),
        ({"properties": {f"p{i}": {} for i in range(401)}}, ".properties"),
        ({"enum": list(range(10_001))}, ".enum"),
        ({"const": "x" * (257 << 10)}, ".const"),
        ({"allOf": [{"anyOf": [{"minimum": i}, {"maximum": i}]} for i in range(10)]}, ""),
        (
            {"allOf": [{"$ref": "#/$defs/a"}] * 10, "$defs": {"a": {"anyOf": [{"type": "null"}, {"type": "string"}]}}},
            "",
        ),
    ],
)
def test_schemas_beyond_the_limits_are_refused(schema: Any, path: str | None) -> None:
    with pytest.raises(SchemaError) as caught:
        plain(schema)
    assert caught.value.code == "schema_too_complex" and path in (None, caught.value.path)


@pytest.mark.parametrize(
    "schema",
    [
        nested(64),
        {"properties": {f"p{i}": {} for i in range(400)}},
        {"properties": {f"p{i}": {} for i in range(2000)}, "required": [f"p{i}" for i in range(1600)]},
        {"enum": list(range(10_000))},
        {"minLength": 100_000, "pattern": "a{100}" * 10},
        {"multipleOf": 0.0001},
        # A long chain of references is no depth.
        {"$ref": "#/$defs/d0", "$defs": {**{f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}, "d3000": {}}},
    ],
)
def test_schemas_within_the_limits_are_taken(schema: Any) -> None:
    assert plain(schema, strict=True)[1] == ()


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({}, ["object", "array"]),
        (True, ["object", "array"]),
        ({"properties": {}}, "object"),
        ({"items": {}}, "array"),
        ({"enum": ["a"]}, None),
        ({"type": "string"}, "string"),
    ],
)
def test_a_root_without_a_type_is_an_object_or_an_array(schema: Any, kind: Any) -> None:
    assert plain(schema, root=True)[0].get("type") == kind
    # Inside, a schema without a type stays one of any value.
    inner = plain({"properties": {"a": schema}}, root=True)[0]["properties"]["a"]
    assert inner == schema


def test_false_allows_nothing() -> None:
    with pytest.raises(SchemaError, match="allows nothing"):
        plain(False)


def test_the_choice_among_objects_by_a_tag() -> None:
    arms = [
        {"type": "object", "properties": {"kind": {"const": kind}, "a": {"type": "string"}}, "required": ["kind"]}
        for kind in ("x", "y")
    ]
    defs = {"X": arms[0], "Y": arms[1]}
    schema = {"oneOf": [{"$ref": "#/$defs/X"}, {"$ref": "#/$defs/Y"}], "$defs": defs}
    assert plain(schema, strict=True)[0]["anyOf"] == schema["oneOf"]
    # A tag that may be absent tells nothing.
    for arm in arms:
        del arm["required"]
    assert plain(schema)[1] == (".oneOf",)
