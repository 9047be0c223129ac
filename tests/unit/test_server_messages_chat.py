"""Bodies of /v1/messages as chat requests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from luce.errors import RequestError
from luce.server.messages_chat import Translated, translated
from luce.server.messages_request import MessagesRequest
from luce.server.schema import decode
from luce.server.thinking_signature import sign

Json = dict[str, Any]

HI: Json = {"role": "user", "content": "hi"}
MARK = {"cache_control": {"type": "ephemeral"}}
TOOL: Json = {"name": "read", "description": "Reads.", "input_schema": {"type": "object"}}
MODEL = "0123abcd"


def translate(*, reasons: bool = True, **body: Any) -> Translated:
    request, _ = decode(msgspec.json.encode({"max_tokens": 9, "messages": [HI], **body}), MessagesRequest)
    return translated(request, MODEL, reasons=reasons)


def chat(*messages: Json, **body: Any) -> list[Json]:
    """The messages of the chat, with the fields that are set."""
    return [msgspec.to_builtins(message) for message in translate(messages=list(messages), **body).chat.messages or ()]


def text(value: str, **fields: Any) -> Json:
    return {"type": "text", "text": value, **fields}


def use(id: str, name: str = "read", **input: Any) -> Json:
    return {"type": "tool_use", "id": id, "name": name, "input": input}


def result(id: str, content: Any = "done", **fields: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **fields}


def assistant(*blocks: Json) -> Json:
    return {"role": "assistant", "content": list(blocks)}


def user(*blocks: Json) -> Json:
    return {"role": "user", "content": list(blocks)}


def test_a_list_of_one_text_is_that_text() -> None:
    assert chat(user(text("hi"))) == chat(HI) == [HI]
    assert chat(HI, system=[text("Be brief.")]) == chat(HI, system="Be brief.")


def test_cache_marks_never_change_the_messages() -> None:
    plain = [user(text("a"), text("b")), assistant(text("c"), use("1")), user(result("1", [text("d")]), text("e"))]
    marked = msgspec.json.decode(msgspec.json.encode(plain))
    for message in marked:
        for block in message["content"]:
            block |= MARK
    marked[2]["content"][0]["content"][0] |= MARK
    assert chat(*plain, system=[text("s")], tools=[TOOL]) == chat(
        *marked, system=[text("s", **MARK)], tools=[{**TOOL, **MARK}], **MARK
    )


@pytest.mark.parametrize(
    ("body", "after"),
    [
        ({}, None),
        ({"system": [text("s", **MARK)]}, 3),
        ({"tools": [{**TOOL, **MARK}], "system": "s"}, 3),
        ({"messages": [user(text("a", **MARK)), assistant(text("b")), HI]}, 2),
        ({"messages": [HI, assistant(text("b", **MARK)), HI], "system": "s"}, 1),
        ({"messages": [HI, assistant(use("1")), user(result("1", [text("d", **MARK)]))]}, 0),
        (MARK, 0),
    ],
)
def test_the_last_cache_mark_is_found(body: Json, after: int | None) -> None:
    messages = [HI, assistant(text("b")), HI]
    assert translate(**{"messages": messages, **body}).after_mark == after


@pytest.mark.parametrize("header", ["x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;"])
def test_lines_with_a_changing_hash_are_removed(header: str) -> None:
    expected = chat(HI, system="Be brief.")
    assert chat(HI, system=[text(header), text("Be brief.")]) == expected
    assert chat(HI, system=f"{header}\nBe brief.") == expected
    assert chat(HI, system=[text(f"{header}\n", **MARK), text(f"Be brief.\n{header}")])[0]["content"] == "Be brief.\n"
    assert chat(HI, system=header) == chat(HI) == [HI]
    # A user may speak of it.
    assert chat({"role": "user", "content": header})[0]["content"] == header


def test_results_come_in_the_order_of_their_calls() -> None:
    calls = assistant(text("Two calls."), use("a", path="x"), use("b"))
    found = chat(HI, calls, user(result("b", "second"), result("a", "first"), text("Go on.")))
    assert [(message["role"], message["content"]) for message in found[2:]] == [
        ("tool", "first"),
        ("tool", "second"),
        ("user", "Go on."),
    ]
    assert [message["tool_call_id"] for message in found[2:4]] == ["a", "b"]
    assert [call["function"] for call in found[1]["tool_calls"]] == [
        {"name": "read", "arguments": '{"path":"x"}'},
        {"name": "read", "arguments": "{}"},
    ]


@pytest.mark.parametrize(
    ("block", "content"),
    [
        (result("1", "text"), "text"),
        (result("1", ""), ""),
        ({"type": "tool_result", "tool_use_id": "1"}, ""),
        (result("1", None), ""),
        (result("1", []), ""),
        (result("1", [text("a"), text("b")]), "a\n\nb"),
        (result("1", "no file", is_error=True), "Error: no file"),
        (result("1", "fine", is_error=False), "fine"),
        (result("1", [{"type": "tool_reference", "tool_name": "grep"}]), "Found the tool grep."),
        (
            result("1", [{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}]),
            "d",
        ),
    ],
)
def test_results_as_text(block: Json, content: str) -> None:
    *_, last = chat(HI, assistant(use("1")), user(block))
    assert last == {"role": "tool", "content": content, "tool_call_id": "1"}


def test_neighbours_of_one_role_are_one_message() -> None:
    found = chat(HI, HI, assistant(text("a")), assistant(use("1")), user(result("1")), user(text("b")))
    assert [(message["role"], message["content"]) for message in found] == [
        ("user", "hi\n\nhi"),
        ("assistant", "a"),
        ("tool", "done"),
        ("user", "b"),
    ]
    assert len(found[1]["tool_calls"]) == 1


def test_system_messages_stay_where_they_are() -> None:
    system = {"role": "system", "content": "Note."}
    listed = {"role": "system", "content": [text("Note.", **MARK)]}
    assert chat(HI, system, system, assistant(text("a")), HI) == chat(HI, listed, system, assistant(text("a")), HI)
    assert [message["role"] for message in chat(HI, system, system, HI)] == ["user", "system", "system", "user"]
    passing = {**system, "clear_at": "next_user_message"}
    assert chat(HI, passing) == chat(HI, system)
    assert chat(HI, passing, assistant(text("a")), HI) == chat(HI, assistant(text("a")), HI)


def test_reasoning_comes_back_from_the_text_or_from_its_signature() -> None:
    def reasoning(block: Json) -> Any:
        return chat(HI, assistant(block, text("a")), HI)[1].get("reasoning_content")

    assert reasoning({"type": "thinking", "thinking": "Hm.", "signature": "foreign"}) == "Hm."
    assert reasoning({"type": "thinking", "thinking": "Hm."}) == "Hm."
    carrying = {"type": "thinking", "thinking": "", "signature": sign("Hm.", MODEL, carries=True)}
    assert reasoning(carrying) == "Hm."
    assert reasoning({**carrying, "signature": sign("Hm.", "other", carries=True)}) is None
    assert reasoning({"type": "redacted_thinking", "data": "EmwKAhgB"}) is None


def test_documents() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "Once."}
    document = {"type": "document", "source": source, "title": "Tale", "citations": {"enabled": False}}
    assert chat(user(document, text("Whose?")))[0]["content"] == "Tale\n\nOnce.\n\nWhose?"
    for content in ("Once.", [text("Once.")]):
        nested = {"type": "document", "source": {"type": "content", "content": content}}
        assert chat(user(nested))[0]["content"] == "Once."


def test_a_last_assistant_message_is_continued() -> None:
    assert translate(messages=[HI, assistant(text("Once"))]).chat.continue_final_message is True
    assert translate().chat.continue_final_message is None


# --- tools


def test_tools_of_the_client_are_shown() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    found = translate(
        tools=[
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
            {"type": "custom", "name": "count", "input_schema": schema, "strict": True, **MARK},
            {**TOOL, "defer_loading": True},
            {"type": "mcp_toolset", "mcp_server_name": "x"},
        ]
    )
    assert found.skipped_tools == 2
    function = {"name": "count", "parameters": schema, "strict": True}
    assert found.chat.tools == [{"type": "function", "function": function}]
    assert dict(found.tools) == {0: 1}


def test_a_deferred_tool_is_shown_once_it_is_found() -> None:
    def names(*messages: Json) -> list[str]:
        tools = translate(messages=list(messages), tools=[TOOL, {**TOOL, "name": "late", "defer_loading": True}])
        return [tool["function"]["name"] for tool in tools.chat.tools or ()]

    found = user(result("1", [{"type": "tool_reference", "tool_name": "late"}]))
    change = {"tool": {"type": "tool_reference", "name": "late"}}
    added = {"role": "system", "content": [{"type": "tool_addition", **change}]}
    removed = {"role": "system", "content": [{"type": "tool_removal", **change}]}
    assert names(HI) == ["read"]
    assert names(HI, assistant(use("1")), found) == names(HI, added) == ["read", "late"]
    assert names(HI, added, assistant(text("a")), HI, removed) == ["read"]


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        ({"type": "auto"}, ("auto", None)),
        ({"type": "none"}, ("none", None)),
        ({"type": "any"}, ("required", None)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", False)),
        ({"type": "any", "disable_parallel_tool_use": False}, ("required", True)),
    ],
)
def test_tool_choices(choice: Json, fields: tuple[str, bool | None]) -> None:
    found = translate(tools=[TOOL], tool_choice=choice).chat
    assert (found.tool_choice, found.parallel_tool_calls) == fields


def test_a_named_tool() -> None:
    found = translate(tools=[TOOL], tool_choice={"type": "tool", "name": "read"}).chat.tool_choice
    assert msgspec.to_builtins(found)["function"] == {"name": "read"}


# --- reasoning and output


@pytest.mark.parametrize(
    ("body", "kind", "effort"),
    [
        ({}, None, None),
        ({"thinking": {"type": "adaptive"}}, "adaptive", None),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "adaptive", "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "enabled", None),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}}, "disabled", None),
        ({"output_config": {"effort": "xhigh"}}, None, "xhigh"),
    ],
)
def test_thinking_and_effort(body: Json, kind: str | None, effort: str | None) -> None:
    found = translate(**body).chat
    assert (found.thinking and found.thinking.type, found.reasoning_effort) == (kind, effort)
    assert found.thinking is None or found.thinking.budget_tokens == body["thinking"].get("budget_tokens")
    # Claude Code sends both to every model.
    assert translate(reasons=False, **body).chat.reasoning_effort is None


def test_the_format_of_the_reply() -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    expected = {"type": "json_schema", "json_schema": {"name": "reply", "schema": {"type": "object"}, "strict": True}}
    assert translate(output_config={"format": wanted}).chat.response_format == expected
    assert translate(output_format=wanted).chat.response_format == expected
    assert translate(output_config={"effort": "low"}).chat.response_format is None


def test_limits_and_sampling_are_passed_on() -> None:
    found = translate(temperature=0.5, top_k=7, top_p=0.5, stop_sequences=["x"], metadata={"user_id": "u"}).chat
    assert (found.temperature, found.top_k, found.top_p) == (0.5, 7, 0.5)  # type: ignore[attr-defined]
    assert (found.max_tokens, found.stop, found.metadata) == (9, ["x"], {"user_id": "u"})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [HI, assistant(use("1"))]}, "messages"),
        ({"messages": [{"role": "system", "content": []}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0]"),
        ({"messages": [user({"type": "video"})]}, "messages[0].content[0].type"),
        ({"messages": [user(text("a"), {"type": "image", "source": {}})]}, "messages[0].content[1]"),
        ({"messages": [user(use("1"))]}, "messages[0].content[0]"),
        ({"messages": [HI, assistant(result("1")), HI]}, "messages[1].content[0]"),
        (
            {"messages": [HI, assistant(use("1")), user(result("1", [text("a"), {"type": "image", "source": {}}]))]},
            "messages[2].content[0].content[1]",
        ),
        ({"messages": [user({"type": "document", "source": {"type": "url"}})]}, "messages[0].content[0].source"),
        (
            {"messages": [user({"type": "document", "source": {"type": "content", "content": [5]}})]},
            "messages[0].content[0].source.content",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [TOOL, {"name": "f"}]}, "tools[1].input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_path(body: Json, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        translate(**body)
    assert caught.value.param == param and caught.value.status == 400
    assert str(caught.value).startswith(f"{param}: ")
