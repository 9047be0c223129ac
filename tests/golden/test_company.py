"""Prompts that are read beside others: the same bits as alone, on the CPU and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

import luce
from luce.api import Generation
from tests.support.reference import Reference

#: rows of prompts, of which kernels for single rows take some, others libraries, and some are read in several pieces
LENGTHS = (300, 5, 40, 160, 16, 90, 17, 200)
CHUNK = 192
NAMES = ["qwen35-b-Q4_K_M", "qwen35moe-b-Q4_K_M", "qwen3-b-Q4_K_M", "gemma4-eb-Q4_K_M", "laguna-b-Q4_K_M"]
NAMES += ["qwen35-a-Q8_0", "qwen3-a-MIX", "gemma4-moe-F32"]


def begin(model: luce.Model, prompt: list[int]) -> Generation:
    return model.generate(prompt, max_tokens=6, temperature=0, ignore_eos=True, logprobs=0)


def end(generation: Generation) -> list[tuple[int, float | None]]:
    return [(token.id, token.logprob) for token in generation]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device", ["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_replies_are_those_of_prompts_alone(name: str, device: str, request: pytest.FixtureRequest) -> None:
    place = str(request.getfixturevalue("gpu").name) if device == "gpu" else "cpu:0"
    settings = {"target_devices": place, "max_ctx": 320, "chunk": CHUNK, "cache_ram": 0}
    reference = Reference(name)
    random = np.random.default_rng(5)
    prompts = [random.integers(0, reference.spec.vocab, count).tolist() for count in LENGTHS]
    with luce.load(reference.path, parallel=len(LENGTHS), **settings) as model:
        alone = [end(begin(model, prompt)) for prompt in prompts]
        # Those that come after the first one, which is read in two steps, are read together.
        together = [end(generation) for generation in [begin(model, prompt) for prompt in prompts]]
    assert together == alone
