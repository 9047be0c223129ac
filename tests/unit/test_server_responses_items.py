"""Input items as messages: every kind that clients send."""

from __future__ import annotations

from typing import Any

import pytest

from luce.errors import RequestError
from luce.server.responses_items import ItemReader
from luce.server.thinking_signature import sign

Json = dict[str, Any]

MODEL = "fingerprint"
CALL = {"type": "function_call", "call_id": "a", "name": "get", "arguments": '{"x":1}'}


def read(*items: Json) -> list[Json]:
    """The messages of items, without empty fields."""
    reader = ItemReader(MODEL)
    reader.read(items)
    fields = ("role", "content", "tool_calls", "tool_call_id", "reasoning_content")
    return [{k: v for k in fields if (v := getattr(m, k)) is not None} for m in reader.messages]


def called(call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def output(call_id: str, value: Any, kind: str = "function_call_output") -> Json:
    return {"type": kind, "call_id": call_id, "output": value}


def test_messages_of_every_role() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    reply = [{"type": "output_text", "text": "c", "annotations": []}, {"type": "refusal", "refusal": "d"}]
    assert read(
        {"role": "developer", "content": "one"},
        {"type": "message", "id": "m", "role": "user", "content": parts},
        {"type": "message", "role": "assistant", "status": "completed", "content": reply},
        {"role": "system", "content": "in the middle"},
    ) == [
        {"role": "developer", "content": "one"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "cd"},
        {"role": "system", "content": "in the middle"},
    ]


def test_neighbouring_items_of_the_model_are_one_message_and_results_have_the_order_of_the_calls() -> None:
    assert read(
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"role": "assistant", "content": "I look."},
        CALL,
        {**CALL, "call_id": "b", "namespace": "mcp__files", "name": "read"},
        output("b", [{"type": "input_text", "text": "second"}]),
        output("a", "first"),
        {"role": "user", "content": "and?"},
    ) == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [called("a", "get", '{"x":1}'), called("b", "mcp__files__read", '{"x":1}')],
        },
        {"role": "tool", "content": "first", "tool_call_id": "a"},
        {"role": "tool", "content": [{"type": "input_text", "text": "second"}], "tool_call_id": "b"},
        {"role": "user", "content": "and?"},
    ]


def test_custom_tools_and_local_shells() -> None:
    action = {"type": "exec", "command": ["ls"]}
    assert read(
        {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": 'x "y"'},
        output("a", "done", "custom_tool_call_output"),
        {"type": "local_shell_call", "call_id": "b", "action": action, "status": "completed"},
        {"type": "local_shell_call_output", "id": "b", "output": {"exit": 0}},
    ) == [
        {"role": "assistant", "content": "", "tool_calls": [called("a", "patch", '{"input":"x \\"y\\""}')]},
        {"role": "tool", "content": "done", "tool_call_id": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [called("b", "local_shell", '{"type":"exec","command":["ls"]}')],
        },
        {"role": "tool", "content": {"exit": 0}, "tool_call_id": "b"},
    ]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"encrypted_content": sign("whole", MODEL, carries=True), "summary": [{"text": "short"}]}, "whole"),
        ({"encrypted_content": sign("whole", "other", carries=True), "summary": [{"text": "short"}]}, "short"),
        ({"encrypted_content": "of another server", "content": [{"text": "long"}], "summary": []}, "long"),
    ],
)
def test_reasoning_is_restored_from_what_is_encrypted_else_from_its_text(fields: Json, text: str) -> None:
    (message,) = read({"type": "reasoning", **fields}, {"role": "assistant", "content": "Yes."})
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": text}


def test_other_kinds_are_left_out_and_counted() -> None:
    reader = ItemReader(MODEL)
    reader.read([{"type": "web_search_call"}, {"role": "user", "content": "a"}, {"type": 3}, {"type": "new"}])
    assert [message.content for message in reader.messages] == ["a"] and reader.skipped == 3


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "item_reference", "id": "x"}, "input[0]"),
        ({"role": "assistant", "content": [{"type": "input_image"}]}, "input[0].content[0]"),
        ({"type": "local_shell_call", "action": {}}, "input[0].call_id"),
        (CALL, "input"),
    ],
)
def test_refusals(item: Json, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(item)
    assert caught.value.param == param
