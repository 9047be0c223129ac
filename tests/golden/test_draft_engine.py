"""Drafters of every kind in the engine: replies are those of plain decoding, and drafting continues after failures."""

from __future__ import annotations

import gc
import weakref

import pytest

import luce
from luce.draft.dflash.drafter import DFlashDrafter
from tests.support.daemons import within
from tests.support.draft_replies import FIT, KINDS, PLACES, SETTINGS, drafted, expected, replies
from tests.support.proposals import loaded_drafter

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
    assert "no more" in stats.state and stats.state.startswith("disabled")
