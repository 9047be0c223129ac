"""GET /slots: what each slot does, and never what is in it."""

from __future__ import annotations

import asyncio
import json
import threading

from tests.support.http_server import running


async def test_idle_slots() -> None:
    async with running(parallel=2) as here:
        idle = {"n_ctx": 512, "speculative": False, "is_processing": False}
        assert (await here.get("/slots"))[1] == [{"id": 0, **idle}, {"id": 1, **idle}]
        assert (await here.get("/slots?fail_on_no_slot=1"))[0] == 200


async def test_a_busy_slot_while_a_step_runs() -> None:
    gate, reached = threading.Event(), threading.Event()
    steps: list[int] = []

    def hook(step: object) -> None:
        steps.append(1)
        if len(steps) == 3:
            reached.set()
            gate.wait()

    async with running(parallel=2, chunk=64, model={"hook": hook}) as here:
        body = {"prompt": "secret words", "max_tokens": 9, "ignore_eos": True, "temperature": 0}
        reply = asyncio.create_task(here.post("/v1/completions", body))
        await asyncio.to_thread(reached.wait)
        try:
            status, slots, _ = await here.get("/slots?fail_on_no_slot=1")
        finally:
            gate.set()
        assert status == 200
        # The prompt's step gave the first token, the second step the second one, and the third one waits.
        assert slots[0] == {
            "id": 0,
            "n_ctx": 512,
            "speculative": False,
            "is_processing": True,
            "id_task": 0,
            "n_prompt_tokens": 12,
            "n_prompt_tokens_processed": 12,
            "next_token": {"has_next_token": True, "n_remain": 7, "n_decoded": 2},
        }
        assert slots[1]["is_processing"] is False
        assert "secret" not in json.dumps(slots)
        assert (await reply)[0] == 200
        await here.until(lambda: not here.model.engine.slots())


async def test_no_free_slot() -> None:
    gate = threading.Event()
    async with running(parallel=1, model={"hook": lambda step: gate.wait() and None}) as here:
        reply = asyncio.create_task(here.post("/v1/completions", {"prompt": "a", "max_tokens": 1}))
        await here.until(lambda: len(here.model.engine.slots()) == 1)
        try:
            status, body, headers = await here.get("/slots?fail_on_no_slot=1")
            assert (status, body["error"]["code"], headers["Retry-After"]) == (503, "no_slot", "1")
            assert (await here.get("/slots"))[0] == 200
        finally:
            gate.set()
        assert (await reply)[0] == 200


async def test_a_key_is_needed() -> None:
    async with running(api_key=("k",)) as here:
        assert (await here.get("/slots"))[0] == 401
        assert (await here.get("/slots", headers={"x-api-key": "k"}))[0] == 200
    async with running(loaded=False) as here:
        assert (await here.get("/slots"))[0] == 503
