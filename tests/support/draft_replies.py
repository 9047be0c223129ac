"""Drafters of every kind and place, and the replies that they must not change."""

from __future__ import annotations

from functools import cache
from typing import Any

import luce
from luce.api import Model
from luce.engine.speculate import DraftStats
from tests.support.drafts import DraftReference
from tests.support.reference import Reference

FIT = DraftReference("qwen35-a-draft-fit-F32")
MTP = Reference("qwen35-b-Q4_K_M")
#: target, --draft, and whether its proposals are sometimes right
KINDS: dict[str, tuple[Reference, str, bool]] = {
    "fitted": (FIT.target, str(FIT.path), True),
    "random": (FIT.target, str(DraftReference("qwen35-a-draft-Q8_0").path), False),
    "laguna-like": (FIT.target, str(DraftReference("qwen35-a-draft-var-F32").path), False),
    "checkpoint": (FIT.target, str(DraftReference("qwen35-a-draft-hf").path), False),
    "bfloat16": (MTP, str(DraftReference("qwen35-b-draft-BF16").path), False),
    "mtp": (MTP, "mtp", False),
    "model": (FIT.target, str(Reference("qwen35-a-Q8_0").path), True),
}
PLACES: dict[str, dict[str, Any]] = {
    "one": {"target_devices": "cpu:0"},
    "three": {"target_devices": "cpu:0,cpu:1,cpu:2"},
    "elsewhere": {"target_devices": "cpu:0,cpu:1", "draft_device": "cpu:7"},
    "request-scoped": {"target_devices": "cpu:0", "draft_residency": "request-scoped"},
    "short context": {"target_devices": "cpu:0", "draft_ctx_max": 64},
}


def replies(model: Model, reference: Reference) -> list[list[int]]:
    """Greedy and sampled replies to two prompts at once, and to the first one again."""
    prompts = [reference.expected[f"prompt_{key}"].tolist() for key in ("17", "long")]
    found = []
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}):
        running = [model.generate(ids, max_tokens=24, ignore_eos=True, **sampling) for ids in prompts]
        found += [[token.id for token in generation] for generation in running]
        found.append([token.id for token in model.generate(prompts[0], max_tokens=9, ignore_eos=True, **sampling)])
    return found


def beside(model: Model, reference: Reference) -> list[list[int]]:
    """Greedy and sampled replies to one prompt while another prompt is read, and to that one.

    The rows that share a step depend on timing, and the replies do not: kernels for more rows than decoding has round
    differently.
    """
    prompts = [reference.expected[f"prompt_{key}"].tolist() for key in ("17", "long")]
    found = []
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}):
        first = model.generate(prompts[0], max_tokens=48, ignore_eos=True, **sampling)
        begun = [next(first).id]
        second = model.generate(prompts[1], max_tokens=24, ignore_eos=True, **sampling)
        found += [begun + [token.id for token in first], [token.id for token in second]]
    return found


def drafted(model: Model) -> DraftStats:
    """The statistics of drafting."""
    stats = model.engine.stats().draft
    assert stats is not None
    return stats


SETTINGS = {"max_ctx": 512, "parallel": 2, "chunk": 32}


@cache
def expected(reference: Reference) -> list[list[int]]:
    """The replies of plain decoding."""
    with luce.load(reference.path, target_devices="cpu:0", **SETTINGS) as model:
        return replies(model, reference)
