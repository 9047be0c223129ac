"""Sequences that are longer than their pool, on real layers: against all of their keys with those hidden that had left,
against the same without a pool, and the same on every placement."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import luce
from luce import assembly
from luce.backend.kvflash_size import KVFlashRequest
from luce.backend.layersplit import LayerSplitBackend
from luce.backend.serving_options import ServingOptions
from luce.draft.drafter import Drafter
from luce.draft.open import PreparedDrafter
from luce.engine.engine_options import EngineStats
from luce.gguf.reader import open_gguf
from luce.kvcache.paging import KVFlash, PagingStats
from luce.runtime.host import HostDevice
from luce.runtime.step import PAGE, Output, PageView, Step
from luce.shard.local import LocalShard
from tests.support.changed import changed
from tests.support.drafters import BranchingDrafter, ScriptedDrafter
from tests.support.paging import Asked, Hashed
from tests.support.reference import Reference
from tests.support.replies import make_engine
from tests.support.warm import WARM

CONTEXT, CHUNK, SLOTS = 2048, 128, 2
#: one file of each kind of layers
FAMILIES = ["qwen3-a-F32", "qwen35-a-F32", "gemma4-e-F32", "laguna-a-F32"]
#: and of each kind of attention: soft caps, sinks, latents, convolutions, layers without rotation, AltUp, temperature
ATTENTION = [
    *["gemma2-a-F32", "gptoss-a-F32", "deepseek2-a-F32", "lfm2-a-F32", "cohere2-a-F32", "gemma3n-a-F32"],
    "mistral3-a-F32",
]


class Watched:
    """A backend, and what it was asked and said."""

    def __init__(self, backend: LayerSplitBackend) -> None:
        self._backend = backend
        self.ran: list[tuple[Step, Output]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(self, step: Step, queued: Callable[[], None]) -> Output:
        output = self._backend.forward(step, queued)
        self.ran.append((step, output))
        return output


def whole(step: Step, backend: LayerSplitBackend) -> Step:
    """The step over pools that hold all of every sequence: page i of slot s is page s * n + i."""
    views = []
    for view, window, total in zip(step.views, backend.capacity.windows, backend.capacity.pages, strict=True):
        if window is None:
            each = total // backend.capacity.slots
            slots = np.array([span.slot for span in step.spans], np.int32)
            rows = np.repeat(slots, [span.rows for span in step.spans])
            table = slots[:, None] * each + view.first // PAGE
            view = PageView(table, view.first, view.count, rows * each * PAGE + step.positions)
        views.append(view)
    return replace(step, views=tuple(views))


def prompt(reference: Reference, length: int, at: int = 0) -> list[int]:
    """Other tokens for each `at`."""
    ids = reference.expected["prompt_long"]
    return np.resize(np.roll(ids, 7 * at), length).tolist()  # type: ignore[no-any-return]


def replies(backend: Any, prompts: Sequence[Sequence[int]], drafter: Drafter | None = None) -> list[list[int]]:
    """Of an engine in which several sequences run at a time."""
    how = KVFlash(Hashed(), 4, 16, 1 << 30)
    engine = make_engine(
        backend,
        chunk=CHUNK,
        drafter=drafter,
        verify_width=4 if drafter else 0,
        kvflash=how,
    )
    try:
        asked = [Asked(engine, ids, 60, logprobs=0) for ids in prompts]
        found = [sequence.reply() for sequence in asked]
        stats, draft = engine.stats().paging, engine.stats().draft
        assert stats is not None and stats.swapped_out > 10 and stats.swapped_in > 1
        assert draft is None or 10 < draft.accepted < draft.proposed
    finally:
        engine.close()
    return found


@pytest.mark.parametrize("name", FAMILIES + ATTENTION)
def test_swapped_out_pages_are_invisible_and_the_others_unchanged(name: str) -> None:
    reference = Reference(name)
    prompts = [prompt(reference, n, n) for n in (1000, 300, 600)]
    with ExitStack() as opened, open_gguf(reference.path) as file:
        sizes = {"slots": SLOTS, "context": CONTEXT, "chunk": CHUNK, "verify_rows": 8}
        bounded, full = (
            LayerSplitBackend(file, reference.spec, [HostDevice(0)], ServingOptions(kvflash=pool, **sizes))
            for pool in (KVFlashRequest(512), None)
        )
        opened.callback(bounded.close)
        opened.callback(full.close)
        assert bounded.capacity.max_resident_pages == 8
        expected = replies(bounded, prompts)
        texts = [[*ids, *reply] for ids, reply in zip(prompts, expected, strict=True)]

        def follow(tokens: Sequence[int], count: int) -> Sequence[int]:
            return next(text[len(tokens) :][:count] for text in texts if text[: len(tokens)] == list(tokens))

        drafter = ScriptedDrafter(follow, vocab=reference.spec.vocab, wrong=lambda position: position % 5 == 0)
        watched = Watched(bounded)
        assert replies(watched, prompts, drafter) == expected
        gaps = 0
        for step, output in watched.ran:
            for view, window in zip(step.views, full.capacity.windows, strict=True):
                if window is None:
                    assert view.count.max() <= 8
                    gaps += view.first[0, view.count[0] - 1] > PAGE * (view.count[0] - 1)
            shown = full.forward(whole(step, full))
            assert (shown.ids == output.ids).all()
            assert (shown.logits == output.logits).all()
        assert gaps > 20


def load(path: Path, **settings: Any) -> luce.Model:
    fields = {"target_devices": "cpu:0", "max_ctx": CONTEXT, "chunk": CHUNK, "kv_cache_dir": "off", **settings}
    return luce.load(path, **fields)


def ask(model: luce.Model, ids: Sequence[int], n: int) -> list[int]:
    return [t.id for t in model.generate(ids, max_tokens=n, temperature=0, ignore_eos=True)]


def residency(model: luce.Model) -> PagingStats:
    stats = model.engine.stats().paging
    assert stats is not None
    return stats


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every policy is Hashed, which recalls pages."""
    monkeypatch.setattr("luce.assembly.open_policy", lambda *args, **options: Hashed())


@pytest.mark.parametrize("name", FAMILIES + ATTENTION)
def test_a_pool_as_large_as_the_context_changes_no_bit(name: str) -> None:
    reference = Reference(name)
    ids = prompt(reference, 900)
    found = []
    for kvflash in ("off", "1024"):
        with load(reference.path, kvflash=kvflash, max_ctx=1024) as model:
            found.append((ask(model, ids, 60), model.logits(ids)))
            if kvflash != "off":
                assert (residency(model).max_resident_pages, residency(model).swapped_out) == (16, 0)
    assert found[0][0] == found[1][0]
    assert (found[0][1] == found[1][1]).all()


@pytest.mark.parametrize("name", ["qwen3-a-F32", "qwen35-a-F32"])
def test_a_reply_that_fits_is_exact_behind_a_prompt_that_does_not(name: str) -> None:
    """They begin alike, up to a piece of the long one in which the pool becomes too small for it."""
    reference = Reference(name)
    long = prompt(reference, 1500)
    # A recurrent model resumes at a checkpoint, every 128 tokens.
    settings = {"chunk": 512, "cache_interval": 128, "kvflash": "1280"}
    found = []
    for first in ([], long):
        with load(reference.path, **settings) as model:
            if first:
                ask(model, first, 1)
                assert residency(model).swapped_out > 0
            again = model.generate(
                [*long[:1200], *long[:10]], max_tokens=20, temperature=0, ignore_eos=True, logprobs=0
            )
            found.append([(token.id, token.logprob) for token in again])
            assert again.finish is not None and (again.finish.timings.cached_tokens > 1000) == bool(first)
    (plain, plain_logprobs), (cached, cached_logprobs) = (zip(*reply, strict=True) for reply in found)
    assert cached == plain
    np.testing.assert_allclose(cached_logprobs, plain_logprobs, atol=1e-4)


def drive(model: luce.Model, reference: Reference) -> tuple[list[list[int]], tuple[int, ...]]:
    """Replies to prompts of which some do not fit, one again from the cache and one behind it; pages that moved."""
    first = prompt(reference, 1100)
    replies = [ask(model, ids, 40) for ids in (first, prompt(reference, 300, 3), first)]
    assert replies[0] == replies[2]
    replies.append(ask(model, [*first, *replies[0], *first[:40]], 20))
    stats = residency(model)
    return replies, (stats.swapped_out, stats.swapped_in, stats.copied_pages, stats.rescores, stats.resident_hits)


SMOKES: dict[str, tuple[str, str, int, str, list[tuple[int, int]]]] = {
    # file, pool asked for, pool that comes of it, weights, layers of the shards
    "qwen35": ("qwen35-a-F32", "1024", 1024, "1,1", [(0, 3), (4, 7)]),
    "gemma4": ("gemma4-e-F32", "512", 512, "5,3", [(0, 3), (4, 7)]),
    "laguna": ("laguna-a-F32", "512", 768, "1,1", [(0, 3), (4, 6)]),
}


@pytest.mark.usefixtures("hashed")
@pytest.mark.parametrize("smoke", SMOKES)
def test_two_devices_and_daemons_page_alike(smoke: str, tmp_path: Path) -> None:
    name, asked, pool, weights, layers = SMOKES[smoke]
    reference = Reference(name)
    path = reference.path
    if smoke == "laguna":
        path = changed(path, tmp_path / "laguna.gguf", **{"attention.sliding_window": 512})
    settings = {"kvflash": asked, "kvflash_tau": 16}
    with load(path, **settings) as model:
        expected = drive(model, reference)
        assert residency(model).max_resident_pages * PAGE == pool
        assert expected[1][0] > 10
    two = {"target_devices": "cpu:0,cpu:1", "target_layer_split": weights, **settings}
    for more in ({}, {"target_shard_ipc_bin": str(WARM), "shard_start_timeout": 60}):
        with load(path, **two, **more) as model:
            assert [tuple(shard["layers"]) for shard in model.placement] == layers
            assert drive(model, reference) == expected


@pytest.mark.parametrize(("policy", "name"), [("qk", "qwen35-a-F32"), ("lru", "gemma4-e-F32")])
def test_trees_change_nothing(policy: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rows of a step at one position, of which pages are ranked by the one that counts."""
    reference = Reference(name)
    prompts = [prompt(reference, 700), prompt(reference, 480, 3)]
    settings = {"kvflash": "512", "kvflash_policy": policy, "kvflash_tau": 8, "parallel": 2, "cache_ram": 0}

    def replies(**more: Any) -> tuple[list[list[int]], EngineStats]:
        with load(reference.path, **settings, **more) as model:
            running = [model.generate(ids, max_tokens=140, temperature=0, ignore_eos=True) for ids in prompts]
            return [[t.id for t in generation] for generation in running], model.engine.stats()

    expected, stats = replies()
    assert stats.paging is not None and stats.paging.rescores > 10
    texts = [[*ids, *reply] for ids, reply in zip(prompts, expected, strict=True)]

    def follow(text: Sequence[int], count: int) -> Sequence[int]:
        return next(whole[len(text) :][:count] for whole in texts if whole[: len(text)] == list(text))

    drafter = BranchingDrafter(follow, vocab=reference.spec.vocab)
    prepared = PreparedDrafter(None, lambda first, last: drafter)
    monkeypatch.setattr(assembly, "open_drafter", lambda *_, **__: prepared)
    for devices in ("cpu:0", "cpu:0,cpu:1"):
        found, stats = replies(draft="any.gguf", ddtree=True, verify_width=16, target_devices=devices)
        assert found == expected
        assert stats.draft is not None and stats.draft.accepted > stats.draft.steps


@pytest.mark.usefixtures("hashed")
@pytest.mark.parametrize("name", ["qwen35-a-F32", "gemma4-e-F32", "qwen3-a-F32"])
def test_a_restart(name: str, tmp_path: Path) -> None:
    """Whatever placement saved it and restores it; another number of resident pages reads nothing of this one's."""
    reference = Reference(name)
    ids = prompt(reference, 1500)
    saved = tmp_path / "saved"
    settings = {"kvflash": "512", "kv_cache_min_tokens": 1, "kvflash_tau": 16}
    with load(reference.path, **settings, kv_cache_dir=str(saved)) as model:
        ask(model, ids, 70)

    def again(number: int, **more: Any) -> tuple[list[int], str, int]:
        directory = shutil.copytree(saved, tmp_path / str(number))
        with load(reference.path, **settings | more, kv_cache_dir=str(directory)) as model:
            generation = model.generate([*ids, *ids[:100]], max_tokens=30, temperature=0, ignore_eos=True)
            reply = [token.id for token in generation]
            assert generation.finish is not None
            timings = generation.finish.timings
            return reply, timings.cache_tier, timings.cached_tokens

    first = again(0)
    assert first[1] == "disk" and first[2] > 1000
    assert again(1, target_devices="cpu:0,cpu:1") == first
    if name == "gemma4-e-F32":
        assert again(2, target_devices="cpu:0,cpu:1", target_shard_ipc_bin=str(WARM)) == first
    assert again(3, kvflash="1024")[1:] == ("none", 0)


def held(model: luce.Model) -> int:
    """Bytes of keys, values and states."""
    arrays = {}
    for shard in model.backend.shards:
        assert isinstance(shard, LocalShard)
        for state in shard.state.layers.values():
            arrays.update({id(array): array for array in vars(state).values() if hasattr(array, "nbytes")})
    return sum(array.nbytes for array in arrays.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_memory_does_not_grow_with_the_context(name: str, tmp_path: Path) -> None:
    """Sixteen times as much context, and once a text of that length."""
    reference = Reference(name)
    path = changed(reference.path, tmp_path / "long.gguf", context_length=8192)
    pool, whole, planned = [], [], []
    for context in (512, 8192):
        with load(path, kvflash="off", max_ctx=context) as model:
            whole.append(held(model))
        with load(path, kvflash="512", max_ctx=context) as model:
            pool.append(held(model))
            planned.append(model.placement)
            if name == "qwen35-a-F32":
                assert len(ask(model, prompt(reference, context - 100), 90)) == 90
                assert held(model) == pool[-1]
                stats = residency(model)
                assert (stats.max_resident_pages, stats.swapped_out - stats.swapped_in) == (8, (context - 512) // PAGE)
    assert pool[0] == pool[1] and planned[0] == planned[1]
    assert whole[1] > 4 * whole[0] and whole[0] >= pool[0]


def test_the_size_that_auto_finds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "luce.backend.layersplit")
    with load(Reference("qwen35-a-F32").path, kvflash="auto:700") as model:
        assert residency(model).max_resident_pages * PAGE == 768
    assert "768 resident tokens of each sequence of up to 2048 (cpu:0: " in caplog.text
    assert "; at most 700)" in caplog.text
    caplog.clear()
    with load(Reference("qwen35-a-F32").path, kvflash="512", max_ctx=500) as model:
        assert model.engine.stats().paging is None
    assert "off: the context of 500 tokens is too short for 512 resident tokens, the minimum" in caplog.text
