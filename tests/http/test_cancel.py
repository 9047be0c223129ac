"""A client that leaves, or does not read, ends its sequences: in the queue, in the prompt, in the reply."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from luce.runtime.step import Step
from luce.server import answer
from luce.server.stream import EventStream
from tests.support.http_server import Running, running
from tests.support.scripted_model import saying

CHAT = "/v1/chat/completions"
FOREVER = {"script": saying("x", end=False), "delay": 0.005}


def request(content: str = "hi", **fields: Any) -> bytes:
    body = json.dumps({"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@contextlib.asynccontextmanager
async def connected(here: Running, data: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """A client that sends bytes, and hangs up at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
    writer.write(data)
    await writer.drain()
    try:
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("stream", [False, True])
async def test_in_the_reply(stream: bool) -> None:
    async with running(model={**FOREVER, "context": 4096}) as here:
        async with connected(here, request(stream=stream)):
            await here.until(lambda: here.model.engine.stats().predicted_tokens > 3)
        await here.quiet()
        assert here.model.engine.stats().cancelled == 1
        assert await here.metric("luce_cancelled_sequences_total") == 1
        _, text, _ = await here.get("/metrics")
        assert 'luce_cancelled_sequences_total{stage="decode"} 1.0' in text
        assert 'luce_requests_total{endpoint="/v1/chat/completions",status="499"} 1.0' in text


@pytest.mark.parametrize("stream", [False, True])
async def test_in_the_prompt(stream: bool) -> None:
    async with running(chunk=16, model={**FOREVER, "context": 8192}) as here:
        async with connected(here, request("y" * 8000, stream=stream)):
            await here.until(lambda: here.model.engine.stats().prompt_tokens > 16)
        await here.quiet()
        stats = here.model.engine.stats()
        assert stats.cancelled == 1 and stats.predicted_tokens == 0 and stats.prompt_tokens < 8000
        _, text, _ = await here.get("/metrics")
        assert 'luce_cancelled_sequences_total{stage="prefill"} 1.0' in text


@pytest.mark.parametrize("stream", [False, True])
async def test_in_the_queue(stream: bool) -> None:
    async with running(parallel=1, model={**FOREVER, "context": 4096}) as here:
        async with connected(here, request()):
            await here.until(lambda: here.model.engine.stats().running == 1)
            async with connected(here, request(stream=stream)):
                await here.until(lambda: here.model.engine.stats().waiting == 1)
            await here.until(lambda: here.model.engine.stats().waiting == 0)
            _, text, _ = await here.get("/metrics")
            assert 'luce_cancelled_sequences_total{stage="queued"} 1.0' in text
            assert here.model.engine.stats().running == 1  # the other one goes on
        await here.quiet()


async def test_all_replies_of_a_request() -> None:
    async with running(parallel=2, max_queue=0, model={**FOREVER, "context": 4096}) as here:
        async with connected(here, request(n=5, temperature=1, stream=True)):
            await here.until(lambda: here.model.engine.stats().running == 2)
        await here.quiet()
        assert here.model.engine.stats().cancelled == 2


async def test_while_the_body_is_sent() -> None:
    async with running() as here:
        async with connected(here, request("z" * 1000)[:-500]):
            await here.until(lambda: here.server.active == 1)
        await here.quiet()
        assert here.model.engine.stats().steps == 0
        assert (await here.get("/health"))[0] == 200


async def test_the_next_reply_is_right() -> None:
    async with running(parallel=1, model={"delay": 0.002}) as here:
        expected = await here.chat()
        for _ in range(5):
            async with connected(here, request(stream=True)) as reader:
                await reader.readuntil(b"\n\n")
        reply = await here.chat()
        assert reply["choices"][0]["message"] == expected["choices"][0]["message"]


async def test_a_reset_before_the_first_byte_is_no_error_of_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def reset(request: web.Request, write_timeout: float) -> EventStream:
        # What a reset by the client does to the transport; the handler hears of it one turn of the loop later.
        assert request.transport is not None
        request.transport.abort()
        return EventStream(request, write_timeout)

    monkeypatch.setattr(answer, "EventStream", reset)
    caplog.set_level(logging.INFO)
    async with running() as here:
        async with connected(here, request(stream=True)) as reader:
            assert await reader.read() == b""
        await here.quiet()
        _, text, _ = await here.get("/metrics")
        assert 'luce_requests_total{endpoint="/v1/chat/completions",status="499"} 1.0' in text
        assert 'status="500"' not in text and "Traceback" not in caplog.text
        (line,) = [record for record in caplog.records if record.getMessage() == "request"]
        assert line.fields["status"] == 499  # type: ignore[attr-defined]


async def test_a_client_that_does_not_read_is_dropped() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        # Small buffers in the kernel, so that the server's own limit takes effect.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        model = {"script": saying("x", end=False), "context": 60_000}
        async with running(sock=sock.dup(), write_timeout=0.3, model=model) as here:
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            with client:
                await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", here.port))
                body = request(stream=True, logprobs=True, top_logprobs=20)
                await asyncio.get_running_loop().sock_sendall(client, body)
                await here.until(lambda: here.model.engine.stats().cancelled == 1)
                await here.quiet()
                assert 0 < here.model.engine.stats().predicted_tokens < 50_000
                _, text, _ = await here.get("/metrics")
                assert 'status="499"} 1.0' in text


async def test_a_silent_stream_is_kept_alive() -> None:
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait(step: Step) -> None:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()

    async with running(sse_ping=0.1, model={"hook": wait}) as here:
        async with connected(here, request(stream=True)) as reader:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"200 OK" in head  # before the first token
            assert b'"role":"assistant"' in await reader.readuntil(b"\n\n")
            for _ in range(3):
                assert b": ping\n\n" in await reader.readuntil(b"\n\n")
            gate.set()
            assert b'"content"' in await reader.readuntil(b"\n\n")
        await here.quiet()
