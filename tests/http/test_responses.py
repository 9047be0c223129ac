"""/v1/responses: replies and streams, items, tools, errors and refusals."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
from openai.types.responses import ResponseOutputText, ResponseTextDeltaEvent, ResponseTextDoneEvent

from luce.errors import BackendError
from tests.support.http_server import Running, running
from tests.support.responses_stream import joined, streamed
from tests.support.scripted_agent import agent_chat, call, playing
from tests.support.scripted_model import REPLY, saying

Json = dict[str, Any]

PATH = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
#: OpenAI's own types of events of a text
TYPES: dict[str, Any] = {
    "response.output_text.delta": ResponseTextDeltaEvent,
    "response.output_text.done": ResponseTextDoneEvent,
}
#: fields that differ between two replies of the same text
VARYING = ("id", "call_id", "created_at", "usage", "seed", "cache", "forced")
ASK: Json = {"model": "m", "input": "hi", "temperature": 0}
REASONED = {"script": saying("Hm, well.</think>\n\nYes.", marker="<|im_start|>assistant\n<think>\n")}
FUNCTION = {"type": "function", "name": "get", "parameters": {"type": "object"}, "strict": False}
CUSTOM = {"type": "custom", "name": "patch", "description": "Patches."}
NAMESPACE = {"type": "namespace", "name": "mcp__files", "tools": [{**FUNCTION, "name": "read"}, CUSTOM]}


def bad_custom(syntax: str, definition: str) -> Json:
    return {**CUSTOM, "format": {"type": "grammar", "syntax": syntax, "definition": definition}}


def agent(*replies: str) -> Json:
    return {"context": 8192, "chat": agent_chat, "script": playing(*replies)}


async def create(here: Running, **fields: Any) -> Json:
    """A whole response, which its stream equals but for ids and times."""
    status, reply, _ = await here.post(PATH, {**ASK, **fields})
    assert status == 200, reply
    stream = joined(await streamed(here, {**ASK, **fields}))
    assert plain(stream) == plain(reply)
    return reply


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if k not in VARYING}
    return [plain(item) for item in value] if isinstance(value, list) else value


async def test_an_answer() -> None:
    async with running() as here:
        reply = await create(here, instructions="Be brief.", metadata={"a": "b"}, store=True)
        (item,) = reply["output"]
        assert item["type"] == "message" and item["role"] == "assistant" and item["status"] == "completed"
        assert item["content"] == [{"type": "output_text", "annotations": [], "logprobs": [], "text": REPLY}]
        assert reply["status"] == "completed" and reply["error"] is None and reply["store"] is False
        assert reply["finish_details"]["cause"] == "eos" and "finish_details" not in (await streamed(here, ASK))[0]
        assert reply["instructions"] == "Be brief." and reply["metadata"] == {"a": "b"}
        usage = reply["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        _, again, _ = await here.post("/responses", {**ASK, "instructions": "Be brief."})
        assert again["usage"]["input_tokens_details"]["cached_tokens"] > 0


async def test_a_limit_makes_the_response_incomplete() -> None:
    async with running() as here:
        reply = await create(here, max_output_tokens=4)
        assert reply["status"] == "incomplete" and reply["incomplete_details"] == {"reason": "max_output_tokens"}
        assert reply["output"][0]["status"] == "incomplete"


async def test_reasoning_is_content_or_summary_and_comes_back_encrypted() -> None:
    async with running(model=REASONED) as here:
        reply = await create(here, reasoning={"effort": "low"})
        assert reply["output"][0]["content"][0] == {"type": "reasoning_text", "text": "Hm, well."}
        assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        reply = await create(
            here, reasoning={"effort": "low", "summary": "auto"}, include=["reasoning.encrypted_content"]
        )
        reasoning, message = reply["output"]
        assert reasoning["summary"] == [{"type": "summary_text", "text": "Hm, well."}] and "content" not in reasoning
        assert reasoning["encrypted_content"] and message["content"][0]["text"].strip() == "Yes."


async def test_calls_of_functions_namespaces_and_custom_tools() -> None:
    calls = call("get", {"a": 1}) + call("mcp__files__read", {}) + call("patch", {"input": 'x "é😀"\n'})
    tools = [FUNCTION, CUSTOM, NAMESPACE, {"type": "web_search"}, {"type": "image_generation", "name": "x"}]
    async with running(model=agent(calls)) as here:
        reply = await create(here, tools=tools)
        first, second, third = reply["output"]
        assert reply["status"] == "completed" and reply["tools"] == tools
        assert (first["name"], json.loads(first["arguments"]), "namespace" in first) == ("get", {"a": 1}, False)
        assert (second["namespace"], second["name"]) == ("mcp__files", "read")
        assert second["type"] == "function_call" and second["call_id"].startswith("call_")
        assert (third["type"], third["name"], third["input"]) == ("custom_tool_call", "patch", 'x "é😀"\n')
        assert await here.metric("luce_skipped_tools_total") == 4


LINES = 'start: "begin\\n" line+ "end"\nline: /[+-][0-9]/ "\\n"'


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "custom", "name": "patch"}])
@pytest.mark.parametrize(("tool_format", "syntax"), [("qwen_xml", "lark"), ("qwen_xml", "regex"), ("hermes", "regex")])
async def test_the_input_of_a_custom_tool_follows_its_grammar(tool_format: str, syntax: str, choice: Any) -> None:
    definition = LINES if syntax == "lark" else "begin\\n([+-][0-9]\\n)+end"
    tool = {**CUSTOM, "format": {"type": "grammar", "syntax": syntax, "definition": definition}}
    # The model begins a call, and would rather write something else into it.
    opens = (
        "<tool_call>\n<function=patch>\n<parameter=input>\n" if tool_format == "qwen_xml" else '<tool_call>\n{"name"'
    )
    chat = functools.partial(agent_chat, tool_format=tool_format)
    model = {"context": 8192, "chat": chat, "script": saying(opens + "begin\nno patch at all")}
    async with running(model=model) as here:
        reply = await create(here, tools=[tool], tool_choice=choice, parallel_tool_calls=False)
        assert reply["status"] == "completed"
        for item in reply["output"]:
            assert item["type"] == "custom_tool_call" and item["status"] == "completed"
            assert re.fullmatch("begin\\n([+-][0-9]\\n)+end", item["input"]), item
        assert reply["output"] and await here.metric("luce_grammar_relaxed_total") == 0


async def test_a_grammar_that_the_format_of_calls_cannot_enforce_is_counted() -> None:
    tool = {**CUSTOM, "format": {"type": "grammar", "syntax": "lark", "definition": LINES}}
    async with running(model=agent(call("patch", {"input": "no patch"}))) as here:
        reply = await create(here, tools=[tool])
        assert reply["output"][0]["input"] == "no patch"
        assert await here.metric("luce_grammar_relaxed_total") == 2
    async with running(model=agent(), strict_schemas=True) as here:
        status, reply, _ = await here.post(PATH, {**ASK, "tools": [tool]})
        assert (status, reply["error"]["param"]) == (400, "tools[0].format.definition")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": None}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [{"role": "x", "content": "a"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0]", "invalid_value"),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}]},
            "input",
            "invalid_value",
        ),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id", "invalid_value"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]", "unsupported_parameter"),
        ({"input": [{"type": "compaction", "encrypted_content": "a"}]}, "input[0]", "unsupported_parameter"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
            "unsupported_content",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"conversation": "c"}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs", "invalid_value"),
        ({"include": ["x"]}, "include[0]", "unsupported_parameter"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"return_token_ids": True}, "return_token_ids", "unsupported_parameter"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "invalid_value"),
        (
            {"text": {"format": {"type": "json_object"}}, "response_format": {"type": "json_object"}},
            "text.format",
            "invalid_value",
        ),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name", "invalid_value"),
        ({"tools": [{**FUNCTION, "parameters": 3}]}, "tools[0].parameters", "invalid_value"),
        ({"tools": [{**CUSTOM, "format": {"type": "grammar"}}]}, "tools[0].format", "invalid_value"),
        ({"tools": [FUNCTION, bad_custom("lark", "start: nothing")]}, "tools[1].format.definition", "invalid_value"),
        ({"tools": [bad_custom("regex", "(")]}, "tools[0].format.definition", "invalid_value"),
        (
            {"tools": [{**NAMESPACE, "tools": [FUNCTION, bad_custom("lark", "x")]}]},
            "tools[0].tools[1].format.definition",
            "invalid_value",
        ),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name", "invalid_value"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "unsupported_parameter"),
        (
            {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]}},
            "tool_choice.tools[0].name",
            "invalid_value",
        ),
    ],
)
async def test_refusals(fields: Json, param: str, code: str) -> None:
    async with running(model={"context": 2048}) as here:
        for stream in (False, True):
            status, reply, _ = await here.post(PATH, {**ASK, **fields, "stream": stream})
            assert status == 400, reply
            assert (reply["error"]["param"], reply["error"]["code"]) == (param, code), reply


async def test_a_prompt_that_is_too_long() -> None:
    async with running(model={"context": 64}) as here:
        status, reply, _ = await here.post(PATH, {**ASK, "input": "x" * 99, "stream": True})
        assert status == 400 and reply["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("method", ["get", "delete"])
async def test_no_response_is_stored(method: str) -> None:
    async with running() as here, getattr(here.client, method)(here.url + PATH + "/resp_1") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "response_not_found"


async def test_json_by_a_schema_is_valid() -> None:
    form = {
        "type": "json_schema",
        "name": "pair",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"a": {"enum": ["x"]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    }
    async with running(model={"context": 2048}) as here:
        status, reply, _ = await here.post(PATH, {**ASK, "text": {"format": form}})
        assert status == 200, reply
        assert json.loads(reply["output"][-1]["content"][0]["text"]) == {"a": "x"}
        assert reply["text"]["format"] == form


async def test_a_stream_that_reads_a_long_prompt_is_not_silent() -> None:
    slow = {"context": 8192, "delay": 0.05, "script": saying("Late.")}
    async with running(sse_ping=0.1, chunk=32, model=slow) as here:
        events = await streamed(here, {**ASK, "input": "x" * 640})
        # The progress of the prompt is an event of the engine in every step, and nothing of it is sent.
        assert [event["type"] for event in events].count("response.in_progress") > 2
        assert joined(events)["output"][0]["content"][0]["text"] == "Late."


async def scores(here: Running, fields: Json, chat: Json) -> tuple[Json, list[Json]]:
    """A response with log probabilities, and those of the tokens of the same reply to a chat."""
    status, reply, _ = await here.post("/v1/chat/completions", {**chat, "temperature": 0, "logprobs": True})
    assert status == 200, reply
    return await create(here, include=[LOGPROBS], **fields), reply["choices"][0]["logprobs"]["content"]


async def test_log_probabilities_of_a_text() -> None:
    ask = {"messages": [{"role": "user", "content": "hi"}], "top_logprobs": 2}
    async with running() as here:
        reply, expected = await scores(here, {"top_logprobs": 2}, ask)
        assert reply["top_logprobs"] == 2
        (part,) = reply["output"][0]["content"]
        # The end of the reply is no part of its text.
        assert part["logprobs"] == expected[:-1] and len(expected[0]["top_logprobs"]) == 2
        assert bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]).decode() == part["text"] == REPLY
        # Events have no bytes, as at OpenAI, and those of the deltas are those of the whole.
        events = await streamed(here, {**ASK, "include": [LOGPROBS], "top_logprobs": 2})
        deltas = [entry for e in events if e["type"] == "response.output_text.delta" for entry in e["logprobs"]]
        (done,) = [event["logprobs"] for event in events if event["type"] == "response.output_text.done"]
        assert deltas == done and len(done) == len(part["logprobs"])
        for entry, event in zip(part["logprobs"], done, strict=True):
            without = [{k: v for k, v in one.items() if k != "bytes"} for one in (entry, *entry["top_logprobs"])]
            assert event == {**without[0], "top_logprobs": without[1:]}
        ResponseOutputText.model_validate(part, strict=True)
        for event in events:
            if event["type"] in TYPES:
                TYPES[event["type"]].model_validate(event, strict=True)
        plain = await create(here, include=[LOGPROBS])
        assert plain["top_logprobs"] == 0
        assert all(entry["top_logprobs"] == [] for entry in plain["output"][0]["content"][0]["logprobs"])
        assert (await create(here, top_logprobs=0))["output"][0]["content"][0]["logprobs"] == []


async def test_log_probabilities_leave_reasoning_and_calls_out() -> None:
    ask = {"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "low"}
    async with running(model=REASONED) as here:
        reply, expected = await scores(here, {"reasoning": {"effort": "low"}}, ask)
        (part,) = reply["output"][-1]["content"]
        assert part["text"] == "Yes." and part["logprobs"] == expected[-5:-1]
        assert "logprobs" not in reply["output"][0]["content"][0]
    said = 'Look: <tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'
    async with running(model=agent(said)) as here:
        reply = await create(here, include=[LOGPROBS], tools=[FUNCTION])
        assert [item["type"] for item in reply["output"]] == ["message", "function_call"]
        (part,) = reply["output"][0]["content"]
        assert part["text"].startswith("Look:")
        assert "".join(entry["token"] for entry in part["logprobs"]).startswith(part["text"])
        assert len(part["logprobs"]) == len(part["text"])


async def test_a_call_that_is_cut_is_incomplete_and_not_done() -> None:
    arguments = '<tool_call>\n{"name": "get", "arguments": {"a": "' + "b" * 500
    async with running(model={"context": 2048, "chat": agent_chat, "script": playing(arguments)}) as here:
        reply = await create(here, tools=[FUNCTION], max_output_tokens=100)
        assert reply["status"] == "incomplete"
        assert all(item["status"] == "incomplete" for item in reply["output"])
        assert reply["finish_details"]["cause"] == "length" and reply["finish_details"]["cut_call"] is True


async def test_an_engine_that_fails_ends_the_stream_with_a_failed_response() -> None:
    def broken(step: Any) -> None:
        raise BackendError("a device failed")

    async with running(model={"hook": broken}) as here:
        response = joined(await streamed(here, ASK))
        assert response["status"] == "failed" and response["output"] == []
        assert response["error"] == {"code": "engine_error", "message": "a device failed"}
