"""The process of the chat template stops answering: conversations wait or go to a new process, the rest goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from luce.text.template import ChatTemplate
from tests.support.http_server import Running, running
from tests.support.scripted_model import DIALECT, REPLY, TEMPLATE, OffLoopChat, tokenizer

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}


@contextlib.asynccontextmanager
async def stopped(*, seconds: float, patience: float) -> AsyncIterator[tuple[Running, ChatTemplate]]:
    """A server whose template process has got SIGSTOP."""
    template = await asyncio.to_thread(
        lambda: ChatTemplate(TEMPLATE, bos="", eos="<|im_end|>", seconds=seconds, patience=patience)
    )
    try:
        async with running(parallel=2) as here:
            here.model.chat = await asyncio.to_thread(OffLoopChat, template, tokenizer(), DIALECT)
            await here.chat()
            os.kill(template.process.pid, signal.SIGSTOP)
            yield here, template
    finally:
        await asyncio.to_thread(template.close)


async def test_the_conversation_goes_to_a_new_process() -> None:
    async with stopped(seconds=0.5, patience=0.5) as (here, template):
        old = template.process
        assert (await here.chat())["choices"][0]["message"]["content"] == REPLY
        assert template.process.pid != old.pid and old.returncode == -signal.SIGKILL
        assert (await here.get("/health"))[:2] == (200, {"status": "ok"})


async def test_conversations_that_wait_hold_up_nothing_else() -> None:
    async with stopped(seconds=10, patience=10) as (here, template):

        async def others() -> list[int]:
            metrics = await here.get("/metrics")
            completion = await here.post("/v1/completions", {"prompt": "hi", "temperature": 0, "max_tokens": 4})
            return [metrics[0], completion[0]]

        waiting = [asyncio.create_task(here.chat()) for _ in range(9)]
        await here.until(lambda: here.server.active == 9)
        beside = asyncio.create_task(others())
        # Others that are held up end behind the conversations, which go to a new process some time.
        first, _ = await asyncio.wait([beside, *waiting], return_when=asyncio.FIRST_COMPLETED)
        assert first == {beside} and await beside == [200, 200]
        os.kill(template.process.pid, signal.SIGCONT)
        assert [(await task)["choices"][0]["message"]["content"] for task in waiting] == [REPLY] * 9


async def test_health_notices() -> None:
    async with stopped(seconds=1, patience=20) as (here, template):
        assert (await here.get("/health"))[0] == 200
        waiting = asyncio.create_task(here.chat())
        while (await here.get("/health"))[0] == 200:
            assert not waiting.done()
            await asyncio.sleep(0.01)
        status, body, _ = await here.get("/health")
        assert status == 503 and body["status"] == "error"
        assert body["reason"].startswith("chat template: its process has not answered for ")
        os.kill(template.process.pid, signal.SIGCONT)
        assert (await waiting)["choices"][0]["message"]["content"] == REPLY
        assert (await here.get("/health"))[:2] == (200, {"status": "ok"})


async def test_a_process_that_cannot_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "chat template: its process cannot be started: No such file or directory: /nonexistent/python"
    async with stopped(seconds=1, patience=1) as (here, template):
        await asyncio.to_thread(template.close)
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", "/nonexistent/python")
            status, body, headers = await here.post(CHAT, HI)
            assert status == 503, body
            assert status == 503 and body["error"]["code"] == "template_down" and headers["Retry-After"]
            assert body["error"]["message"] == why
            assert (await here.get("/health"))[:2] == (503, {"status": "error", "reason": why})
        assert (await here.chat())["choices"][0]["message"]["content"] == REPLY
        assert (await here.get("/health"))[:2] == (200, {"status": "ok"})
