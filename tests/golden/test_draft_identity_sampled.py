"""Sampled replies with drafters, several sequences in a step: token for token those of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest

import luce
from luce.engine.engine_options import EngineStats
from tests.support.draft_identity import PACKED, PAIRS, PLACES, TINY, prompts

#: of a reply each in turn
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"temperature": 0.5, "logit_bias": {200: 3.0, 201: -100.0}},
]


def sampled(**settings: Any) -> tuple[list[list[int]], EngineStats]:
    """Replies of the trained target by parameters and seeds of their own, and the engine's numbers."""
    with luce.load(TINY / "target.gguf", **PACKED, **settings) as model:
        running = [
            model.generate(prompt, max_tokens=32, ignore_eos=True, seed=seed, **SAMPLED[seed % len(SAMPLED)])
            for seed, prompt in enumerate(prompts(model, 10))
        ]
        return [[token.id for token in generation] for generation in running], model.engine.stats()


@pytest.fixture(scope="module")
def sampled_plainly() -> list[list[int]]:
    return sampled(target_devices="cpu:0", parallel=1)[0]


@pytest.mark.parametrize("place", PLACES)
def test_sampled_replies_are_those_of_plain_decoding(sampled_plainly: list[list[int]], place: str) -> None:
    found, stats = sampled(parallel=4, draft=PAIRS["trained model"].draft, **PLACES[place])
    assert found == sampled_plainly
    assert stats.draft is not None and 0 < stats.draft.accepted < stats.draft.proposed
