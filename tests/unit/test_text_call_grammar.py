"""Grammars of calls, against the templates that print calls, the parser that reads them, and the tools' schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from luce.engine.sequence import Constraint
from luce.errors import RequestError
from luce.models.calls import Json
from luce.text.call_format import CallableTool, CallFormat
from luce.text.grammar import CompiledGrammar, GrammarCompiler, WantedReply
from luce.text.reply_format import ReplyFormat
from luce.text.tokenizer import Tokenizer
from tests.support.call_parts import printed, read
from tests.support.call_walks import ends, spelled, walk
from tests.support.masks import allowed_ids
from tests.support.tool_templates import TEMPLATES, byte_tokenizer, format_named

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize("name", ["qwen_xml", "glm45", "minimax_m2", "seed_oss", "deepseek_v32", "gemma4"])
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


@pytest.mark.parametrize("name", ["qwen_xml", "gemma4"])
@pytest.mark.parametrize(
    ("inner", "fits", "refused"),
    [
        ({"type": "string", "maxLength": 3}, "abc", "abcd"),
        ({"type": "string", "minLength": 2}, "ab", "a"),
    ],
)
def test_strict_strings_without_quotes_keep_their_length(name: str, inner: Any, fits: str, refused: str) -> None:
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


@pytest.mark.parametrize("name", ["qwen_xml", "gemma4"])
def test_a_strict_object_with_more_than_properties_is_refused(name: str) -> None:
    more = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    for keyword, value in (("allOf", [{"required": ["a"]}]), ("minProperties", 1), ("anyOf", [{"required": ["a"]}])):
        tools = (CallableTool("t", more | {keyword: value}, strict=True, param="tools[0].parameters"),)
        with pytest.raises(RequestError) as caught:
            compiled(name, wanted(name, *tools))
        assert caught.value.param == f"tools[0].parameters.{keyword}"


@pytest.mark.parametrize("name", ["qwen_xml", "gemma4"])
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


@pytest.mark.parametrize("name", ["qwen_xml", "gemma4"])
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


@pytest.mark.parametrize("name", ["qwen_xml", "gemma4"])
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


#: dialects and vocabularies in which a grammar allows what the templates print
PRINTED = [(name, special) for name in NAMES for special in (True, False) if special or name != "harmony"]
#: one text parameter, as a custom tool of the Responses API is shown to the model
TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
#: with an alias and an import, as agents' grammars of patches have them
PATCH = r"""
start: "*** Begin" LF hunk+ "*** End" LF?
hunk: "@@ " NAME LF line+
line: ("+" | "-" | " ") /[^\n]*/ LF -> line
NAME: /[a-z"<>\/.]+/
%import common.LF
"""
PATCHES = ('*** Begin\n@@ a"</b>.py\n+x = "1\\n"\n-\n @@\n*** End', "*** Begin\n@@ a\n+\n@@ b\n-\n*** End\n")
NO_PATCHES = ("", "*** Begin\n*** End", "*** Begin\n@@ a\nx\n*** End", PATCHES[0] + "!")


def custom(kind: Any, value: str, *, strict: bool = False) -> CallableTool:
    form = ReplyFormat(kind, value, param="tools[4].format.definition")
    return CallableTool("patch", TEXT, strict=strict, param="tools[4].parameters", input=form)


@pytest.mark.parametrize(("name", "special"), PRINTED)
def test_the_text_of_a_custom_tool_is_one_of_its_grammar_where_calls_are_not_json(name: str, special: bool) -> None:
    other = replace(custom("grammar", 'start: "other"'), name="other")
    form = wanted(name, TOOLS[1], other, custom("grammar", PATCH), required=True)
    grammar = compiled(name, form, special=special)
    in_json = isinstance(format_named(name).arguments, Json)
    assert grammar.relaxed == (("tools[4].format.definition",) if in_json else ())
    tokenizer = byte_tokenizer(name, special=special)
    for text in (*PATCHES, *NO_PATCHES):
        written = text_of(name, [("patch", {"input": text})])
        assert accepts(tokenizer, grammar.constraint(), written) is (in_json or text in PATCHES), text
    # The grammar of one tool is that of no other.
    for text, fits in (("other", True), (PATCHES[0], in_json)):
        assert accepts(tokenizer, grammar.constraint(), text_of(name, [("other", {"input": text})])) is fits
    assert accepts(tokenizer, grammar.constraint(), text_of(name, [("stop", {})]))


@pytest.mark.parametrize(("name", "special"), PRINTED)
def test_the_text_of_a_custom_tool_matches_its_regular_expression(name: str, special: bool) -> None:
    pattern = '(a|"\\n|<b>)+\\\\?'
    grammar = compiled(name, wanted(name, custom("regex", pattern), required=True, parallel=False), special=special)
    assert grammar.relaxed == ()
    tokenizer, found = byte_tokenizer(name, special=special), set()
    for text in ("a", 'a"\n<b>a', "a\\", "", "b", 'a"', "a\\\\"):
        fits = re.fullmatch(pattern, text) is not None
        assert accepts(tokenizer, grammar.constraint(), text_of(name, [("patch", {"input": text})])) is fits, text
    for seed in range(6):
        ids = walk(name, grammar.constraint(), seed, special=special)
        text = spelled(name, ids or [], special=special)
        for _, arguments in read(name, text, {"patch": TEXT}, special=special).calls:
            assert re.fullmatch(pattern, arguments["input"])
            found.add(arguments["input"])
    assert len(found) >= 3


@pytest.mark.parametrize("name", NAMES)
def test_a_regular_expression_that_matches_any_text_lets_the_call_end(name: str) -> None:
    grammar = compiled(name, wanted(name, custom("regex", "(.|\\n)*"), required=True, parallel=False))
    for text in ("", "any\n</p>\n\ntext"):
        written = text_of(name, [("patch", {"input": text})])
        assert accepts(byte_tokenizer(name), grammar.constraint(), written)


@pytest.mark.parametrize("name", ["qwen_xml", "gemma4", "hermes"])
@pytest.mark.parametrize(
    ("kind", "value", "code", "why"),
    [
        ("grammar", 'start: "a" other\nother: missing', "invalid_value", 'line 2, column 8: unknown name: "missing"'),
        ("grammar", "no rule", "invalid_value", "line 1, column "),
        ("regex", "a(", "invalid_value", "unclosed group"),
        ("regex", "(?=a)b", "invalid_value", "look-around"),
        ("regex", "a{1,99999}", "schema_too_complex", "repeats 99,999 times"),
    ],
)
def test_what_is_no_grammar_of_a_custom_tool_is_refused(name: str, kind: str, value: str, code: str, why: str) -> None:
    with pytest.raises(RequestError) as caught:
        compiled(name, wanted(name, TOOLS[0], custom(kind, value)))
    assert (caught.value.param, caught.value.code) == ("tools[4].format.definition", code)
    assert str(caught.value).startswith("tools[4].format.definition: ") and why in str(caught.value)


def test_strict_grammars_of_custom_tools_are_refused_where_calls_are_json() -> None:
    for name, tool in (
        ("qwen_xml", custom("grammar", PATCH, strict=True)),
        ("hermes", custom("regex", "a", strict=True)),
    ):
        assert compiled(name, wanted(name, tool)).relaxed == ()
    with pytest.raises(RequestError) as caught:
        compiled("hermes", wanted("hermes", custom("grammar", PATCH, strict=True)))
    assert (caught.value.param, caught.value.code) == ("tools[4].format.definition", "unsupported_schema")


def test_grammars_of_a_custom_tool_and_of_the_reply_stand_beside_each_other() -> None:
    body = ReplyFormat("grammar", 'start: "plain " /[0-9]+/')
    grammar = compiled("qwen_xml", wanted("qwen_xml", custom("grammar", PATCH)), body=body)
    tokenizer = byte_tokenizer("qwen_xml")
    for text, fits in (("plain 12", True), ("plain x", False)):
        assert accepts(tokenizer, grammar.constraint(), text) is fits
    for text in (*PATCHES, *NO_PATCHES):
        written = text_of("qwen_xml", [("patch", {"input": text})])
        assert accepts(tokenizer, grammar.constraint(), written) is (text in PATCHES)
