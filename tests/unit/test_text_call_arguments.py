"""luce/text/call_arguments.py: names that only the schema tells, and values that a schema names."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.call_parts import Found, fed, of_parts, parser, pieces, printed, read

ODD = (
    "old string",
    " lead",
    "tail ",
    "a:b",
    "a",
    "a b c",
    "x,y",
    "}",
    "{z}",
    'q"q',
    "g>h",
    "k=v",
    "\u2003",
    "",
    "n" * 300,
)
TOOLS: dict[str, Any] = {
    "edit": {
        "type": "object",
        "properties": {
            **{name: {"type": "string"} for name in ODD},
            "inner": {"type": "object", "properties": {"deep name": {"type": "integer"}}, "required": ["must be"]},
            "list": {"type": "array", "items": {"type": "object", "properties": {"in a list": {}}}},
        },
    }
}
#: dialects that do not write arguments as JSON
NAMES = ("qwen_xml", "glm45", "glm47", "minimax_m2", "seed_oss", "deepseek_v32", "deepseek_v4", "gemma4")
_STRINGS = st.text(alphabet="ab ,:}{=\n", max_size=6)
_ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(ODD, _STRINGS),
        "inner": st.fixed_dictionaries({}, optional={"deep name": st.integers(), "must be": st.integers()}),
        "list": st.lists(st.fixed_dictionaries({"in a list": st.booleans()}), max_size=2),
    },
)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(arguments=_ARGUMENTS, cuts=st.lists(st.integers(0, 10_000), max_size=12))
def test_names_of_any_characters_are_read_wherever_the_text_is_cut(
    name: str, special: bool, arguments: dict[str, Any], cuts: list[int]
) -> None:
    text = printed(name, "", [("edit", arguments)])
    whole = parser(name, TOOLS, special=special)
    parts = fed(whole, pieces(name, text, special=special))
    assert of_parts(parts, whole) == Found("", [("edit", arguments)])
    assert fed(parser(name, TOOLS, special=special), pieces(name, text, cuts, special=special)) == parts


def test_keys_with_white_space_around_them_are_read() -> None:
    text = '<|tool_call>call:edit{ old string:<|"|>x<|"|>,\n old string:<|"|>y<|"|> , a : <|"|>z<|"|> }<tool_call|>'
    assert read("gemma4", text, TOOLS).calls == [("edit", {"old string": "y", "a": "z"})]


def test_a_reply_that_ends_in_a_name_of_the_schema_has_what_came_before() -> None:
    for end in ("old str", "old string", "a", ""):
        found = read("gemma4", f"<|tool_call>call:edit{{inner:{{deep name:1}},{end}", TOOLS)
        assert found == Found("", [("edit", {"inner": {"deep name": 1}})], cut=1)


@pytest.mark.parametrize("name", ["qwen_xml", "glm45", "glm47", "minimax_m2", "seed_oss"])
@pytest.mark.parametrize("special", [True, False])
def test_a_string_of_an_enum_stays_one(name: str, special: bool) -> None:
    tools = {"set": {"type": "object", "properties": {"v": {"enum": ["7", 8, "true", None]}}}}
    for value in ("7", 8, "true", None):
        text = printed(name, "", [("set", {"v": value})])
        assert read(name, text, tools, special=special) == Found("", [("set", {"v": value})])
