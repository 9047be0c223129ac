"""luce/text/call_parser.py: what templates print is read back, cut anywhere; what models get wrong is not lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce.text.reply_parser import CallArguments, CallEnded, CallStarted, Part, TextPart
from tests.support.call_parts import Found, fed, of_parts, parser, pieces, printed, read
from tests.support.tool_templates import TEMPLATES, format_named

TOOLS: dict[str, Any] = {
    "write": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "lines": {"type": "integer"},
            "size": {"type": "number"},
            "force": {"type": "boolean"},
            "options": {"type": "object"},
            "list": {"type": "array"},
            "mode": {"enum": ["a", "w"]},
            "maybe": {"type": ["string", "null"]},
            "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        },
    },
    "get": None,
    "get_time": {"type": "object", "properties": {}},
}
NAMES = sorted(TEMPLATES)
#: dialects whose templates write no text in front of a call
NO_TEXT = ("llama3", "gemma4", "harmony", "cohere2")
WRITE = {"path": "a.txt", "text": "one\n\n  two\n", "lines": 2}

# Texts that break parsers: quotes, tags and markers of the dialects as text, blank lines, emoji.
_NASTY = (
    *'<>"\\{}[]:;,=()`\n\t é\u2028',
    "\U0001f600",
    "</parameter>",
    "<parameter=x>",
    "</arg_value>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "write"}',
    "<think>",
    "[TOOL_CALLS]",
    "```json",
    "null",
    "5",
    "True",
)
_TEXTS = st.lists(st.sampled_from(_NASTY) | st.text(max_size=3), max_size=6).map("".join)
_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | _TEXTS
    | st.floats(allow_nan=False, allow_infinity=False)
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.from_regex(r"[a-z_]\w{0,5}", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=6,
)
_OBJECTS = st.dictionaries(st.from_regex(r"[a-z_]\w{0,5}", fullmatch=True), _VALUES, max_size=3)
_ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "path": _TEXTS,
        "text": _TEXTS,
        "lines": st.integers(-(10**20), 10**20),
        "size": st.floats(allow_nan=False, allow_infinity=False),
        "force": st.booleans(),
        "options": _OBJECTS,
        "list": st.lists(_VALUES, max_size=3),
    },
)
#: what shows that a name is whole, in dialects that do not write it in quotes
_BEHIND_NAME = {
    "qwen_xml": ">",
    "gemma4": "{",
    "lfm2": "(",
    # The spelling of the template in the file's tokens.
    "harmony": "<|channel|>commentary json<|message|>",
    "glm45": "\n",
    "glm47": "<arg_key>",
    "mistral_v11": "[ARGS]",
    "minimax_m2": '">',
    "seed_oss": ">",
    "deepseek_v3": "\n```json",
    "deepseek_v31": "<｜tool▁sep｜>",
    "deepseek_v32": '">',
    "deepseek_v4": '">',
}
# What each dialect cannot say, so that no parser could read it back.
_UNSAID = {
    # A value ends at the first end of a value that something follows which may follow one.
    "qwen_xml": ("</parameter>", "</tool_call>", "</function>"),
    "glm45": ("</arg_value>", "</tool_call>"),
    "glm47": ("</arg_value>", "</tool_call>"),
    "minimax_m2": ("</parameter>", "</invoke>", "</minimax:tool_call>"),
    "seed_oss": ("</parameter>", "</seed:tool_call>", "</function>"),
    "deepseek_v32": ("</｜DSML｜",),
    "deepseek_v4": ("</｜DSML｜",),
    # The template prints null as Python does, which a parser cannot tell from text in places without a schema.
    "gemma4": ('<|"|>', "None"),
}


def _sayable(name: str, value: Any) -> bool:
    if name == "gemma4" and (value is None or isinstance(value, float)):
        return False
    if name == "seed_oss" and isinstance(value, str) and not value.isprintable():
        # Python's escapes of such characters in objects and lists.
        return False
    if isinstance(value, str):
        return not any(text in value for text in _UNSAID.get(name, ()))
    if isinstance(value, dict):
        return all(_sayable(name, item) for item in value.values())
    return not isinstance(value, list) or all(_sayable(name, item) for item in value)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_the_template_prints_is_read_back_wherever_it_is_cut(
    name: str, special: bool, data: st.DataObject
) -> None:
    most = 3 if format_named(name).parallel else 1
    calls = data.draw(
        st.lists(st.tuples(st.just("write"), _ARGUMENTS.filter(lambda a: _sayable(name, a))), min_size=1, max_size=most)
    )
    content = data.draw(st.sampled_from(["", "Let me look."])) if name not in NO_TEXT else ""
    text = printed(name, content, calls)
    cuts = data.draw(st.lists(st.integers(0, 10_000), max_size=12))
    whole = parser(name, TOOLS, special=special)
    parts = fed(whole, pieces(name, text, special=special))
    assert of_parts(parts, whole) == Found(content, calls)
    assert fed(parser(name, TOOLS, special=special), pieces(name, text, cuts, special=special)) == parts


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    words=st.lists(
        st.sampled_from((*_NASTY, "write", "get", "function=", '"arguments": ', '"name": ')) | st.text(max_size=2),
        max_size=12,
    ),
    special=st.booleans(),
    cuts=st.lists(st.integers(0, 10_000), max_size=12),
)
def test_garbage_gives_the_same_parts_wherever_it_is_cut_and_valid_json(
    name: str, words: list[str], special: bool, cuts: list[int]
) -> None:
    begin = printed(name, "", [("write", WRITE)])
    text = begin[: len(begin) * 2 // 3] + "".join(words) + begin
    whole = parser(name, TOOLS, special=special)
    parts = fed(whole, pieces(name, text, special=special))
    of_parts(parts, whole)
    assert fed(parser(name, TOOLS, special=special), pieces(name, text, cuts, special=special)) == parts


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(NAMES), at=st.integers(0, 10_000), special=st.booleans())
def test_a_reply_that_is_cut_off_has_valid_arguments_or_is_text(name: str, at: int, special: bool) -> None:
    text = printed(name, "", [("write", WRITE)])
    [piece, *_] = pieces(name, text, [max(1, at % len(text))], special=special)
    found = parser(name, TOOLS, special=special)
    parts = fed(found, [piece])
    text_found, calls, _, cut = of_parts(parts, found)
    if calls:
        assert calls[0][0] == "write" and set(calls[0][1]) <= set(WRITE) and not text_found
        assert cut or calls[0][1] == WRITE
    else:
        assert text_found.strip() == printed(name, "", [("write", WRITE)])[: len(text_found)].strip()


@pytest.mark.parametrize("name", NAMES)
def test_the_name_goes_out_with_the_token_that_completes_it_and_the_text_of_a_file_step_by_step(name: str) -> None:
    lines = [f"line {i}" for i in range(200)]
    text = printed(name, "", [("write", {"text": "\n".join(lines)})])
    found = parser(name, TOOLS)
    seen, parts = "", list[Part]()
    for piece in pieces(name, text, range(len(text))):
        seen += piece
        new = found.push(piece)
        parts += new
        if any(isinstance(part, CallStarted) for part in new):
            # The first token behind the name shows that it is whole, the last of the mark behind it in some dialects.
            assert found.spelled(seen).removesuffix(_BEHIND_NAME.get(name, '"')).endswith("write")
    fragments = [part.fragment for part in parts if isinstance(part, CallArguments)]
    assert len(fragments) > len(lines) and max(map(len, fragments)) < 40
    assert json.loads("".join(fragments)) == {"text": "\n".join(lines)}


def test_prose_that_spells_the_marker_stays_text_and_flows() -> None:
    """Where the trigger is a token, its spelling is prose; where it is text, a call needs a tool's name."""
    text = "Write <tool_call> and then <function=NAME>, or <tool_call>\n<function=nothing>\n</function>\n</tool_call>."
    for special in (True, False):
        found = parser("qwen_xml", TOOLS, special=special)
        said = "".join(part.text for char in text for part in found.push(char) if isinstance(part, TextPart))
        assert text.startswith(said) and len(said) >= len(text) - len("\n\n<tool_call>")
        assert [part for part in found.flush() if not isinstance(part, TextPart)] == [] and found.calls == 0


def test_a_call_behind_prose_is_found_with_text_between_and_behind_calls() -> None:
    call = printed("hermes", "", [("get", {})])
    assert read("hermes", f"First.\n{call}\nThen:\n{call}\n\nDone.", TOOLS) == Found(
        "First.\nThen:\n\nDone.", [("get", {})] * 2
    )
    assert read("hermes", f"First.\n{call}\n{call}\n \n", TOOLS) == Found("First.", [("get", {})] * 2)


@pytest.mark.parametrize("name", NAMES)
def test_two_calls_and_their_ends_in_one_step(name: str) -> None:
    if name == "llama3":
        text = '{"name": "get", "parameters": {}}; {"name": "write", "parameters": {"lines": 1}}'
    elif name == "harmony":
        text = printed(name, "", [("get", {})]) + printed(name, "", [("write", {"lines": 1})])
    else:
        text = printed(name, "", [("get", {}), ("write", {"lines": 1})])
    found = parser(name, TOOLS)
    [piece] = pieces(name, text)
    assert of_parts([*found.push(piece), *found.flush()], found) == Found("", [("get", {}), ("write", {"lines": 1})])


def test_unknown_names_and_malformed_calls_come_back_as_text() -> None:
    for name in NAMES:
        text = printed(name, "", [("no_such_tool", {"a": 1})])
        found = read(name, text, TOOLS)
        assert found.text.strip() == text.strip() and not found.calls and found.bad
    for text in (
        "<tool_call>\n{}\n</tool_call>",
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        "<tool_call>nonsense",
    ):
        assert read("hermes", text, TOOLS) == Found(text, [], bad=1)


def test_a_name_that_begins_another_tools_name_is_told_apart() -> None:
    assert read("hermes", printed("hermes", "", [("get_time", {})]), TOOLS).calls == [("get_time", {})]
    assert read("glm47", printed("glm47", "", [("get", {})]), TOOLS).calls == [("get", {})]
    assert not read("glm47", "<tool_call>get_tim</tool_call>", TOOLS).calls


# --- what models write instead of what their template prints


@pytest.mark.parametrize(
    ("name", "text"),
    [
        # Keys of other dialects, members in another order, members beside, no white space, no end marker.
        ("hermes", '<tool_call>\n{"name": "get", "parameters": {"a": 1}}\n</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "get"}</tool_call>'),
        ("hermes", '<tool_call>\n{"id": "x1", "type": "function", "name": "get", "arguments": {"a": 1}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "get", "arguments": {"a": 1}}'),
        # The arguments as the text of an object.
        ("hermes", '<tool_call>\n{"name": "get", "arguments": "{\\"a\\": 1}"}\n</tool_call>'),
        ("llama3", '{"name": "get", "parameters": "{\\"a\\": 1}"}'),
        ("llama3", '<|python_tag|>{"name": "get", "parameters": {"a": 1}}'),
        ("llama3", '\n{"name": "get", "arguments": {"a": 1}}'),
        # No line feed behind the opening tag, the closing tag twice or missing.
        ("qwen_xml", "<tool_call>\n<function=get>\n<parameter=a>1</parameter>\n</function>\n</tool_call>"),
        (
            "qwen_xml",
            "<tool_call>\n<function=get>\n<parameter=a>\n1\n</parameter>\n</parameter>\n</function>\n</tool_call>",
        ),
        ("qwen_xml", "<tool_call>\n<function=get>\n<parameter=a>\n1\n</parameter>\n</tool_call>"),
        ("qwen_xml", "<tool_call>\n<function=get>\n<parameter=a>\n1\n</function>\n</tool_call>"),
        ("qwen_xml", "<tool_call>\n<function=get>\n<parameter=a>\n1\n</tool_call>"),
        # The other line feeds of the family's two dialects.
        ("glm45", "<tool_call>get<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"),
        ("glm47", "<tool_call>get\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
        # The recipient behind the channel or in front of it, words of other kinds of bodies, the reasoning's channel.
        ("harmony", '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"a": 1}'),
        ("harmony", '<|channel|>commentary to=functions.get<|constrain|>json<|message|>{"a": 1}'),
        ("harmony", '<|channel|>commentary to=functions.get json<|message|>{"a": 1}'),
        ("harmony", '<|channel|>commentary to=functions.get<|message|>{"a": 1}'),
        ("harmony", '<|channel|>analysis to=functions.get code<|message|>{"a": 1}'),
        ("harmony", ' to=functions.get<|channel|>commentary <|constrain|>json<|message|>{"a": 1}'),
        ("harmony", ' to=functions.get<|channel|>analysis<|message|>{"a": 1}'),
        # Round brackets, an equals sign.
        ("gemma4", "<|tool_call>call:get(a:1)<tool_call|>"),
        ("gemma4", "<|tool_call>call:get{a=1}<tool_call|>"),
        # One call where the template shows a list.
        ("smollm2", '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'),
        ("smollm2", '<tool_call>[{"name": "get", "arguments": {"a": 1}}]</tool_call>'),
        # Line feeds elsewhere, no number or one that is no string, members in another order.
        (
            "cohere2",
            '<|START_ACTION|>\n[\n  {\n "tool_call_id": "7",\n "tool_name": "get",'
            ' "parameters": {"a": 1}}\n]\n<|END_ACTION|>',
        ),
        ("cohere2", '<|START_ACTION|>[{"tool_name": "get", "parameters": {"a": 1}}]<|END_ACTION|>'),
        ("cohere2", '<|START_ACTION|>[{"tool_call_id": 0, "tool_name": "get", "parameters": {"a": 1}}]<|END_ACTION|>'),
        (
            "cohere2",
            '<|START_ACTION|>[{"parameters": {"a": 1}, "tool_name": "get", "tool_call_id": "0"}]<|END_ACTION|>',
        ),
        ("mistral_v7", '[TOOL_CALLS][{"name": "get", "arguments": {"a": 1}}]'),
        ("mistral_v11", '[TOOL_CALLS]get[CALL_ID]123456789[ARGS]{"a": 1}'),
    ],
)
def test_other_spellings_are_read(name: str, text: str) -> None:
    assert read(name, text, TOOLS) == Found("", [("get", {"a": 1})])


def test_a_list_of_no_calls_is_nothing() -> None:
    assert read("smollm2", "<tool_call>[]</tool_call>", TOOLS) == Found("", [])


def test_the_number_that_a_model_writes_is_no_id() -> None:
    found = parser("cohere2", TOOLS)
    text = '<|START_ACTION|>[{"tool_call_id": "3", "tool_name": "get", "parameters": {}}]<|END_ACTION|>'
    [started, *_] = fed(found, pieces("cohere2", text))
    assert started == CallStarted(0, "get", None, "3")


def test_the_id_that_a_model_writes_is_kept() -> None:
    found = parser("mistral_v11", TOOLS)
    [started, *_] = fed(found, pieces("mistral_v11", "[TOOL_CALLS]get[CALL_ID]123456789[ARGS]{}"))
    assert started == CallStarted(0, "get", "123456789")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('<|"|>it is <|"|>so<|"|> said<|"|>', 'it is "so" said'),
        ('plain words<|"|>', "plain words"),
        ('<|"|>a } and { b<|"|>', "a } and { b"),
        ('<|"|>a, b: c<|"|>', "a, b: c"),
    ],
)
def test_quotes_of_gemma_in_wrong_places(value: str, expected: str) -> None:
    text = f"<|tool_call>call:write{{text:{value},lines:1}}<tool_call|>"
    assert read("gemma4", text, TOOLS) == Found("", [("write", {"text": expected, "lines": 1})])


def test_values_are_typed_by_the_schema_and_numbers_stay_as_written() -> None:
    def value(key: str, text: str) -> str:
        found = parser("qwen_xml", TOOLS)
        call = f"<tool_call>\n<function=write>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
        fragments = [part.fragment for part in fed(found, pieces("qwen_xml", call)) if isinstance(part, CallArguments)]
        return "".join(fragments).removeprefix(f'{{"{key}": ').removesuffix("}")

    assert value("text", "5") == '"5"' and value("lines", "5") == "5" and value("size", "1.0") == "1.0"
    assert value("lines", "12345678901234567890123") == "12345678901234567890123"
    assert value("force", "True") == "true" and value("options", "{'a': 1}") == '{"a": 1}'
    assert value("mode", "5") == '"5"' and value("maybe", "null") == "null" and value("maybe", "5") == '"5"'
    assert (
        value("either", "5") == "5"
        and value("either", "5 apples") == '"5 apples"'
        and value("either", "[5]") == '"[5]"'
    )
    # A misspelled name is passed on with its value.
    assert value("forc", "false") == "false" and value("other", "plain") == '"plain"'


def test_blank_lines_of_a_file_are_counted() -> None:
    for text in ("", "\n", "\n\nx\n\n", "  indented\n"):
        assert read("qwen_xml", printed("qwen_xml", "", [("write", {"text": text})]), TOOLS).calls == [
            ("write", {"text": text})
        ]


def test_the_end_of_a_value_as_text_does_not_end_it() -> None:
    text = "a\n</parameter>\nis a tag, </function> too"
    assert read("qwen_xml", printed("qwen_xml", "", [("write", {"text": text})]), TOOLS).calls == [
        ("write", {"text": text})
    ]


def test_a_call_that_goes_wrong_behind_its_start_ends_with_valid_json_and_the_rest_is_text() -> None:
    found = read("hermes", '<tool_call>\n{"name": "write", "arguments": {"path": "a", lines: 3}}\n</tool_call>', TOOLS)
    assert found.calls == [("write", {"path": "a"})] and found.cut == 1 and "lines: 3}}" in found.text
    found = read("hermes", '<tool_call>\n{"name": "get", "arguments": [1]}\n</tool_call>', TOOLS)
    assert found.calls == [("get", {})] and found.cut == 1 and found.text.startswith("[1]}")
    found = read("qwen_xml", '<tool_call>\n<function=get>\n{"a": 1}\n</function>\n</tool_call>', TOOLS)
    assert found.calls == [("get", {})] and found.cut == 1 and '{"a": 1}' in found.text


def test_line_feeds_in_json_strings_and_python_literals_are_read() -> None:
    text = (
        '<tool_call>\n{"name": "write", "arguments": {"text": "a\nb\tc", "force": True, "maybe": None,}}\n</tool_call>'
    )
    assert read("hermes", text, TOOLS).calls == [("write", {"text": "a\nb\tc", "force": True, "maybe": None})]


def test_a_special_token_inside_a_json_string_is_its_text() -> None:
    call = printed("hermes", "", [("write", {"text": "<tool_call></tool_call>"})])
    assert read("hermes", call, TOOLS) == Found("", [("write", {"text": "<tool_call></tool_call>"})])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "qwen_xml",
            "<tool_call>\n<function=write>\n<parameter=lines>\nVALUE\n</parameter>\n</function>\n</tool_call>",
        ),
        ("gemma4", "<|tool_call>call:write{lines:VALUE}<tool_call|>"),
        ("llama3", '{"name": "write", "parameters": "{\\"lines\\": \\"HALF\\"}"}'),
    ],
)
def test_half_a_surrogate_pair_spells_no_marker(name: str, text: str) -> None:
    # In marked texts the halves of pairs stand for the markers.
    text = text.replace("VALUE", r'"\ud800"').replace("HALF", r"\ud800")
    assert read(name, text, TOOLS) == Found("", [("write", {"lines": "\ufffd"})])


def test_json_is_passed_on_as_the_model_wrote_it() -> None:
    found = parser("hermes", TOOLS)
    text = '<tool_call>\n{"name":"get","arguments":{"b" :1.50,\n "a":"\\u00e9"}}\n</tool_call>'
    fragments = [part.fragment for part in fed(found, pieces("hermes", text)) if isinstance(part, CallArguments)]
    assert "".join(fragments) == '{"b" :1.50,\n "a":"\\u00e9"}'


def test_a_reply_of_json_is_no_call_of_llama() -> None:
    for text in ('{"name": "Bob", "age": 3}', '{"answer": 1}', 'See {"name": "get", "parameters": {}}', '{"nam'):
        assert read("llama3", text, TOOLS).text == text and not read("llama3", text, TOOLS).calls


def test_without_tools_every_name_is_one() -> None:
    found = parser("hermes", None)
    parts = fed(found, pieces("hermes", printed("hermes", "", [("mcp__any.tool-1", {"k": "5"})])))
    assert CallStarted(0, "mcp__any.tool-1") in parts and CallEnded(0) in parts
