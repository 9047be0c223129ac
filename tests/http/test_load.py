"""Many clients at once, large prompts, and a fuzzer."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import aiohttp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from luce.server.schema import ChatRequest, CompletionRequest
from tests.support.http_server import running
from tests.support.scripted_model import REPLY

CHAT = "/v1/chat/completions"


async def test_two_hundred_clients_on_four_slots() -> None:
    async with running(parallel=4, max_queue=8, model={"delay": 0.002}) as here:

        async def one(number: int) -> int:
            body = {"messages": [{"role": "user", "content": f"{number}"}], "temperature": 0, "stream": number % 2 == 0}
            async with here.client.post(here.url + CHAT, json=body) as response:
                text = await response.text()
                if response.status == 503:
                    assert json.loads(text)["error"]["code"] == "overloaded"
                    assert 1 <= int(response.headers["Retry-After"]) <= 60
                elif number % 2 == 0:
                    events = [json.loads(e[6:]) for e in text.split("\n\n") if e.startswith("data: {")]
                    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == REPLY
                else:
                    assert json.loads(text)["choices"][0]["message"]["content"] == REPLY
                return response.status

        statuses = Counter(await asyncio.gather(*(one(i) for i in range(200))))
        assert set(statuses) <= {200, 503} and statuses[200] >= 12 and statuses.total() == 200
        await here.quiet()
        for status, count in statuses.items():
            _, text, _ = await here.get("/metrics")
            assert f'luce_requests_total{{endpoint="{CHAT}",status="{status}"}} {count}.0' in text
        stats = here.model.engine.stats()
        assert stats.predicted_tokens == statuses[200] * (len(REPLY.encode()) + 1) and stats.cancelled == 0


async def test_a_prompt_of_a_mebibyte_is_read_off_the_loop() -> None:
    # Rendering and tokenising on the loop raise in OffLoopTokenizer and OffLoopChat; so does any blocking call.
    async with running(model={"context": 512}) as here:
        text = "wörd " * ((1 << 20) // 6)
        body = {"messages": [{"role": "user", "content": text}]}
        status, reply, _ = await here.post(CHAT, json.dumps(body).encode())
        assert status == 400 and reply["error"]["code"] == "context_length_exceeded"
        status, reply, _ = await here.post("/v1/completions", json.dumps({"prompt": text}).encode())
        assert status == 400 and reply["error"]["code"] == "context_length_exceeded"
        assert (await here.chat())["choices"][0]["message"]["content"] == REPLY


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted(
    {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__} - {"messages", "prompt", "max_tokens"}
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "x"])},
    optional={"content": JSON, "tool_calls": JSON, "name": JSON, "reasoning": JSON},
)


def test_no_body_gives_a_500() -> None:
    bodies: list[tuple[str, bytes]] = []

    @settings(max_examples=250, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
    @given(
        st.sampled_from([CHAT, "/v1/completions"]),
        st.lists(MESSAGE, max_size=3) | JSON,
        st.text(max_size=5) | JSON,
        st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
    )
    def collect(path: str, messages: Any, prompt: Any, fields: dict[str, Any]) -> None:
        body = {"messages": messages, "prompt": prompt, "max_tokens": 1, **fields}
        bodies.append((path, json.dumps(body).encode("utf-8")))

    collect()

    json_type = {"Content-Type": "application/json"}

    async def send() -> Counter[int]:
        async with running(model={"context": 128}) as here:
            seen: Counter[int] = Counter()
            for path, raw in bodies:
                async with here.client.post(here.url + path, data=raw, headers=json_type) as response:
                    text = await response.text()
                    seen[response.status] += 1
                    assert response.status in (200, 400), (raw, text)
            return seen

    seen = asyncio.run(send())
    assert seen[200] and seen[400]


async def test_pipelined_and_reused_connections() -> None:
    async with running() as here, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as client:
        for path in ("/livez", "/nothing", "/livez"):
            async with client.get(here.url + path) as response:
                assert response.headers.get("Connection") != "close"
                await response.read()
