"""Every reference file through the engine with its prefix cache: a resumed sequence says what the whole one says."""

from __future__ import annotations

import pytest

import luce
from tests.support.covering import each_kind
from tests.support.generate import ask
from tests.support.reference import Reference


@each_kind()
def test_greedy(reference: Reference) -> None:
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    other = reference.expected["prompt_17"].tolist() * 12
    with luce.load(reference.path, target_devices="cpu:0", max_ctx=256, chunk=50) as model:
        assert ask(model, prompt, 32) == (expected, 0)
        # All of it, then up to the middle of the reply, each also after another prompt took the pages.
        for _ in range(2):
            assert ask(model, prompt, 32) == (expected, len(prompt))
            turn = [*prompt, *expected[:20]]
            assert ask(model, turn, 12)[0] == expected[20:]
            assert ask(model, other, 1)[1] in (0, len(other))
        assert model.engine.stats().pages_used == 0


@each_kind()
def test_turns(reference: Reference) -> None:
    # A reply of 40 tokens is read back in the next turn: computed row by row when it was said, now from the cache.
    first, more = reference.expected["prompt_17"].tolist(), reference.expected["prompt_long"].tolist()[:50]
    with luce.load(reference.path, target_devices="cpu:0", max_ctx=256, cache_ram=0) as model:
        whole = ask(model, first, 40)[0]
        second = [*first, *whole, *more]
        continued = ask(model, second, 20)
    with luce.load(reference.path, target_devices="cpu:0", max_ctx=256) as model:
        assert ask(model, first, 40) == (whole, 0)
        assert ask(model, second, 20) == (continued[0], len(first) + 39)


@pytest.mark.parametrize("types", [("f16", "f16"), ("bf16", "bf16"), ("q8_0", "q4_0")], ids="-".join)
@pytest.mark.parametrize(
    "name", ["qwen3-a-F32", "qwen35-a-F32", "qwen35moe-a-F32", "laguna-a-F32", "gemma4-e-F32", "gemma4-moe-F32"]
)
def test_stored_types(name: str, types: tuple[str, str]) -> None:
    reference = Reference(name)
    prompt = reference.expected["prompt_long"].tolist()
    other = reference.expected["prompt_17"].tolist() * 12
    kinds = dict(zip(("cache_type_k", "cache_type_v"), types, strict=True))
    with luce.load(reference.path, target_devices="cpu:0", max_ctx=256, **kinds) as model:
        expected = ask(model, prompt, 32)
        for _ in range(2):
            assert ask(model, prompt, 32) == (expected[0], len(prompt))
            ask(model, other, 1)
