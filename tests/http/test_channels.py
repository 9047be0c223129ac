"""Replies of several channels, as gpt-oss writes them, on the three APIs. Expectations are written by hand from
openai/harmony's docs/format.md."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.harmony import chat, saying, tokenizer
from tests.support.http_server import Running, running

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "What is 2 + 2?"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "time")]
NAMED = {"type": "function", "function": {"name": "time"}}
ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
OSLO = {"city": "Oslo", "days": 2}
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + json.dumps(OSLO) + "<|call|>"
ANSWER = f"{ANALYSIS}Simple arithmetic.{NEXT}{FINAL}2 + 2 = 4.<|return|>"


def speaking(*replies: str, **model: Any) -> dict[str, Any]:
    """Arguments of a model that gives the first reply to the user, and the second one to the result of a tool."""
    turns = zip((USER["content"], '"Rain."'), replies, strict=False)
    return {"chat": chat, "vocabulary": tokenizer(), "context": 4096, "script": saying(*turns), **model}


async def posted(here: Running, **fields: Any) -> Any:
    status, reply, _ = await here.post(CHAT, {"messages": [USER], "temperature": 0, **fields})
    assert status == 200, reply
    return reply


async def chosen(here: Running, **fields: Any) -> Any:
    return (await posted(here, **fields))["choices"][0]


async def deltas(here: Running, **fields: Any) -> list[Any]:
    chunks = await here.events(CHAT, {"messages": [USER], "temperature": 0, **fields})
    return [chunk["choices"][0]["delta"] for chunk in chunks]


def called(choice: Any) -> list[tuple[str, Any]]:
    entries = choice["message"].get("tool_calls") or []
    return [(entry["function"]["name"], json.loads(entry["function"]["arguments"])) for entry in entries]


async def test_the_analysis_is_reasoning_and_the_final_message_content() -> None:
    async with running(model=speaking(ANSWER)) as here:
        for tools in (None, TOOLS):
            reply = await posted(here, tools=tools)
            message = reply["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("Simple arithmetic.", "2 + 2 = 4.")
            assert not message.get("tool_calls") and reply["choices"][0]["finish_reason"] == "stop"
            # A token for each byte.
            assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("Simple arithmetic.")
            found = await deltas(here, tools=tools)
            assert "".join(delta.get("reasoning_content") or "" for delta in found) == "Simple arithmetic."
            assert "".join(delta.get("content") or "" for delta in found) == "2 + 2 = 4."


async def test_a_stop_string_is_not_looked_for_in_headers() -> None:
    async with running(model=speaking(ANSWER)) as here:
        found = await chosen(here, stop=["assistant", "final", "analysis", "constrain"])
        assert found["message"]["content"] == "2 + 2 = 4."
        found = await chosen(here, stop=["= 4"])
        assert found["message"]["content"] == "2 + 2 " and found["finish_details"]["stop"] == "= 4"


@pytest.mark.parametrize(
    "call", [CALL, " to=functions.weather<|channel|>commentary json<|message|>" + json.dumps(OSLO) + "<|call|>"]
)
@pytest.mark.parametrize("mode", ["auto", "off"])
async def test_a_call_with_its_reasoning_and_what_the_model_says_before_it(call: str, mode: str) -> None:
    said = f"{ANALYSIS}Ask.{NEXT}<|channel|>commentary<|message|>I look it up.{NEXT}{call}"
    async with running(model=speaking(said), tool_grammar=mode) as here:
        found = await chosen(here, tools=TOOLS)
        assert called(found) == [("weather", OSLO)] and found["finish_reason"] == "tool_calls"
        assert (found["message"]["reasoning_content"], found["message"]["content"]) == ("Ask.", "I look it up.")
        assert ("grammar" in found["finish_details"]) is (mode == "auto")
        parts = [delta["tool_calls"][0] for delta in await deltas(here, tools=TOOLS) if delta.get("tool_calls")]
        assert parts[0]["function"]["name"] == "weather" and len(parts) > 2
        assert json.loads("".join(part["function"]["arguments"] for part in parts)) == OSLO


async def test_the_next_turn_reads_new_tokens_only() -> None:
    first = f"{ANALYSIS}Ask.{NEXT}{CALL}"
    async with running(model=speaking(first, f"{ANALYSIS}So.{NEXT}{FINAL}Rain.<|return|>")) as here:
        one = await posted(here, tools=TOOLS)
        message = one["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Rain."}
        two = await posted(here, tools=TOOLS, messages=[USER, message, result])
        assert two["choices"][0]["message"]["content"] == "Rain."
        known = one["usage"]["prompt_tokens"] + one["usage"]["completion_tokens"]
        # The token that ends the reply was never computed, nor the one before it.
        assert two["usage"]["prompt_tokens_details"]["cached_tokens"] >= known - 2


@pytest.mark.parametrize(("choice", "names"), [("required", {"weather", "time"}), (NAMED, {"time"})])
async def test_a_call_that_must_come_comes_behind_the_reasoning(choice: Any, names: set[str]) -> None:
    async with running(model=speaking(ANSWER)) as here:
        found = await chosen(here, tools=TOOLS, tool_choice=choice, max_tokens=3000)
        ((name, arguments),) = called(found)
        assert name in names and arguments.keys() == {"city", "days"} and arguments["days"] in (1, 2)
        assert found["message"]["reasoning_content"] == "Simple arithmetic." and not found["message"]["content"]


async def test_a_format_holds_the_final_message() -> None:
    body = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [4, 5]}}}
    async with running(model=speaking(ANSWER)) as here:
        found = await chosen(here, response_format=body)
        assert found["message"]["reasoning_content"] == "Simple arithmetic."
        assert json.loads(found["message"]["content"]) in (4, 5)


async def test_a_budget_leads_to_the_final_message() -> None:
    said = f"{ANALYSIS}{'Hm. ' * 50}{NEXT}{FINAL}4.<|return|>"
    async with running(model=speaking(said)) as here:
        found = await chosen(here, thinking={"type": "enabled", "budget_tokens": 7}, max_tokens=200)
        assert found["message"]["reasoning_content"] == "Hm. Hm."
        assert found["finish_details"]["close_kind"] == "hard" and "<|" not in found["message"]["content"]
        found = await chosen(here, reasoning_effort="none", max_tokens=60)
        assert not found["message"].get("reasoning_content") and "<|" not in found["message"]["content"]


@pytest.mark.parametrize(
    "said",
    [
        '<|channel|>commentary to=functions.nothing <|constrain|>json<|message|>{"a": 1}',
        "<|channel|>analysis to=python code<|message|>print(1)",
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>[1]",
    ],
)
async def test_what_is_no_call_of_a_tool_comes_as_text(said: str) -> None:
    async with running(model=speaking(f"{said}<|call|>"), tool_grammar="off") as here:
        for fields in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {}):
            found = await chosen(here, **fields)
            text = found["message"]["content"] or ""
            # A call that began is closed; what is left of it is text.
            assert called(found) == ([("weather", {})] if "[1]" in said and fields == {"tools": TOOLS} else [])
            assert text == (said if not called(found) else "[1]")


async def test_the_other_apis_have_the_same_parts() -> None:
    said = f"{ANALYSIS}Ask.{NEXT}<|channel|>commentary<|message|>I look it up.{NEXT}{CALL}"
    async with running(model=speaking(said)) as here:
        functions = [tool["function"] for tool in TOOLS]
        tools = [{"name": f["name"], "input_schema": f["parameters"]} for f in functions]
        body = {"model": "m", "max_tokens": 2000, "messages": [USER], "tools": tools, "temperature": 0}
        thinking = {"type": "enabled", "budget_tokens": 1024}
        status, reply, _ = await here.post("/v1/messages", {**body, "thinking": thinking})
        assert status == 200, reply
        assert [block["type"] for block in reply["content"]] == ["thinking", "text", "tool_use"]
        assert reply["content"][0]["thinking"] == "Ask." and reply["content"][1]["text"] == "I look it up."
        assert (reply["content"][2]["name"], reply["content"][2]["input"]) == ("weather", OSLO)
        body = {"input": USER["content"], "tools": [{"type": "function", **f} for f in functions], "temperature": 0}
        status, reply, _ = await here.post("/v1/responses", body)
        assert status == 200, reply
        assert [item["type"] for item in reply["output"]] == ["reasoning", "message", "function_call"]
        assert json.loads(reply["output"][2]["arguments"]) == OSLO


async def test_completions_of_plain_prompts_have_no_channels() -> None:
    async with running(model=speaking(ANSWER)) as here:
        status, reply, _ = await here.post("/v1/completions", {"prompt": "Once", "max_tokens": 20, "temperature": 0})
        assert status == 200 and not any("\ud800" <= char <= "\udfff" for char in reply["choices"][0]["text"])
