"""Calls of tools in chat replies, whole and streamed, as the openai client and plain HTTP see them."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import threading
from typing import Any

import openai
import pytest

from luce.models.spec import Dialect
from luce.text.chat import ChatFormat
from luce.text.template import ChatTemplate
from tests.support.http_server import Running, running
from tests.support.scripted_agent import TEMPLATE, agent_chat, call
from tests.support.scripted_model import OffLoopChat, saying, tokenizer

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "What time is it?"}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("time", "weather")
]
OSLO = {"city": "Oslo", "days": 2, "text": 'a "b"\n</tool_call>'}
NAMED = {"type": "function", "function": {"name": "time"}}


def speaking(text: str, **model: Any) -> dict[str, Any]:
    """Arguments of a model that says a text, and then ends."""
    return {"chat": agent_chat, "context": 2048, "script": saying(text), **model}


def ask(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], "tools": TOOLS, "temperature": 0, **fields}


async def whole(here: Running, **fields: Any) -> Any:
    """The choice of a whole reply."""
    status, body, _ = await here.post(CHAT, ask(**fields))
    assert status == 200, body
    return body["choices"][0]


async def streamed(here: Running, **fields: Any) -> tuple[Any, list[Any]]:
    """The choice that the chunks of a stream add up to, and the deltas."""
    chunks = await here.events(CHAT, ask(**fields))
    message: dict[str, Any] = {"content": None}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls: list[Any] = []
    for delta in deltas:
        if delta.get("content"):
            message["content"] = (message["content"] or "") + delta["content"]
        for entry in delta.get("tool_calls", ()):
            if "id" in entry:
                assert entry["index"] == len(calls) and entry["type"] == "function"
                calls.append(copy.deepcopy({key: entry[key] for key in ("id", "type", "function")}))
            else:
                calls[entry["index"]]["function"]["arguments"] += entry["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
    return {**chunks[-1]["choices"][0], "message": message}, deltas


def functions(choice: Any) -> list[tuple[str, Any]]:
    """Names and arguments of a choice's calls, whose ids are distinct."""
    calls = choice["message"].get("tool_calls", [])
    assert len({entry["id"] for entry in calls}) == len(calls)
    assert all(entry["id"].startswith("call_") and entry["type"] == "function" for entry in calls)
    return [(entry["function"]["name"], json.loads(entry["function"]["arguments"])) for entry in calls]


@pytest.mark.parametrize("content", ["", "Let me look."])
async def test_calls_whole_and_streamed(content: str) -> None:
    said = (content + "\n" if content else "") + call("time", {}) + "\n" + call("weather", OSLO)
    async with running(model=speaking(said)) as here:
        choices = [await whole(here), (await streamed(here))[0]]
        for choice in choices:
            assert choice["message"]["content"] == (content or None)
            assert functions(choice) == [("time", {}), ("weather", OSLO)]
            assert choice["finish_reason"] == "tool_calls" and choice["finish_details"]["cause"] == "eos"
            assert choice["finish_details"]["bad_calls"] == 0 and choice["finish_details"]["cut_call"] is False
        assert await here.metric("luce_bad_tool_calls_total") == 0


async def test_the_name_comes_first_then_arguments_and_no_delta_is_empty() -> None:
    async with running(model=speaking(call("weather", OSLO))) as here:
        _, deltas = await streamed(here)
        assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
        first, *rest = deltas[1:-1]
        assert first["tool_calls"][0]["function"] == {"name": "weather", "arguments": ""}
        assert len(rest) > 5 and all(delta["tool_calls"][0]["function"]["arguments"] for delta in rest)
        assert all(set(delta) == {"tool_calls"} for delta in (first, *rest))


async def test_the_first_delta_of_a_call_leaves_in_the_step_that_chose_its_token() -> None:
    """The step behind that of the name's last character waits until the client has seen the name."""
    said = call("weather", OSLO)
    behind = said.index('weather"') + len('weather"')
    seen, steps = threading.Event(), 0

    def hook(*args: Any) -> None:
        nonlocal steps
        steps += 1
        # The prompt is the first step, and gives the first character.
        if steps == behind + 1:
            assert seen.wait(20)

    async with (
        running(model=speaking(said, hook=hook)) as here,
        openai.AsyncOpenAI(api_key="k", base_url=here.url + "/v1") as client,
    ):
        stream = await client.chat.completions.create(
            model="m", messages=[USER], tools=TOOLS, stream=True, temperature=0
        )  # type: ignore[call-overload]
        async for chunk in stream:
            if chunk.choices[0].delta.tool_calls:
                if not seen.is_set():
                    assert chunk.choices[0].delta.tool_calls[0].function.name == "weather" and steps <= behind + 1
                seen.set()
        assert seen.is_set()


async def test_the_openai_client_adds_a_stream_up() -> None:
    said = "Hm.\n" + call("weather", OSLO) + "\n" + call("time", {})
    async with (
        running(model=speaking(said)) as here,
        openai.AsyncOpenAI(api_key="k", base_url=here.url + "/v1") as client,
    ):
        async with client.chat.completions.stream(model="m", messages=[USER], tools=TOOLS, temperature=0) as stream:  # type: ignore[list-item]
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        plain = await client.chat.completions.create(model="m", messages=[USER], tools=TOOLS, temperature=0)  # type: ignore[call-overload]
        for reply in (final, plain):
            message = reply.choices[0].message
            assert message.content == "Hm." and reply.choices[0].finish_reason == "tool_calls"
            assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == [
                ("weather", OSLO),
                ("time", {}),
            ]


async def test_none_hides_the_tools_and_calls_stay_text() -> None:
    async with running(model=speaking(call("time", {}))) as here:
        for choice in (await whole(here, tool_choice="none"), (await streamed(here, tool_choice="none"))[0]):
            assert choice["message"]["content"] == call("time", {}) and choice["finish_reason"] == "stop"
            assert "tool_calls" not in choice["message"]
        _, with_tools, _ = await here.post("/tokenize", {"messages": [USER], "tools": TOOLS})
        _, without, _ = await here.post("/tokenize", {"messages": [USER], "tools": TOOLS, "tool_choice": "none"})
        assert with_tools["count"] > without["count"]


async def test_allowed_tools_may_be_called_and_others_stay_text() -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    async with running(model=speaking(call("time", {}) + "\n" + call("weather", {}))) as here:
        choice = await whole(here, tool_choice=allowed)
        assert functions(choice) == [("time", {})] and '"weather"' in choice["message"]["content"]
        assert choice["finish_details"]["bad_calls"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_without_parallel_calls_the_reply_ends_behind_the_first(stream: bool) -> None:
    said = call("time", {}) + "\n" + call("weather", OSLO)
    async with running(model=speaking(said)) as here:
        choice = (
            (await streamed(here, parallel_tool_calls=False))[0]
            if stream
            else await whole(here, parallel_tool_calls=False)
        )
        assert functions(choice) == [("time", {})] and choice["message"]["content"] is None
        assert choice["finish_reason"] == "tool_calls" and choice["finish_details"]["stop"] is None
        assert choice["finish_details"]["content_tokens"] == len(call("time", {}))
        both = await whole(here, parallel_tool_calls=True)
        assert len(functions(both)) == 2


async def test_older_functions_are_tools() -> None:
    async with running(model=speaking(call("time", {}))) as here:
        fields = {"tools": None, "functions": [TOOLS[0]["function"]], "function_call": "auto"}
        assert functions(await whole(here, **fields)) == [("time", {})]


@pytest.mark.parametrize("said", [call("no_such_tool", {"a": 1}), "<tool_call>\n{broken\n</tool_call>"])
async def test_malformed_calls_come_as_text_and_are_counted(said: str) -> None:
    async with running(model=speaking(said)) as here:
        for choice in (await whole(here), (await streamed(here))[0]):
            assert choice["message"]["content"] == said and "tool_calls" not in choice["message"]
            assert choice["finish_reason"] == "stop" and choice["finish_details"]["bad_calls"] == 1
        assert await here.metric("luce_bad_tool_calls_total") == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_ends_at_its_limit_inside_a_call(stream: bool) -> None:
    said = call("weather", OSLO)
    most = said.index("Oslo") + 2
    async with running(model=speaking(said)) as here:
        fields = {"max_tokens": most}
        choice = (await streamed(here, **fields))[0] if stream else await whole(here, **fields)
        assert functions(choice) == [("weather", {"city": "Os"})]
        assert choice["finish_reason"] == "length" and choice["finish_details"]["cut_call"] is True
        # Before its name is whole, a call is text.
        choice = await whole(here, max_tokens=said.index("weather") + 3)
        assert choice["message"]["content"] == said[: said.index("weather") + 3] and choice["finish_reason"] == "length"


async def test_tokens_of_calls_are_in_usage_and_logprobs() -> None:
    said = call("time", {})
    async with running(model=speaking(said)) as here:
        status, body, _ = await here.post(CHAT, ask(logprobs=True, top_logprobs=1))
        assert status == 200
        tokens = [entry["token"] for entry in body["choices"][0]["logprobs"]["content"]]
        assert "".join(tokens) == said + "<|im_end|>" and body["usage"]["completion_tokens"] == len(said) + 1
        chunks = await here.events(CHAT, ask(logprobs=True))
        tokens = [
            entry["token"]
            for chunk in chunks
            for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert "".join(tokens) == said + "<|im_end|>"


async def test_several_replies_have_calls_of_their_own() -> None:
    async with running(model=speaking(call("time", {}))) as here:
        status, body, _ = await here.post(CHAT, ask(n=2))
        assert status == 200
        ids = {choice["message"]["tool_calls"][0]["id"] for choice in body["choices"]}
        assert len(ids) == 2 and all(functions(choice) == [("time", {})] for choice in body["choices"])


async def test_a_stop_string_inside_a_call_cuts_it() -> None:
    async with running(model=speaking(call("weather", OSLO))) as here:
        choice = await whole(here, stop=["slo"])
        assert functions(choice) == [("weather", {"city": "O"})] and choice["finish_details"]["cut_call"] is True


@functools.cache
def _qwen_chat() -> ChatFormat:
    return OffLoopChat(ChatTemplate(TEMPLATE, bos="", eos="<|im_end|>"), tokenizer(), Dialect(), "qwen_xml")


async def test_another_format_by_name() -> None:
    said = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
    async with running(model=speaking(said, chat=_qwen_chat)) as here:
        for choice in (await whole(here), (await streamed(here))[0]):
            assert functions(choice) == [("weather", {"city": "Oslo"})] and choice["finish_reason"] == "tool_calls"
        _, props, _ = await here.get("/props")
        assert props["tool_calls"] == {"format": "qwen_xml", "from": "--tool-format"}


async def test_many_streams_at_once() -> None:
    async with running(model=speaking(call("weather", OSLO)), parallel=4) as here:
        for choice, _ in await asyncio.gather(*(streamed(here) for _ in range(4))):
            assert functions(choice) == [("weather", OSLO)]


# --- calls that a request demands: the scripted model would say something else

CITY = {
    "type": "object",
    "properties": {"days": {"type": "integer"}},
    "required": ["days"],
    "additionalProperties": False,
}
STRICT: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": CITY, "strict": True}} for name in ("time", "weather")
]
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED, ALLOWED])
async def test_a_demanded_call_is_made_and_valid(choice: Any, stream: bool) -> None:
    """The model wants to speak; the grammar lets it write calls only."""
    async with running(model=speaking("I would rather talk.")) as here:
        fields = {"tools": STRICT, "tool_choice": choice, "max_tokens": 400, "parallel_tool_calls": False}
        found = (await streamed(here, **fields))[0] if stream else await whole(here, **fields)
        ((name, arguments),) = functions(found)
        assert name == "time" or choice == "required"
        assert set(arguments) == {"days"} and type(arguments["days"]) is int
        assert found["finish_reason"] == "tool_calls" and found["message"]["content"] is None
        assert found["finish_details"]["grammar"]["kind"] == "tools"


async def test_a_named_tool_is_called_once_unless_the_request_says_otherwise() -> None:
    said = call("time", {"days": 1}) + "\n" + call("time", {"days": 2})
    async with running(model=speaking(said)) as here:
        assert functions(await whole(here, tools=STRICT, tool_choice=NAMED)) == [("time", {"days": 1})]
        both = await whole(here, tools=STRICT, tool_choice=NAMED, parallel_tool_calls=True)
        assert functions(both) == [("time", {"days": 1}), ("time", {"days": 2})]


async def test_a_demanded_call_of_messages() -> None:
    tool = {"name": "time", "input_schema": CITY}
    body = {"model": "m", "max_tokens": 400, "messages": [USER], "tools": [tool], "temperature": 0}
    async with running(model=speaking("No.")) as here:
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "time"}):
            status, reply, _ = await here.post("/v1/messages", {**body, "tool_choice": choice})
            assert status == 200, reply
            (block,) = reply["content"]
            assert block["type"] == "tool_use" and block["name"] == "time" and reply["stop_reason"] == "tool_use"
            assert type(block["input"]["days"]) is int


# --- a template that shows no tools


@functools.cache
def _plain_chat() -> ChatFormat:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return OffLoopChat(ChatTemplate(template, bos="", eos="<|im_end|>"), tokenizer(), Dialect())


async def test_tools_calls_and_results_reach_a_model_whose_template_has_no_place_for_them() -> None:
    history = [
        USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": i, "type": "function", "function": {"name": n, "arguments": "{}"}}
                for i, n in (("a", "time"), ("b", "weather"))
            ],
        },
        {"role": "tool", "tool_call_id": "b", "content": "rain"},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "noon"}]},
    ]
    async with running(model=speaking(call("time", {}), chat=_plain_chat)) as here:
        _, found, _ = await here.post("/apply-template", {"messages": history, "tools": TOOLS})
        text = found["prompt"]
        assert text.startswith("<|im_start|>system\n# Tools") and json.dumps(TOOLS[0]) in text
        assert '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' in text
        assert f"<|im_start|>assistant\n{call('time', {})}\n{call('weather', {})}<|im_end|>" in text
        results = "<tool_response>\nnoon\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
        assert f"<|im_start|>user\n{results}<|im_end|>" in text
        assert functions(await whole(here, messages=history)) == [("time", {})]


async def test_the_next_turn_reads_a_call_from_the_cache_however_it_is_written() -> None:
    said = '<tool_call>{"arguments":{ "days":2.0,"city" : "\\u004fslo"},  "name":"weather"}</tool_call>'
    async with running(model=speaking(said)) as here:
        _, first, _ = await here.post(CHAT, ask())
        (past,) = first["choices"][0]["message"]["tool_calls"]
        assert json.loads(past["function"]["arguments"]) == {"city": "Oslo", "days": 2}
        past["function"]["arguments"] = json.dumps({"city": "Oslo", "days": 2})
        result = {"role": "tool", "tool_call_id": past["id"], "content": "rain"}
        _, second, _ = await here.post(
            CHAT, ask(messages=[USER, {"role": "assistant", "tool_calls": [past]}, result], max_tokens=1)
        )
        # All but the token that ends the message, which no step has computed.
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["total_tokens"] - 1

    async with running(model=speaking(said)) as here:
        tools = [{"name": "weather", "input_schema": {"type": "object", "properties": {}}}]
        body: dict[str, Any] = {"max_tokens": 200, "temperature": 0, "tools": tools, "messages": [USER]}
        status, first, _ = await here.post("/v1/messages", body)
        assert status == 200, first
        (use,) = first["content"]
        use["input"] = {"city": "Oslo", "days": 2}
        results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "rain"}]
        body["messages"] = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": results}]
        status, second, _ = await here.post("/v1/messages", body)
        assert status == 200, second
        usage = first["usage"]
        length = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) + usage["output_tokens"]
        assert second["usage"]["cache_read_input_tokens"] >= length - 1


async def test_a_client_s_text_that_is_a_past_call_stays_as_the_client_wrote_it() -> None:
    said = '<tool_call>{"arguments":{},"name":"time"}</tool_call>'
    asked = {"role": "user", "content": "What is " + call("time", {}) + "?"}
    chat = agent_chat()
    prompt = await asyncio.to_thread(chat.prompt, [asked], tools=TOOLS)
    async with running(model=speaking(said)) as here:
        _, first, _ = await here.post(CHAT, ask(messages=[asked]))
        past = first["choices"][0]["message"]["tool_calls"]
        messages = [asked, {"role": "assistant", "tool_calls": past}]
        later = await asyncio.to_thread(chat.prompt, messages, tools=TOOLS)
        assert later[: len(prompt) + len(said)] == [*prompt, *said.encode()]


@pytest.mark.parametrize("mode", ["hide", "keep"])
async def test_tools_that_may_not_be_called_are_hidden_or_kept(mode: str) -> None:
    async with running(model=speaking(call("time", {})), tools_none=mode) as here:
        found = {}
        for choice in ("auto", "none"):
            body = {"messages": [USER], "tools": TOOLS, "tool_choice": choice}
            found[choice] = (await here.post("/tokenize", body))[1]["tokens"]
        assert (found["none"] == found["auto"]) == (mode == "keep")
        reply = await whole(here, tool_choice="none")
        assert "tool_calls" not in reply["message"] and reply["message"]["content"] == call("time", {})
