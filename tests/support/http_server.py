"""The real application on a loopback socket, over a scripted model, for tests in the same event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import aiohttp
from aiohttp import web_app

from luce.api import Model
from luce.cluster.wire import Status
from luce.config.settings import Config
from luce.server.app import KEEPALIVE_SECONDS, start
from luce.server.model_pool import ModelPool
from luce.server.state import Server
from tests.support.scripted_model import ScriptedModel

Json = dict[str, Any]


class Running:
    """A running server: its address, its objects, and a client."""

    def __init__(self, url: str, server: Server, model: ScriptedModel, client: aiohttp.ClientSession) -> None:
        self.url = url
        self.server = server
        self.model = model
        self.client = client
        self.port = int(url.rpartition(":")[2])

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Json, Any]:
        """Status, JSON body and headers of a POST; `body` is JSON or bytes."""
        if isinstance(body, bytes):
            options["headers"] = {"Content-Type": "application/json"} | options.get("headers", {})
            options["data"] = io.BytesIO(body)
        else:
            options["json"] = body
        async with self.client.post(self.url + path, **options) as response:
            return response.status, await response.json(content_type=None), response.headers

    async def get(self, path: str, **options: Any) -> tuple[int, Any, Any]:
        """Status, body (JSON if it is) and headers of a GET."""
        async with self.client.get(self.url + path, **options) as response:
            text = await response.text()
            is_json = response.content_type == "application/json" and text
            return response.status, json.loads(text) if is_json else text, response.headers

    async def chat(self, content: str = "hi", **fields: Any) -> Json:
        """The body of a chat reply that must succeed."""
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
        status, reply, _ = await self.post("/v1/chat/completions", body)
        assert status == 200, reply
        return reply

    async def events(self, path: str, body: Json) -> list[Any]:
        """The events of a stream. Checks its form: headers, one line of JSON each, `[DONE]` at the end."""
        async with self.client.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert response.headers["Cache-Control"] == "no-cache"
            text = (await response.read()).decode()
        assert text.endswith("\n\n")
        events = [event for event in text[:-2].split("\n\n") if not event.startswith(":")]
        assert all(event.startswith("data: ") and "\n" not in event for event in events)
        assert events[-1] == "data: [DONE]"
        return [json.loads(event[6:]) for event in events[:-1]]

    async def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        _, text, _ = await self.get("/metrics")
        lines = [line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] == name]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; the test's timeout ends the wait if it never holds."""
        while not condition():
            await asyncio.sleep(0.002)

    async def quiet(self) -> None:
        """Wait until no sequence runs or waits, then check that no page is in use."""
        await self.until(lambda: self.server.active == 0)
        await self.until(lambda: not self.model.engine.stats().running and not self.model.engine.stats().waiting)
        assert self.model.engine.stats().pages_used == 0


@contextlib.asynccontextmanager
async def running(
    *,
    loaded: bool = True,
    sock: socket.socket | None = None,
    model: dict[str, Any] | None = None,
    keepalive: float = KEEPALIVE_SECONDS,
    pool: ModelPool | None = None,
    cluster: Callable[[], Status] | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """A server with these settings and these arguments for the ScriptedModel; `loaded` False: no model yet. `pool`: the
    models of a server that has several; `cluster`: as in Server."""
    config = Config(**settings)
    server = await asyncio.to_thread(Server, config, pool, cluster)
    sock = sock or socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    runner = await start(server, [sock], keepalive=keepalive)
    scripted = await asyncio.to_thread(lambda: ScriptedModel(config, **(model or {})))
    if pool is not None:
        pool.starting = False
    elif loaded:
        server.model = cast(Model, scripted)
    before = {task for task in asyncio.all_tasks() if not task.done()}
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            here = Running(f"http://127.0.0.1:{sock.getsockname()[1]}", server, scripted, client)
            yield here
            # Unfinished generators of a client end in tasks of their own when they are collected.
            gc.collect()
            await asyncio.sleep(0)
            await here.quiet()
    finally:
        await runner.cleanup()
        if pool is not None:
            await pool.close()
        await asyncio.to_thread(scripted.close)
        await server.send_traces()
        server.close()
        _forget_applications()
    left = {task for task in asyncio.all_tasks() if not task.done()} - before - {asyncio.current_task()}
    if left:
        # Tasks close the generators that a client library drops; they only need to run once.
        _, left = await asyncio.wait(left, timeout=2)
    assert not left, f"tasks left behind: {left}"


def _forget_applications() -> None:
    # aiohttp keeps the middlewares of the last 1024 applications, and with them all that these hold: 800 objects per
    # server, which each collection above would visit (50 ms after 170 servers).
    for function in vars(web_app).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
