"""Every reference file through the whole stack below HTTP: load, engine, pages that leave the window, sampling."""

from __future__ import annotations

import numpy as np
import pytest

import luce
from tests.support.covering import each_kind
from tests.support.reference import Reference, errors, references

each_file = pytest.mark.parametrize("reference", references(), ids=lambda r: r.name)


@each_file
def test_greedy(reference: Reference) -> None:
    # Chunks of 16 rows: sliding windows of 32 give back their pages long before the prompt ends.
    with luce.load(reference.path, target_devices="cpu:0", max_ctx=512, parallel=2, chunk=16) as model:
        generations = {
            key: model.generate(
                reference.expected[f"prompt_{key}"].tolist(), max_tokens=32, temperature=0, ignore_eos=True
            )
            for key in ("long", "17")
        }
        for key, generation in generations.items():
            tokens = [token.id for token in generation]
            assert tokens == reference.expected[f"greedy_{key}"].tolist()
        assert model.engine.stats().pages_used == 0


@each_kind()
def test_logits(reference: Reference) -> None:
    with luce.load(reference.path, target_devices="cpu:0", max_ctx=512, chunk=50) as model:
        actual = model.logits(reference.expected["prompt_long"].tolist())[-16:]
    each = errors(actual, reference.expected["logits_long_last16"])
    assert np.median(each) <= reference.limits("f32")["nmse_median"]
