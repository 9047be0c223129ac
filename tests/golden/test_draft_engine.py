"""Drafters of every kind in the engine: replies are those of plain decoding, and drafting goes on where it should."""

from __future__ import annotations

import gc
import weakref
from functools import cache
from typing import Any

import pytest

import luce
from luce.api import Model
from luce.draft.dflash.drafter import DFlashDrafter
from luce.engine.speculate import DraftStats
from tests.support.daemons import within
from tests.support.drafts import DraftReference
from tests.support.guesses import loaded_drafter
from tests.support.reference import Reference

FIT = DraftReference("qwen35-a-draft-fit-F32")
MTP = Reference("qwen35-b-Q4_K_M")
#: target, --draft, and whether that is right now and then
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
    """Greedy and sampled replies to one prompt while another one is read, and to that. Which rows share a step is a
    matter of time, and changes nothing: kernels of more rows than decoding has round otherwise."""
    prompts = [reference.expected[f"prompt_{key}"].tolist() for key in ("17", "long")]
    found = []
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}):
        first = model.generate(prompts[0], max_tokens=48, ignore_eos=True, **sampling)
        begun = [next(first).id]
        second = model.generate(prompts[1], max_tokens=24, ignore_eos=True, **sampling)
        found += [begun + [token.id for token in first], [token.id for token in second]]
    return found


def drafted(model: Model) -> DraftStats:
    stats = model.engine.stats().draft
    assert stats is not None
    return stats


SETTINGS = {"max_ctx": 512, "parallel": 2, "chunk": 32}


@cache
def expected(reference: Reference) -> list[list[int]]:
    """What plain decoding gives."""
    with luce.load(reference.path, target_devices="cpu:0", **SETTINGS) as model:
        return replies(model, reference)


CASES = [(kind, "one") for kind in KINDS] + [(kind, place) for kind in ("fitted", "mtp") for place in list(PLACES)[1:]]


@pytest.mark.parametrize(("kind", "place"), CASES)
def test_replies_are_those_of_plain_decoding(kind: str, place: str) -> None:
    reference, draft, right = KINDS[kind]
    with luce.load(reference.path, draft=draft, verify_width=6, **SETTINGS, **PLACES[place]) as model:
        assert replies(model, reference) == expected(reference)
        assert model.engine.wait_idle(30)
        stats = drafted(model)
    assert stats.state == "on" and stats.proposed > 60
    assert stats.facts["kind"] in ("dflash", "mtp", "model")
    if right:
        assert stats.accepted > 10
    if place == "elsewhere":
        assert stats.facts["device"] == "cpu:7"


@pytest.mark.parametrize("kind", ["fitted", "mtp", "model"])
def test_what_is_released_is_free_at_once(kind: str) -> None:
    """By its references, not when cycles of them are looked for, which an idle process has no reason to."""
    reference, draft, _ = KINDS[kind]
    settings = {"target_devices": "cpu:0", "draft_residency": "request-scoped", "verify_width": 6}
    gc.disable()
    try:
        with luce.load(reference.path, draft=draft, **SETTINGS, **settings) as model:
            prompt = reference.expected["prompt_17"].tolist()
            running = model.generate(prompt, max_tokens=24, temperature=0, ignore_eos=True)
            for _ in range(9):
                next(running)
            made = loaded_drafter(model)
            held = [weakref.ref(made), weakref.ref(made.shard if kind == "model" else made.context)]
            del made
            assert all(part() is not None for part in held)
            list(running)
            assert within(60, lambda: not any(part() is not None for part in held))
    finally:
        gc.enable()


def test_a_restored_prefix_goes_on_with_an_empty_context() -> None:
    prompt = FIT.expected["prompt_long"].tolist()
    settings = {"target_devices": "cpu:0", "max_ctx": 512, "draft": str(FIT.path), "verify_width": 8}
    with luce.load(FIT.target.path, **settings) as model:
        first = [t.id for t in model.generate(prompt, max_tokens=24, temperature=0, ignore_eos=True)]
        before = drafted(model)
        again = model.generate(prompt, max_tokens=24, temperature=0, ignore_eos=True)
        assert [t.id for t in again] == first
        assert again.finish is not None and again.finish.timings.cached_tokens > 100
        after = drafted(model)
    assert after.state == "on" and after.accepted > before.accepted


def test_serving_goes_on_without_a_broken_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: DFlashDrafter, asked: object) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(DFlashDrafter, "propose", broken)
    with luce.load(FIT.target.path, target_devices="cpu:0", max_ctx=512, draft=str(FIT.path)) as model:
        for _ in range(4):
            prompt = FIT.expected["prompt_17"].tolist()
            reply = [t.id for t in model.generate(prompt, max_tokens=16, temperature=0, ignore_eos=True)]
            assert reply == FIT.target.expected["greedy_17"][:16].tolist()
        stats = drafted(model)
    assert "no more" in stats.state and stats.state.startswith("given up")
