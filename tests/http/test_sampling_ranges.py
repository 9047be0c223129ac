"""Sampling values at the ends of their ranges, over HTTP: each gives a reply, or a 400 that names the field."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from luce.config.sampling import SAMPLERS
from tests.support.http_server import running

CHAT = "/v1/chat/completions"
#: ends of ranges, numbers just outside, and the smallest and largest that JSON readers take
VALUES: dict[str, list[Any]] = {
    key: [0, 1e-38, 5e-324, -5e-324, 1e308, 2**63, -(2**63) - 1, row.low, row.high]
    if row.kind is float
    else [-1, 0, 1, 2**31 - 1, 2**31, 2**63, int(row.low), int(row.high)]
    for name, row in SAMPLERS.items()
    for key in (name, *row.aliases)
}
VALUES["logit_bias"] = [{"72": bias, "105": -bias} for bias in (-100, -99.9, 1e-38, 99.9, 100, 100.1)]
VALUES["stop_token_ids"] = [list(range(261)), [0], [261], [-1]]


def finite(reply: dict[str, Any]) -> bool:
    """Whether all log probabilities of a reply are numbers."""
    content = reply["choices"][0]["logprobs"]["content"]
    return all(math.isfinite(x["logprob"]) for entry in content for x in (entry, *entry["top_logprobs"]))


@pytest.mark.parametrize("seed", range(4))
async def test_a_reply_or_a_400_that_names_the_field(seed: int) -> None:
    """`seed` 0: one field at a time; the others draw values of several fields together."""
    draw = random.Random(seed)
    if seed:
        sent = [{key: draw.choice(VALUES[key]) for key in draw.sample(sorted(VALUES), 4)} for _ in range(60)]
    else:
        sent = [{key: value} for key, values in VALUES.items() for value in values]
    async with running(model={"script": lambda history: None}) as here:
        served = 0
        for fields in sent:
            body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 1, "logprobs": True}
            body |= {"top_logprobs": 2, "max_tokens": 3, "ignore_eos": True, **fields}
            status, reply, _ = await here.post(CHAT, body)
            assert status in (200, 400), (fields, reply)
            if status == 200:
                served += 1
                assert finite(reply), fields
            else:
                assert reply["error"]["param"].partition("[")[0] in fields, (fields, reply)
        assert served and served < len(sent)


async def test_minus_one_turns_top_k_off_as_in_vllm_and_sglang() -> None:
    # The setting is 1: a reply to a request without a value is greedy.
    async with running(top_k=1, model={"script": lambda history: None}) as here:
        options = {"temperature": 2, "seed": 5, "max_tokens": 9, "ignore_eos": True, "return_token_ids": True}
        greedy, off, minus = [
            (await here.chat(**options, **fields))["choices"][0]["token_ids"]
            for fields in ({}, {"top_k": 0}, {"top_k": -1})
        ]
        assert minus == off != greedy
        body = {"prompt": "a", **options, "top_k": -1}
        status, reply, _ = await here.post("/v1/completions", body)
        assert status == 200, reply


async def test_seeds_of_further_replies_can_be_sent() -> None:
    async with running(model={"script": lambda history: None}) as here:
        options = {"temperature": 2, "max_tokens": 9, "ignore_eos": True, "return_token_ids": True}
        reply = await here.chat(seed=2**63 - 1, n=3, **options)
        for choice in reply["choices"]:
            again = await here.chat(seed=choice["finish_details"]["seed"], **options)
            assert again["choices"][0]["token_ids"] == choice["token_ids"]
