"""Calls that a grammar holds: every choice of tools, on the three APIs, with a model that would rather say something
else."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from tests.support.http_server import Running, running
from tests.support.scripted_agent import agent_chat, call
from tests.support.scripted_model import saying

CHAT = "/v1/chat/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["c", "k"]}, "days": {"enum": [1, 2]}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
NAMES = ("weather", "time")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
NAMED = {"type": "function", "function": {"name": "time"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


def saying_text(text: str, tool_format: str = "hermes") -> dict[str, Any]:
    return {"chat": functools.partial(agent_chat, tool_format=tool_format), "context": 4096, "script": saying(text)}


def ask(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "temperature": 0, **fields}


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    entries = choice["message"].get("tool_calls") or []
    return [(entry["function"]["name"], json.loads(entry["function"]["arguments"])) for entry in entries]


def valid(arguments: Any) -> bool:
    return arguments.keys() == {"unit", "days"} and arguments["unit"] in ("c", "k") and arguments["days"] in (1, 2)


async def chosen(here: Running, **fields: Any) -> Any:
    status, reply, _ = await here.post(CHAT, ask(**fields))
    assert status == 200, reply
    return reply["choices"][0]


@pytest.mark.parametrize("tool_format", ["hermes", "qwen_xml", "glm47", "llama3", "smollm2", "gemma4", "deepseek_v32"])
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", set(NAMES)), (NAMED, {"time"}), (ALLOWED, {"time"})],
    ids=["any", "named", "allowed"],
)
async def test_a_reply_that_must_call_calls(tool_format: str, choice: Any, names: set[str]) -> None:
    async with running(model=saying_text("I would rather talk.", tool_format)) as here:
        for parallel in (None, False):
            found = await chosen(here, tool_choice=choice, parallel_tool_calls=parallel, max_tokens=3000)
            calls = calls_of(found)
            assert calls and {name for name, _ in calls} <= names and all(valid(arguments) for _, arguments in calls)
            assert found["finish_reason"] == "tool_calls" and not found["message"]["content"]
            grammar = found["finish_details"]["grammar"]
            assert grammar == {"kind": "tools", "relaxed": [], "forced": grammar["forced"]}
            if parallel is False or choice is NAMED:
                assert len(calls) == 1


async def test_a_strict_tool_is_held_from_its_trigger_on() -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    said = "Text. " + call("weather", {"unit": "x", "more": 5}) + " Bye."
    async with running(model=saying_text(said)) as here:
        found = await chosen(here, tools=strict)
        assert found["message"]["content"].startswith("Text.")
        assert [name for name, _ in calls_of(found)][:1] == ["weather"]
        assert all(valid(arguments) for _, arguments in calls_of(found))
        # Without strict the marker is text here, so that nothing holds the call.
        loose = await chosen(here)
        assert calls_of(loose) == [("weather", {"unit": "x", "more": 5})] and "grammar" not in loose["finish_details"]
    async with running(model=saying_text(said), tool_grammar="on") as here:
        assert all(valid(arguments) for _, arguments in calls_of(await chosen(here)))
    async with running(model=saying_text(said), tool_grammar="off") as here:
        assert all(valid(arguments) for _, arguments in calls_of(await chosen(here, tools=strict)))


async def test_auto_leaves_text_alone() -> None:
    async with running(model=saying_text("Just text, no <tool_ call>."), tool_grammar="on") as here:
        found = await chosen(here)
        assert found["message"]["content"] == "Just text, no <tool_ call>." and found["finish_reason"] == "stop"


async def test_a_reply_is_calls_or_the_format() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    async with running(model=saying_text("Text.")) as here:
        found = await chosen(here, response_format=form)
        calls = calls_of(found)
        assert calls or valid(json.loads(found["message"]["content"]))
        status, reply, _ = await here.post(CHAT, ask(response_format=form, tool_choice="required"))
        assert (status, reply["error"]["param"], reply["error"]["code"]) == (400, "tool_choice", "invalid_value")


async def test_other_apis_force_calls_too() -> None:
    messages: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2000,
        "temperature": 0,
        "tools": [{"name": name, "input_schema": SCHEMA} for name in NAMES],
    }
    responses = {
        "input": "hi",
        "temperature": 0,
        "tools": [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in NAMES],
    }
    async with running(model=saying_text("Text.")) as here:
        _, reply, _ = await here.post("/v1/messages", {**messages, "tool_choice": {"type": "tool", "name": "time"}})
        assert [(block["type"], block["name"]) for block in reply["content"]] == [("tool_use", "time")], reply
        assert valid(reply["content"][0]["input"]) and reply["stop_reason"] == "tool_use"
        _, reply, _ = await here.post(
            "/v1/responses", {**responses, "tool_choice": {"type": "function", "name": "time"}}
        )
        items = [item for item in reply["output"] if item["type"] == "function_call"]
        assert [item["name"] for item in items] == ["time"] and valid(json.loads(items[0]["arguments"])), reply


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            CHAT,
            ask(tools=[{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]),
            "tools[0].function.parameters.not",
        ),
        (
            CHAT,
            ask(tools=[{"type": "function", "function": {"name": "a b", "strict": True}}]),
            "tools[0].function.name",
        ),
        (CHAT, ask(tools=[{"type": "function", "function": {"name": "f", "strict": 1}}]), "tools[0].function.strict"),
        (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 9,
                "tools": [{"name": "f", "strict": True, "input_schema": {"type": "object", "not": {}}}],
            },
            "tools[0].input_schema.not",
        ),
    ],
)
async def test_strict_tools_are_refused_by_the_field_of_their_api(path: str, body: Any, param: str) -> None:
    async with running(model=saying_text("Text.")) as here:
        status, reply, _ = await here.post(path, body)
        assert status == 400 and reply["error"]["message"].startswith(f"{param}: "), reply
