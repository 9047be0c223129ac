"""Streams in frames: another server goes on with a stream behind any of its frames, and the client sees one stream."""

from __future__ import annotations

import json
import re
from typing import Any

import aiohttp
import pytest

from luce.server.relay import StreamRecord
from luce.server.stream_frames import RECORD_HEADER, RELAY_HEADER, Frame, FrameReader, encoded, record_of
from tests.support.http_server import Running, running
from tests.support.scripted_agent import agent_chat, call, thinking_chat
from tests.support.scripted_model import saying

ADMIN = {"Authorization": "Bearer admin"}
RELAYED = {**ADMIN, RELAY_HEADER: "admin", "Content-Type": "application/json"}
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"unit": {"enum": ["c", "k"]}}, "required": ["unit"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
CALLING = saying("Let me look. " + call("weather", {"unit": "c"}))
THINKING = saying("I think.</think>So it is.")
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
#: by name: the endpoint, the body, and the model
REQUESTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, **USAGE}, {}),
    "several": ("/v1/chat/completions", {"messages": MESSAGES, "n": 3, "logprobs": True, "top_logprobs": 2}, {}),
    "length": ("/v1/completions", {"prompt": "ab", "max_tokens": 5, "return_token_ids": True}, {}),
    "prompts": ("/v1/completions", {"prompt": ["ab", "cd"], "max_tokens": 6}, {}),
    "stop": ("/v1/chat/completions", {"messages": MESSAGES, "stop": ["wö"]}, {}),
    "drawn": ("/v1/completions", {"prompt": "ab", "max_tokens": 12, "temperature": 2.0, "seed": 5}, {}),
    "calls": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": TOOLS},
        {"chat": agent_chat, "script": CALLING},
    ),
    "grammar": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        {"chat": agent_chat, "context": 4096},
    ),
    "thinking": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": True}},
        {"chat": thinking_chat, "script": THINKING},
    ),
    "messages": (
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 200, "tools": [{"name": "weather", "input_schema": SCHEMA}]},
        {"chat": agent_chat, "script": CALLING},
    ),
    "responses": (
        "/v1/responses",
        {"input": "hi", "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}]},
        {"chat": agent_chat, "script": CALLING},
    ),
    "native": ("/completion", {"prompt": "ab", "n_predict": 6}, {}),
}


async def frames(here: Running, path: str, body: dict[str, Any], record: bytes = b"") -> list[Frame]:
    data = json.dumps({"temperature": 0, **body, "stream": True}).encode() + record
    headers = RELAYED | ({RECORD_HEADER: str(len(record))} if record else {})
    async with here.client.post(here.url + path, data=data, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.headers[RELAY_HEADER] == "1"
        return list(FrameReader().feed(await response.read()))


def timeless(data: bytes) -> bytes:
    """A stream without what it says of seconds and of the work of one server."""
    data = re.sub(rb'"(timings|prompt_progress)":\{[^{}]*\}', b"", data)
    return re.sub(rb'"(completed_at|\w+_ms|\w+_per_second|forced)":[0-9.e-]+', b"", data)


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_stream_goes_on_at_another_server_behind_any_frame(name: str) -> None:
    path, body, model = REQUESTS[name]
    settings: dict[str, Any] = {"api_key": ("admin",), "cache_ram": 0}
    async with running(model=model, **settings) as here:
        whole = await frames(here, path, body)
    expected = told(name, whole)
    assert len(whole) > 4 and b"event: error" not in whole[-1].data
    async with running(model=model, **settings) as other:
        for cut in range(1, len(whole) + 1, 1 + len(whole) // 16):
            record = record_of([frame.notes for frame in whole[:cut]])
            rest = await frames(other, path, body, record)
            assert told(name, [*whole[:cut], *rest]) == expected, cut


def told(name: str, sent: list[Frame]) -> Any:
    """What a client learns. Where a grammar forces tokens, how many come at a time is no part of it."""
    data = b"".join(frame.data for frame in sent)
    if name != "grammar":
        return timeless(data)
    events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
    ids, arguments = {event["id"] for event in events}, dict[int, list[str]]()
    for delta in (event["choices"][0]["delta"] for event in events if event["choices"]):
        for entry in delta.get("tool_calls", ()):
            arguments.setdefault(entry["index"], []).append(entry.get("id", "") + entry["function"]["arguments"])
    return ids, {index: "".join(parts) for index, parts in arguments.items()}, data.count(b"[DONE]")


async def test_a_stream_that_goes_on_goes_on_again() -> None:
    path, body, model = REQUESTS["calls"]
    async with running(model=model, api_key=("admin",), cache_ram=0) as here:
        whole = await frames(here, path, body)
        got = whole[:3]
        for _ in range(3):
            rest = await frames(here, path, body, record_of([frame.notes for frame in got]))
            got += rest[:2]
        got += await frames(here, path, body, record_of([frame.notes for frame in got]))
    assert timeless(b"".join(frame.data for frame in got)) == timeless(b"".join(frame.data for frame in whole))


async def test_a_server_that_ends_leaves_its_streams_to_another_one() -> None:
    body, got = {"prompt": "ab", "max_tokens": 200, "temperature": 0}, list[Frame]()
    async with running(api_key=("admin",), model={"delay": 0.002}) as here:
        _, expected, _ = await here.post("/v1/completions", body, headers=ADMIN)
        data = json.dumps({**body, "stream": True}).encode()
        async with here.client.post(here.url + "/v1/completions", data=data, headers=RELAYED) as response:
            reader = FrameReader()
            with pytest.raises(aiohttp.ClientPayloadError):
                async for chunk in response.content.iter_any():
                    got += reader.feed(chunk)
                    here.model.engine.stop_running()
        rest = await frames(here, "/v1/completions", body, record_of([frame.notes for frame in got]))
    assert 0 < len(text_of(got)) < len(text_of(rest))
    assert text_of([*got, *rest]) == expected["choices"][0]["text"]
    ends = [b"".join(frame.data for frame in part).count(b'"finish_reason":"stop"') for part in (got, rest)]
    assert ends == [0, 1]


def text_of(sent: list[Frame]) -> str:
    lines = b"".join(frame.data for frame in sent).splitlines()
    found = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    return "".join(event["choices"][0]["text"] for event in found if event["choices"])


async def test_ids_of_a_stream_are_its_own() -> None:
    async with running(api_key=("admin",)) as here:
        ids = {(await frames(here, "/v1/completions", {"prompt": "a", "max_tokens": 1}))[0].data for _ in range(3)}
        assert len(ids) == 3


async def test_only_an_admin_gets_frames_and_gives_records() -> None:
    body = {"prompt": "ab", "max_tokens": 3, "stream": True}
    async with running(api_key=("admin",)) as here:
        for key in ("", "other"):
            headers = {**RELAYED, RELAY_HEADER: key, RECORD_HEADER: "2"}
            data = json.dumps(body).encode()
            async with here.client.post(here.url + "/v1/completions", data=data, headers=headers) as response:
                assert response.status == 200 and RELAY_HEADER not in response.headers
                assert b": luce" not in await response.read()
            async with here.client.post(here.url + "/v1/completions", data=data + b"[]", headers=headers) as response:
                assert response.status == 400


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        (b"[", {}),
        (b"[[]]", {}),
        (b'[[["head","a",1]]]', {}),
        (b'[[["head","a",1,2],["event",0,"Failed",{}]]]', {}),
        (b'[[["head","a",1,2],["event",0,"Tokens",{"tokens":[{"id":"x","text":""}]}]]]', {}),
        (b'[[["head","a",1,2],["event",0,"Tokens",{"tokens":[{"id":100000,"text":""}]}]]]', {}),
        (b'[[["head","a",1,2]]]', {"stream": False}),
        (b'[[["head","a",1,2]]]', {"echo": True, "logprobs": 1}),
    ],
)
async def test_what_is_no_record_of_the_request_is_refused(record: bytes, fields: dict[str, Any]) -> None:
    body = {"prompt": "ab", "max_tokens": 3, "stream": True, **fields}
    headers = {**RELAYED, RECORD_HEADER: str(len(record))}
    async with running(api_key=("admin",)) as here:
        data = json.dumps(body).encode() + record
        async with here.client.post(here.url + "/v1/completions", data=data, headers=headers) as response:
            assert response.status == 400, await response.text()


def test_frames_come_whole_from_any_pieces() -> None:
    sent = [Frame(b"data: a\n\n", b"[1]"), Frame(b"", b"[]"), Frame(b": luce 3\n\n", b'["\\n\\n"]')]
    data = b"".join(map(encoded, sent))
    for size in (1, 2, 7, len(data)):
        reader, found = FrameReader(), list[Frame]()
        for start in range(0, len(data), size):
            found += reader.feed(data[start : start + size])
        assert found == sent
    with pytest.raises(ValueError, match="lacks its frames"):
        list(FrameReader().feed(b"data: x\n\n"))


def test_a_record_says_what_is_given_and_what_has_ended() -> None:
    tokens = b'["event",%d,"Tokens",{"tokens":[{"id":%d,"text":"a"}]}]'
    record = StreamRecord.read(
        b'[[["head","a",1,2],["opened",0]],[%s,%s],[%s]]' % tuple(tokens % pair for pair in ((0, 5), (1, 7), (0, 6)))
    )
    assert record.given(range(2)) == {0: (5, 6), 1: (7,)} and record.opened == {0} and not record.ended
    assert record.origin.created == 1
    other = StreamRecord.read(b'[[["head","a",3,4]]]').origin
    assert record.origin.names.random() == other.names.random()
