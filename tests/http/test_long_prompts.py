"""Prompts that take long to read: the client that leaves ends the reading, and nothing else waits for it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from luce.errors import RequestError
from luce.text.prompt_limit import PromptLimit
from tests.support.http_server import Running, running

PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
}


class Reading:
    """Reads until its client has left, or until the test ends."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.limits: list[PromptLimit] = []
        self._over = threading.Event()

    def __call__(self, *args: Any, limit: PromptLimit, **options: Any) -> list[int]:
        self.limits.append(limit)
        self.begun.release()
        while not self._over.wait(0.001):
            limit.check(0)
        return []

    def end(self) -> None:
        """Let go of the server's threads, also if nothing else stops them."""
        self._over.set()


@pytest.fixture
def reading() -> Iterator[Reading]:
    reading = Reading()
    yield reading
    reading.end()


def slow(here: Running, reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here.model.chat, "prompt", reading, raising=False)
    monkeypatch.setattr(here.model.tokenizer, "refuse_long", lambda text, limit: reading(limit=limit), raising=False)


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_ends_the_reading(
    path: str, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as here:
        slow(here, reading, monkeypatch)
        asked = asyncio.create_task(here.post(path, PATHS[path]))
        await asyncio.to_thread(reading.begun.acquire)
        (limit,) = reading.limits
        limit.check(0)
        asked.cancel()
        await here.quiet()
        with pytest.raises(RequestError, match="the client has left"):
            limit.check(0)


async def test_metrics_do_not_wait_for_prompts(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as here:
        slow(here, reading, monkeypatch)
        asked = [asyncio.create_task(here.post(path, body)) for path, body in PATHS.items() for _ in range(8)]
        for _ in range(4):
            await asyncio.to_thread(reading.begun.acquire)
        assert (await here.get("/metrics"))[0] == 200 and (await here.get("/v1/cache"))[0] == 200
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await here.quiet()


async def test_a_long_message_is_refused_before_it_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as here:
        monkeypatch.setattr(here.model.chat.template, "render", None, raising=False)
        body = json.dumps({"messages": [{"role": "user", "content": "word " * (6 << 20)}]}).encode()
        status, reply, _ = await here.post("/v1/chat/completions", body)
        assert status == 400 and reply["error"]["code"] == "context_length_exceeded"
        assert "resulted in at least" in reply["error"]["message"]


@pytest.mark.parametrize(
    "count, expected, code", [(60_000, 400, "context_length_exceeded"), (200_000, 413, "request_too_large")]
)
async def test_many_messages_are_refused_before_they_are_rendered(
    count: int, expected: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as here:
        monkeypatch.setattr(here.model.chat.template, "render", None, raising=False)
        body = json.dumps({"messages": [{"role": "user", "content": "x"}] * count}).encode()
        status, reply, _ = await here.post("/v1/chat/completions", body)
        assert (status, reply["error"]["code"]) == (expected, code)
        assert f"at least {count} tokens" in reply["error"]["message"] or expected == 413
