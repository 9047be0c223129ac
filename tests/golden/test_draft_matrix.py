"""Drafted replies are those of plain decoding, token for token: greedy and sampled beside each other, chains and trees,
on every placement, 1, 4, 16, 32 and 64 sequences at once, which end one after another, in steps of up to 64 rows.

From packed weights: test_draft_identity_untrained.py has NumPy's device.
"""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache
from typing import Any

import pytest

import luce
from luce.backend.layersplit import LayerSplitBackend
from luce.runtime.step import Output, Step
from tests.support.draft_identity import FIT, PACKED, PAIRS, PLACES, prompts, some

BATCHES = (1, 4, 16, 32, 64)
#: of a reply each in turn
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.0},
    {"temperature": 0.9, "repetition_penalty": 1.2, "min_p": 0.05},
]
DRAFTS = ("fitted draft", "fitted draft's trees", "DFlash2 draft", "DFlash2 draft's trees")


def replies(model: luce.Model) -> dict[int, list[list[int]]]:
    """Of each batch, all of whose sequences begin at once; a batch of one runs with each of the parameters."""
    found: dict[int, list[list[int]]] = {}
    for batch in BATCHES:
        given = prompts(model, 64)[: max(batch, len(SAMPLED))]
        every: list[list[int]] = []
        for begin in range(0, len(given), batch):
            running = [
                model.generate(
                    prompt[-24:], max_tokens=6 + seed % 9, ignore_eos=True, seed=seed, **SAMPLED[seed % len(SAMPLED)]
                )
                for seed, prompt in enumerate(given[begin : begin + batch], begin)
            ]
            every += [[token.id for token in generation] for generation in running]
        found[batch] = every
    return found


@cache
def plain() -> dict[int, list[list[int]]]:
    with luce.load(FIT.target.path, target_devices="cpu:0", parallel=64, **PACKED) as model:
        return replies(model)


@pytest.mark.parametrize(("name", "place"), some(itertools.product(DRAFTS, PLACES)))
def test_replies_are_those_of_plain_decoding(name: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, expected, steps = PAIRS[name], plain(), Counter[int]()
    forward = LayerSplitBackend.forward

    def noted(backend: LayerSplitBackend, step: Step, *arguments: Any) -> Output:
        if any(span.speculative for span in step.spans):
            steps[sum(span.rows for span in step.spans if span.speculative or span.rows == 1)] += 1
        return forward(backend, step, *arguments)

    monkeypatch.setattr(LayerSplitBackend, "forward", noted)
    with luce.load(pair.target, draft=pair.draft, ddtree=pair.tree, parallel=64, **PACKED, **PLACES[place]) as model:
        # As `luce serve` does: with its measured times and captured steps.
        model.warm_up()
        found, stats = replies(model), model.engine.stats().draft
    for batch in BATCHES:
        assert found[batch] == expected[batch], f"{batch} sequences at once"
        assert model.backend.capacity.invariant_rows == 64
    assert 20 < max(steps) <= 64 and sum(steps[rows] for rows in steps if rows > 16) > 20
    # Sequences that are left over are drafted for, whatever the batch.
    assert stats is not None and stats.on and stats.proposed > 200
