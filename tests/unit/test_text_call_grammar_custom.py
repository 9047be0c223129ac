"""Grammars of custom tools, whose input is a text: in every format of calls."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from luce.errors import RequestError
from luce.models.calls import Json, Keywords
from luce.text.call_format import CallableTool
from luce.text.reply_format import ReplyFormat
from tests.support.call_grammars import (
    NAMES,
    TOOLS,
    accepts,
    compiled,
    text_of,
    wanted,
)
from tests.support.call_parts import read
from tests.support.call_walks import spelled, walk
from tests.support.tool_templates import byte_tokenizer, format_named

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
    in_json = isinstance(format_named(name).arguments, Json | Keywords)
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
    for name in ("hermes", "lfm2"):
        with pytest.raises(RequestError) as caught:
            compiled(name, wanted(name, custom("grammar", PATCH, strict=True)))
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
