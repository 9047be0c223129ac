"""Probes like those of Lucebox's harness: what its scripts ask of a server over plain HTTP, and read from replies."""

from __future__ import annotations

import json
from typing import Any

from tests.support.http_server import Running, running
from tests.support.messages_stream import joined, streamed
from tests.support.scripted_model import REPLY

Json = dict[str, Any]

ASK: Json = {"model": "luce", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 64}


async def lines(here: Running, path: str, body: Json, headers: dict[str, str] | None = None) -> list[str]:
    """The data of a stream, as a script reads them: line by line, all else skipped."""
    async with here.client.post(here.url + path, json={**body, "stream": True}, headers=headers) as response:
        assert response.status == 200, await response.text()
        text = (await response.read()).decode()
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


async def test_health_and_models() -> None:
    async with running() as here:
        status, body, _ = await here.get("/health")
        assert (status, body["status"]) == (200, "ok")
        status, body, _ = await here.get("/v1/models")
        assert status == 200 and body["data"][0]["id"] and body["data"][0]["context_length"] == 512


async def test_a_chat_stream_ends_with_usage() -> None:
    async with running() as here:
        found = await lines(here, "/v1/chat/completions", {**ASK, "stream_options": {"include_usage": True}})
    assert found[-1] == "[DONE]"
    chunks = [json.loads(line) for line in found[:-1]]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert text == REPLY and chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(REPLY.encode()) + 1
    assert chunks[-1]["timings"]["predicted_per_second"] > 0


async def test_a_stop_string_is_cut_off() -> None:
    async with running() as here:
        for stop in ("wö", ["zzz", "wö"]):
            reply = await here.chat(stop=stop)
            assert reply["choices"][0]["message"]["content"] == "Héllo, "


async def test_tools_are_accepted() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    async with running(model={"context": 2048}) as here:
        assert (await here.chat(tools=[tool], tool_choice="auto"))["choices"][0]["message"]["content"] == REPLY


async def test_a_messages_stream_has_text_deltas() -> None:
    async with running() as here:
        events = await streamed(here, ASK)
        assert [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"] and joined(events)[
            "content"
        ] == [{"type": "text", "text": REPLY}]


async def test_codex_gets_its_catalogue() -> None:
    async with running() as here:
        status, body, _ = await here.get("/v1/models?client_version=0.169.0")
        (model,) = body["models"]
        assert status == 200 and model["context_window"] == 512 and model["shell_type"] and model["slug"]
