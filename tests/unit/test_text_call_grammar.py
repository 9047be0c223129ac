"""Grammars of calls, against the templates that print calls, the parser that reads them, and the tools' schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from luce.errors import RequestError
from luce.text.call_format import CallableTool
from luce.text.reply_format import ReplyFormat
from tests.support.call_grammars import (
    CALLS,
    KNOWN,
    NAMES,
    TOOLS,
    VALIDATORS,
    accepts,
    compiled,
    text_of,
    walked,
    wanted,
)
from tests.support.call_parts import read
from tests.support.tool_templates import byte_tokenizer, format_named

# 25 s of CPU, whose result the sources alone decide.
pytestmark = pytest.mark.provable

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_what_templates_print_is_allowed(name: str, special: bool) -> None:
    grammar = compiled(name, wanted(name, required=True), special=special)
    calls = CALLS if format_named(name).parallel else CALLS[:1]
    assert grammar.relaxed == ()
    for some in (calls, calls[-1:], [("stop", {})]):
        text = text_of(name, some)
        # Without its special tokens a reply of harmony has one spelling alone, which is not the template's.
        allowed = special or name != "harmony"
        # The template prints objects as Python does; what a model has to write is JSON.
        objects = any(isinstance(value, dict) for _, arguments in some for value in arguments.values())
        allowed = allowed and not (name == "seed_oss" and objects)
        assert accepts(byte_tokenizer(name, special=special), grammar.constraint(), text) is allowed, text


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_what_the_grammar_allows_is_a_valid_call(name: str, special: bool) -> None:
    grammar = compiled(name, wanted(name, required=True), special=special)
    ended = 0
    for seed in range(12):
        text = walked(name, grammar.constraint(), seed, special=special)
        if text is None:
            continue
        ended += 1
        found = read(name, text, KNOWN, special=special)
        assert found.calls and not found.bad and not found.cut and not found.text.strip(), text
        for tool, arguments in found.calls:
            VALIDATORS[tool].validate(arguments)
            assert tool != "stop" or isinstance(arguments, dict)
    assert ended >= 4


@pytest.mark.parametrize("name", NAMES)
def test_a_named_tool_is_called_once(name: str) -> None:
    grammar = compiled(name, wanted(name, TOOLS[0], required=True, parallel=False))
    tokenizer = byte_tokenizer(name)
    first = text_of(name, CALLS[:1])
    assert accepts(tokenizer, grammar.constraint(), first)
    other = text_of(name, CALLS[1:])
    assert not accepts(tokenizer, grammar.constraint(), other)
    if format_named(name).parallel:
        both = text_of(name, CALLS[:1] * 2)
        assert not accepts(tokenizer, grammar.constraint(), both)


# Calls of harmony are messages of their own: test_text_channel_grammar.
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "harmony"])
def test_calls_stand_in_free_text(name: str, special: bool) -> None:
    grammar = compiled(name, wanted(name), special=special)
    dialect, tokenizer = format_named(name), byte_tokenizer(name, special=special)
    assert accepts(tokenizer, grammar.constraint(), "Just text } </ and more.")
    call = text_of(name, CALLS[:1])
    before = "" if dialect.at_start else "Text first." + dialect.lead
    assert accepts(tokenizer, grammar.constraint(), before + call)
    if dialect.parallel:
        assert accepts(tokenizer, grammar.constraint(), before + call + " Text." + call)
    broken = before + call.replace("weather", "wether")
    assert not accepts(tokenizer, grammar.constraint(), broken)


def test_without_parallel_calls_a_reply_ends_behind_the_first() -> None:
    constraint = compiled("hermes", wanted("hermes", parallel=False)).constraint()
    tokenizer = byte_tokenizer("hermes")
    for token in tokenizer.encode("Text. " + text_of("hermes", CALLS[:1]), specials=True):
        assert not constraint.over
        constraint.push(token)
    assert constraint.over


def test_a_number_stands_in_front_of_the_name() -> None:
    grammar, tokenizer = compiled("cohere2", wanted("cohere2", required=True)), byte_tokenizer("cohere2")
    for begin, allowed in (
        *(('"tool_call_id": "0", ', True), ('"tool_call_id": "217", ', True)),
        *((f'"tool_call_id": {number}, ', False) for number in ("0", '"01"', '""', '"a"', '"12345"')),
        ("", False),
    ):
        text = f'<|START_ACTION|>[\n    {{{begin}"tool_name": "stop", "parameters": {{}}}}\n]<|END_ACTION|>'
        assert accepts(tokenizer, grammar.constraint(), text) is allowed, text


@pytest.mark.parametrize("name", ["qwen_xml", "glm45", "minimax_m2", "seed_oss", "deepseek_v32", "gemma4", "lfm2"])
def test_parameters_come_in_any_order_once_and_the_required_ones_come(name: str) -> None:
    grammar = compiled(name, wanted(name, required=True))
    tokenizer = byte_tokenizer(name)

    def allows(arguments: dict[str, Any]) -> bool:
        text = text_of(name, [("weather", arguments)])
        return accepts(tokenizer, grammar.constraint(), text)

    assert allows({"days": 3, "city": "x"}) and allows({"unit": "kelvin", "days": 3, "city": "x"})
    assert not allows({"city": "x"}) and not allows({}) and not allows({"city": "x", "days": 3, "more": "y"})
    assert not allows({"city": "x", "days": 21}) and not allows({"city": "x", "days": 3, "unit": "other"})
    twice = text_of(name, [("weather", {"city": "x", "days": 3})])
    at = twice.index("days")
    assert not accepts(tokenizer, grammar.constraint(), twice[:at] + "city" + twice[at + 4 :])


def test_many_parameters_come_in_their_order() -> None:
    many = {"type": "object", "properties": {f"p{i}": {"type": "boolean"} for i in range(70)}, "required": ["p3"]}
    tools = (CallableTool("f", many),)
    for name in ("qwen_xml", "gemma4"):
        grammar, tokenizer = compiled(name, wanted(name, *tools, required=True)), byte_tokenizer(name)
        for arguments, fits in (({"p3": True}, True), ({"p3": True, "p5": False}, True), ({"p5": True}, False)):
            text = text_of(name, [("f", arguments)])
            assert accepts(tokenizer, grammar.constraint(), text) is fits


def test_a_reply_is_calls_or_the_format() -> None:
    body = ReplyFormat("json_schema", {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]})
    grammar = compiled("hermes", wanted("hermes"), body=body)
    tokenizer = byte_tokenizer("hermes")
    assert accepts(tokenizer, grammar.constraint(), '{"a": 1}')
    assert accepts(tokenizer, grammar.constraint(), text_of("hermes", CALLS))
    assert not accepts(tokenizer, grammar.constraint(), "text")
    assert not accepts(tokenizer, grammar.constraint(), '{"b": 1}')


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("parameters", "relaxed"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?!x).*$"}}}, ".properties.a.pattern"),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, ".propertyNames"),
        ({"type": "object", "properties": {"a": {"type": "king"}}}, ".properties.a.type"),
        ({"type": "object", "properties": 5}, ".properties"),
        ({"type": "string"}, ""),
        ({"$ref": "#/nowhere"}, ".$ref"),
        # No part of it is left.
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "$ref": "#"}, ""),
        (
            {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 999983}}},
            ".properties.a.multipleOf",
        ),
    ],
)
def test_tools_that_are_not_strict_are_relaxed(name: str, parameters: Any, relaxed: str) -> None:
    tool = CallableTool("f", parameters, param="tools[0].function.parameters")
    grammar = compiled(name, wanted(name, tool, required=True))
    assert grammar.relaxed == ("tools[0].function.parameters" + relaxed,)
    text = text_of(name, [("f", {})])
    assert accepts(byte_tokenizer(name), grammar.constraint(), text)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("inner", "path", "code"),
    [
        ({"type": "string", "pattern": "^(?!x)"}, ".pattern", "unsupported_schema"),
        ({"not": {}}, ".not", "unsupported_schema"),
        ({"type": "king"}, ".type", "invalid_schema"),
        ({"type": "integer", "multipleOf": 999983}, ".multipleOf", "schema_too_complex"),
    ],
)
def test_strict_tools_are_refused_by_their_path(name: str, inner: Any, path: str, code: str) -> None:
    parameters = {"type": "object", "properties": {"x": inner}, "additionalProperties": False}
    tool = CallableTool("f", parameters, strict=True, param="tools[3].function.parameters")
    with pytest.raises(RequestError) as caught:
        compiled(name, wanted(name, TOOLS[1], tool))
    assert (caught.value.param, caught.value.code) == (f"tools[3].function.parameters.properties.x{path}", code)


@pytest.mark.parametrize("name", ["qwen_xml", "gemma4", "lfm2"])
@pytest.mark.parametrize(
    ("inner", "fits", "refused"),
    [
        ({"type": "string", "maxLength": 3}, "abc", "abcd"),
        ({"type": "string", "minLength": 2}, "ab", "a"),
    ],
)
def test_strict_strings_keep_their_length(name: str, inner: Any, fits: str, refused: str) -> None:
    parameters = {"type": "object", "properties": {"x": inner}, "required": ["x"], "additionalProperties": False}
    grammar = compiled(name, wanted(name, CallableTool("f", parameters, strict=True), required=True))
    for value, ok in ((fits, True), (refused, False)):
        text = text_of(name, [("f", {"x": value})])
        assert accepts(byte_tokenizer(name), grammar.constraint(), text) is ok


def test_names_and_values_are_texts_whatever_they_hold() -> None:
    tools = (CallableTool('a"b\\c', {"type": "object", "properties": {'k"<': {"enum": ["</p>\n", 'q"']}}}),)
    for name in ("hermes", "qwen_xml"):
        grammar = compiled(name, wanted(name, *tools, required=True))
        found = next(text for seed in range(20) if (text := walked(name, grammar.constraint(), seed)) is not None)
        assert ("a" in found and json.dumps('a"b\\c')[1:-1] in found) or 'a"b\\c' in found


def test_recorded_tools_of_claude_code_compile_for_every_dialect() -> None:
    recorded = json.loads((ROOT / "tests/clients/recorded/claude-code.json").read_text())
    lists = [request["tools"] for request in recorded if request.get("tools")]
    tools = tuple(
        CallableTool(tool["name"], tool["input_schema"], param=f"tools[{i}].input_schema")
        for i, tool in enumerate(max(lists, key=len))
        if "input_schema" in tool
    )
    assert len(tools) > 10
    for name in NAMES:
        relaxed = compiled(name, wanted(name, *tools)).relaxed
        # A length beyond the limit.
        assert [path.partition("]")[2] for path in relaxed] == [".input_schema.properties.script.maxLength"]


def test_an_attribute_of_the_type_goes_with_the_value() -> None:
    parameters = {"type": "object", "properties": {"v": {"enum": ["null", "x", None, 7]}}, "required": ["v"]}
    tools = (CallableTool("t", parameters),)
    grammar = compiled("deepseek_v32", wanted("deepseek_v32", *tools, required=True))
    tokenizer = byte_tokenizer("deepseek_v32")
    values: list[Any] = ["null", "x", None, 7]
    for value in values:
        assert accepts(tokenizer, grammar.constraint(), text_of("deepseek_v32", [("t", {"v": value})])), value
    text = text_of("deepseek_v32", [("t", {"v": None})])
    assert not accepts(
        tokenizer, grammar.constraint(), text.replace('string="false"', 'string="true"').replace("null", "7")
    )
    assert not accepts(tokenizer, grammar.constraint(), text.replace("null", "x"))


@pytest.mark.parametrize("name", ["qwen_xml", "gemma4", "lfm2"])
def test_a_strict_object_with_more_than_properties_is_refused(name: str) -> None:
    more = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    for keyword, value in (("allOf", [{"required": ["a"]}]), ("minProperties", 1), ("anyOf", [{"required": ["a"]}])):
        tools = (CallableTool("t", more | {keyword: value}, strict=True, param="tools[0].parameters"),)
        with pytest.raises(RequestError) as caught:
            compiled(name, wanted(name, *tools))
        assert caught.value.param == f"tools[0].parameters.{keyword}"


@pytest.mark.parametrize("name", ["gemma4", "lfm2"])
def test_a_strict_object_that_is_open_is_refused_where_no_rule_writes_it(name: str) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    with pytest.raises(RequestError, match="an open object cannot be enforced") as caught:
        compiled(name, wanted(name, CallableTool("t", parameters, strict=True, param="tools[0].parameters")))
    assert caught.value.param == "tools[0].parameters"


@pytest.mark.parametrize("name", ["qwen_xml", "gemma4", "lfm2"])
def test_values_of_an_enum_have_its_type(name: str) -> None:
    parameters = {"type": "object", "properties": {"v": {"type": "string", "enum": ["a", 1]}}, "required": ["v"]}
    grammar = compiled(name, wanted(name, CallableTool("t", parameters), required=True))
    tokenizer = byte_tokenizer(name)
    assert accepts(tokenizer, grammar.constraint(), text_of(name, [("t", {"v": "a"})]))
    assert not accepts(tokenizer, grammar.constraint(), text_of(name, [("t", {"v": 1})]))


NOTHING: list[Any] = [
    {"type": "integer", "enum": ["a"]},
    {"type": "string", "const": 1},
    False,
    {"anyOf": [{"type": "null", "const": 1}, {"type": "string", "enum": [2]}]},
    {"$ref": "#/$defs/none"},
]


@pytest.mark.parametrize("name", ["qwen_xml", "gemma4", "lfm2"])
@pytest.mark.parametrize("inner", NOTHING)
def test_a_parameter_that_allows_no_value_is_refused_by_its_path(name: str, inner: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {"x": inner},
        "required": ["x"],
        "$defs": {"none": {"type": "boolean", "enum": [0, "a"]}},
    }
    closed = {**parameters, "additionalProperties": False} if inner is not False else parameters
    strict = CallableTool("f", closed, strict=True, param="tools[0].parameters")
    with pytest.raises(RequestError) as caught:
        compiled(name, wanted(name, TOOLS[1], strict))
    assert (caught.value.param, caught.value.code) == ("tools[0].parameters.properties.x", "invalid_schema")
    # Tools that are not strict cause no error.
    relaxed = CallableTool("f", parameters, param="tools[0].parameters")
    grammar = compiled(name, wanted(name, TOOLS[1], relaxed, required=True))
    assert grammar.relaxed == ("tools[0].parameters",)
    assert accepts(byte_tokenizer(name), grammar.constraint(), text_of(name, [("f", {"y": "free"})]))


@pytest.mark.parametrize("name", ["qwen_xml", "gemma4", "lfm2"])
def test_an_arm_that_allows_no_value_is_left_out(name: str) -> None:
    parameters = {
        "type": "object",
        "properties": {"x": {"anyOf": [{"type": "integer", "enum": ["a"]}, {"type": "string", "enum": ["b"]}]}},
        "required": ["x"],
        "additionalProperties": False,
    }
    grammar = compiled(name, wanted(name, CallableTool("f", parameters, strict=True), required=True))
    for value, fits in (("b", True), ("a", False), ("", False)):
        assert accepts(byte_tokenizer(name), grammar.constraint(), text_of(name, [("f", {"x": value})])) is fits


ODD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "old string": {"type": "string", "maxLength": 3},
        "a:b": {"type": "integer", "minimum": 0, "maximum": 9},
        " }": {
            "type": "object",
            "properties": {"k, l": {"type": "boolean"}},
            "required": ["k, l"],
            "additionalProperties": False,
        },
        "g>": {"enum": ["7", 7, "null", None, 8, "x"]},
    },
    "required": ["old string", "a:b", " }", "g>"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_names_and_values_are_read_as_the_grammar_writes_them(name: str, strict: bool) -> None:
    grammar = compiled(name, wanted(name, CallableTool("t", ODD, strict=strict), required=True))
    # Not strict, no length is enforced.
    schema = ODD if strict else ODD | {"properties": ODD["properties"] | {"old string": {"type": "string"}}}
    validator = jsonschema.Draft202012Validator(schema)
    values = set()
    for seed in range(16):
        text = walked(name, grammar.constraint(), seed)
        for _, arguments in () if text is None else read(name, text, {"t": ODD}).calls:
            validator.validate(arguments)
            values.add(repr(arguments["g>"]))
    assert len(values) >= 3


@pytest.mark.parametrize("name", ["qwen_xml", "gemma4"])
@pytest.mark.parametrize(
    ("inner", "path"),
    [
        ({"type": "string", "anyOf": [{"maxLength": 1}, {"minLength": 5}]}, ".anyOf"),
        ({"type": "string", "allOf": [{"maxLength": 1}, {"minLength": 1}]}, ".allOf"),
        ({"enum": ["a", "bbb"], "maxLength": 1}, ".maxLength"),
        ({"const": "a", "enum": ["b"]}, ".enum"),
    ],
)
def test_what_a_strict_tool_does_not_enforce_beside_strings_is_refused(name: str, inner: Any, path: str) -> None:
    parameters = {"type": "object", "properties": {"x": inner}, "required": ["x"], "additionalProperties": False}
    tool = CallableTool("f", parameters, strict=True, param="tools[0].parameters")
    with pytest.raises(RequestError) as caught:
        compiled(name, wanted(name, tool))
    assert (caught.value.param, caught.value.code) == (f"tools[0].parameters.properties.x{path}", "unsupported_schema")
    relaxed = CallableTool("f", parameters, param="tools[0].parameters")
    assert accepts(
        byte_tokenizer(name),
        compiled(name, wanted(name, relaxed, required=True)).constraint(),
        text_of(name, [("f", {"x": "a"})]),
    )


@pytest.mark.parametrize(
    ("inner", "path"),
    [
        (
            {"type": "object", "additionalProperties": False, "properties": {"a": {}}, "minProperties": 1},
            "minProperties",
        ),
        ({"type": "object", "additionalProperties": False, "maxProperties": 1}, "maxProperties"),
        ({"type": "integer", "multipleOf": 2}, "multipleOf"),
    ],
)
def test_what_gemma_does_not_enforce_inside_of_a_strict_tool_is_refused(inner: Any, path: str) -> None:
    parameters = {"type": "object", "properties": {"x": inner}, "additionalProperties": False}
    with pytest.raises(RequestError) as caught:
        compiled("gemma4", wanted("gemma4", CallableTool("f", parameters, strict=True, param="p")))
    assert (caught.value.param, caught.value.code) == (f"p.properties.x.{path}", "unsupported_schema")


@pytest.mark.parametrize("name", NAMES)
def test_a_strict_choice_of_strings_is_one_of_its_arms(name: str) -> None:
    parameters = {
        "type": "object",
        "properties": {"x": {"anyOf": [{"const": "red"}, {"enum": ["green"]}, {"type": "string", "maxLength": 2}]}},
        "required": ["x"],
        "additionalProperties": False,
    }
    grammar = compiled(name, wanted(name, CallableTool("f", parameters, strict=True), required=True))
    for value, fits in (("red", True), ("green", True), ("ab", True), ("blue", False)):
        text = text_of(name, [("f", {"x": value})])
        assert accepts(byte_tokenizer(name), grammar.constraint(), text) is fits, value
