"""/v1/messages and /v1/messages/count_tokens over the scripted model."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from luce.errors import BackendError
from luce.server.thinking_signature import carried
from tests.support.http_server import Running, running
from tests.support.messages_stream import joined, streamed
from tests.support.scripted_agent import agent_chat
from tests.support.scripted_model import REPLY, saying

Json = dict[str, Any]

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI: Json = {"role": "user", "content": "hi"}
BODY: Json = {"model": "claude", "max_tokens": 64, "messages": [HI], "temperature": 0}
MARK = {"cache_control": {"type": "ephemeral"}}
TOOL: Json = {"name": "read", "input_schema": {"type": "object"}}
USAGE = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
THINK = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
REASONED = {"script": saying("Hm, well.</think>\n\nYes.", marker="<|im_start|>assistant\n<think>\n")}


async def message(here: Running, **fields: Any) -> Json:
    status, body, _ = await here.post(MESSAGES, {**BODY, **fields})
    assert status == 200, body
    return body


async def refused(here: Running, path: str = MESSAGES, **fields: Any) -> str:
    status, body, headers = await here.post(path, {**BODY, **fields})
    assert status == 400 and body["type"] == "error" and body["request_id"] == headers["request-id"]
    assert body["error"]["type"] == "invalid_request_error"
    return str(body["error"]["message"])


async def prompt(here: Running, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> str:
    """The text of a request's prompt as the engine gets it."""
    prompts: list[Any] = []
    submit = here.model.engine.submit

    def recorded(ids: Any, *arguments: Any, **options: Any) -> Any:
        prompts.append(list(ids))
        return submit(ids, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(here.model.engine, "submit", recorded)
        await message(here, **fields)
    names = {256: "<|im_start|>", 257: "<|im_end|>", 259: "<think>", 260: "</think>"}
    return b"".join(bytes([i]) if i < 256 else names[i].encode() for i in prompts[0]).decode()


async def test_a_reply() -> None:
    async with running() as here:
        status, body, headers = await here.post(MESSAGES + "?beta=true", BODY)
        assert status == 200 and headers["request-id"]
        usage, details = body.pop("usage"), body.pop("finish_details")
        assert details["cause"] == "eos" and details["bad_calls"] == 0 and "grammar" not in details
        assert body.pop("id").startswith("msg_")
        assert body == {
            "type": "message",
            "role": "assistant",
            "model": "scripted",
            "content": [{"type": "text", "text": REPLY}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
        }
        assert sum(usage[key] for key in USAGE) == len("<user\nhi><assistant\n") + 1
        assert usage["output_tokens"] == len(REPLY.encode()) + 1
        status, _, _ = await here.get("/", allow_redirects=False)
        async with here.client.head(here.url + "/") as response:
            assert response.status == status == 200


@pytest.mark.parametrize(
    ("fields", "model"),
    [
        ({}, {}),
        ({"max_tokens": 5}, {}),
        ({"max_tokens": 0}, {}),
        ({"stop_sequences": ["zzz", "wö"]}, {}),
        (THINK, REASONED),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, REASONED),
        ({}, {"script": saying("\n \n")}),
        ({}, {"script": saying("")}),
    ],
)
async def test_a_stream_says_what_the_whole_reply_says(fields: Json, model: Json) -> None:
    async with running(model=model) as here:
        whole = await message(here, **fields)
        # Once the prompt is cached, both usages are the same.
        whole = await message(here, **fields)
        found = joined(await streamed(here, {**BODY, **fields}))
        assert found.pop("id") != whole.pop("id")
        assert found["finish_details"].pop("seed") >= 0 and whole["finish_details"].pop("seed") >= 0
        assert found == whole
        if "script" in model and "thinking" not in fields:
            assert whole["content"] == [] and whole["stop_reason"] == "end_turn"


async def test_details_say_what_was_cut_and_what_is_no_call() -> None:
    said = 'Well.\n<tool_call>\n{"name": "fly", "arguments": {}}\n</tool_call>'
    for text, limit, details in (
        (said, 400, {"cause": "eos", "bad_calls": 1, "cut_call": False}),
        (said.replace("fly", "read"), len(said) - 14, {"cause": "length", "bad_calls": 0, "cut_call": True}),
    ):
        async with running(model={"chat": agent_chat, "context": 2048, "script": saying(text)}) as here:
            for found in (
                await message(here, tools=[TOOL], max_tokens=limit),
                joined(await streamed(here, {**BODY, "tools": [TOOL], "max_tokens": limit})),
            ):
                assert found["finish_details"].items() >= details.items()


async def test_reasons_to_stop() -> None:
    async with running(model={"context": 128}) as here:
        assert (await message(here, max_tokens=5))["stop_reason"] == "max_tokens"
        # More than the context has room for is no mistake: clients do not know the context.
        long = await message(here, max_tokens=32000, messages=[{"role": "user", "content": "x" * 95}])
        assert long["stop_reason"] == "max_tokens" and long["usage"]["output_tokens"] < len(REPLY)
        stopped = await message(here, stop_sequences=["zzz", "wö"])
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "wö")
        assert stopped["content"] == [{"type": "text", "text": "Héllo, "}]
        empty = await message(here, max_tokens=0)
        assert empty["content"] == [] and empty["usage"]["output_tokens"] == 0


async def test_usage_tells_the_cached_tokens_apart() -> None:
    async with running() as here:
        first = (await message(here, messages=[{"role": "user", "content": "a" * 200}]))["usage"]
        assert [first[key] for key in USAGE] == [first["input_tokens"], 0, 0]
        again = await streamed(here, {**BODY, "messages": [{"role": "user", "content": "a" * 200}]})
        usage = joined(again)["usage"]
        assert usage["cache_read_input_tokens"] > 150
        assert sum(usage[key] for key in USAGE) == first["input_tokens"]
        assert again[0]["message"]["usage"]["cache_read_input_tokens"] == usage["cache_read_input_tokens"]


async def test_usage_counts_what_a_mark_adds_to_the_cache() -> None:
    marked = {"role": "user", "content": [{"type": "text", "text": "b" * 100, **MARK}]}
    rest = [{"role": "assistant", "content": "c" * 50}, HI]
    async with running() as here:
        usage = (await message(here, messages=[marked, *rest]))["usage"]
        # Up to the marker behind the message with the mark.
        assert usage["cache_creation_input_tokens"] == len("<user\n" + "b" * 100 + ">\n<")
        assert usage["input_tokens"] == len("assistant\n" + "c" * 50 + ">\n<user\nhi>\n<assistant\n")
        usage = (await message(here, messages=[marked, *rest]))["usage"]
        assert usage["cache_creation_input_tokens"] == 0 and usage["cache_read_input_tokens"] > 100
        everything = (await message(here, messages=[{"role": "user", "content": "d" * 9}], **MARK))["usage"]
        assert everything["input_tokens"] == len("assistant\n")


async def test_cache_marks_that_move_change_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    text = {"type": "text", "text": "hello"}
    async with running() as here:
        plain = await prompt(here, monkeypatch, messages=[HI, {"role": "system", "content": "hello"}, HI])
        for block in (text, {**text, **MARK}):
            system = {"role": "system", "content": [block]}
            assert await prompt(here, monkeypatch, messages=[HI, system, HI]) == plain


async def test_the_prompt_of_a_tool_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a.txt"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "42", "is_error": True}
    messages = [HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    async with running(model={"context": 4096}) as here:
        text = await prompt(here, monkeypatch, messages=messages, tools=[TOOL], system="Be brief.")
        assert "Be brief." in text and '"read"' in text and "Error: 42" in text
        assert text.index("Be brief.") < text.index("hi<|im_end|>") < text.index("Error: 42")


async def test_reasoning_is_a_block_of_its_own() -> None:
    async with running(model=REASONED) as here:
        thinking, text = (await message(here, **THINK))["content"]
        assert thinking["thinking"].strip() == "Hm, well." and text["text"].strip() == "Yes."
        found = joined(await streamed(here, {**BODY, **THINK}))
        assert found["content"] == [thinking, text]
        assert found["usage"]["output_tokens_details"]["thinking_tokens"] > len("Hm, well.")
        omitted, _ = (await message(here, thinking={"type": "adaptive", "display": "omitted"}))["content"]
        assert omitted["thinking"] == ""
        assert carried(omitted["signature"], here.model.fingerprint) == thinking["thinking"]


async def test_reasoning_is_off_where_it_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as here:
        assert (await prompt(here, monkeypatch, thinking={"type": "disabled"})).endswith("assistant\n")
        assert (await prompt(here, monkeypatch, thinking={"type": "adaptive"})).endswith("<think>\n")


async def test_a_reply_continues_the_last_message(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [HI, {"role": "assistant", "content": "Once"}]
    async with running(model={"script": saying(" upon", marker="Once")}) as here:
        assert (await prompt(here, monkeypatch, messages=messages)).endswith("<|im_start|>assistant\nOnce")
        assert (await message(here, messages=messages))["content"] == [{"type": "text", "text": " upon"}]


async def test_tokens_are_counted_as_a_request_reads_them() -> None:
    call = {"type": "tool_use", "id": "1", "name": "read", "input": {"a": [1, "ü"]}}
    bodies: list[Json] = [
        {},
        {"system": [{"type": "text", "text": "s", **MARK}], "tools": [TOOL]},
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
        {
            "messages": [
                HI,
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "h", "signature": ""}, call]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"}]},
            ],
            "tools": [TOOL],
        },
    ]
    async with running(model={"context": 4096}) as here:
        for body in bodies:
            counted = {key: value for key, value in {**BODY, **body}.items() if key != "max_tokens"}
            status, count, _ = await here.post(COUNT + "?beta=true", counted)
            assert status == 200
            usage = (await message(here, **body))["usage"]
            assert count == {"input_tokens": sum(usage[key] for key in USAGE)}


async def test_tokens_are_counted_without_the_engine() -> None:
    async with running(model={"context": 64}) as here:
        status, count, _ = await here.post(COUNT, {**BODY, "messages": [{"role": "user", "content": "x" * 999}]})
        assert status == 200 and count["input_tokens"] > 999
        here.model.gone = "a daemon is gone"
        assert (await here.post(COUNT, BODY))[0] == 200
        assert (await here.post(MESSAGES, BODY))[0] == 529
        here.model.gone = ""
        assert not here.model.backend.steps


async def test_a_prompt_that_is_too_long_names_both_numbers() -> None:
    async with running(model={"context": 64}) as here:
        long = [{"role": "user", "content": "x" * 100}]
        assert await refused(here, messages=long) == "prompt is too long: 119 tokens > 64 maximum"
        # Long before all of it is read.
        longer = [{"role": "user", "content": "x" * 200_000}]
        for path in (MESSAGES, COUNT):
            words = (await refused(here, path, messages=longer)).split()
            assert 64 + 32768 < int(words[4]) < 200_000 and words[-2:] == ["64", "maximum"]


@pytest.mark.parametrize(
    ("fields", "begins"),
    [
        ({"max_tokens": None}, "max_tokens: is required"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]: images are not"),
        ({"temperature": 9}, "temperature: "),
        ({"messages": [HI, {"role": "assistant", "content": " "}, HI, {"role": "king", "content": ""}]}, "messages[3]"),
    ],
)
async def test_mistakes_are_named_by_the_path_in_the_body(fields: Json, begins: str) -> None:
    async with running() as here:
        assert (await refused(here, **fields)).startswith(begins)


async def test_errors_of_the_transport() -> None:
    async with running(api_key=("secret",)) as here:
        status, body, _ = await here.post(MESSAGES, BODY)
        assert status == 401 and body["error"]["type"] == "authentication_error"
        for headers in ({"x-api-key": "secret"}, {"Authorization": "Bearer secret"}):
            assert (await here.post(MESSAGES, BODY, headers=headers))[0] == 200
        status, body, _ = await here.get(MESSAGES, headers={"x-api-key": "secret"})
        assert status == 405 and body["type"] == "error"
        status, body, _ = await here.post(MESSAGES, b"{", headers={"x-api-key": "secret"})
        assert status == 400 and body["error"]["type"] == "invalid_request_error"


async def test_overload_is_status_529() -> None:
    async with running(loaded=False) as here:
        status, body, headers = await here.post(MESSAGES, BODY)
        assert status == 529 and headers["Retry-After"]
        assert body["error"]["type"] == "overloaded_error"


async def test_a_failure_in_the_middle_is_an_event() -> None:
    def fail(step: Any) -> None:
        if len(here.model.backend.steps) > 4:
            raise BackendError("a device failed")

    async with running(model={"hook": fail}) as here:
        events = await streamed(here, BODY)
        assert events[0]["type"] == "message_start"
        assert events[-1]["error"] == {"type": "api_error", "message": "a device failed"}
        assert events[-1]["request_id"].startswith("req_")


async def test_a_stream_that_waits_sends_pings() -> None:
    gate = threading.Event()
    async with running(sse_ping=0.02, parallel=1, model={"hook": lambda step: gate.wait(60) and None}) as here:
        path = here.url + MESSAGES
        async with (
            here.client.post(path, json={**BODY, "stream": True}) as running_now,
            here.client.post(path, json={**BODY, "stream": True}) as waiting,
        ):
            for response in (running_now, waiting):
                while await response.content.readuntil(b"\n\n") != b'event: ping\ndata: {"type":"ping"}\n\n':
                    pass
            gate.set()
            for response in (running_now, waiting):
                assert (await response.read()).endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')


async def test_tools_of_other_servers_are_counted() -> None:
    web = {"type": "web_search_20250305", "name": "web_search"}
    async with running() as here:
        await message(here, tools=[web, {**web, "name": "other"}], tool_choice={"type": "auto"})
        assert await here.metric("luce_skipped_tools_total") == 2


async def test_the_user_names_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: list[str] = []
    async with running() as here:
        submit = here.model.engine.submit

        def recorded(*arguments: Any, session: str, **options: Any) -> Any:
            sessions.append(session)
            return submit(*arguments, session=session, **options)

        monkeypatch.setattr(here.model.engine, "submit", recorded)
        await message(here, metadata={"user_id": "u"})
        await here.post(MESSAGES, {**BODY, "metadata": {"user_id": "u"}}, headers={"x-claude-code-session-id": "c"})
    assert sessions == ["/u", "/c"]
