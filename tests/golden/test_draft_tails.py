"""Drafting behind a restored prefix: proposals equal those of an uninterrupted text if its feature tail was saved."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import luce
from luce.api import Model
from luce.draft.feature_tail import FeatureTail, FeatureTails
from luce.layers.features import FeatureRing
from luce.runtime.host import HostDevice
from luce.runtime.step import Span
from tests.support.drafts import DraftReference
from tests.support.proposals import recorded
from tests.support.reference import Reference
from tests.support.warm import WARM

FIT = DraftReference("qwen35-a-draft-fit-F32")
#: target, --draft
KINDS = {
    "dflash": (FIT.target, str(FIT.path)),
    "mtp": (Reference("qwen35-b-Q4_K_M"), "mtp"),
}
#: tokens of the reply before it is interrupted, and of all of it
BEFORE, ALL = 10, 40
Proposals = list[tuple[int, list[int]]]


def load(kind: str, **settings: Any) -> Model:
    reference, draft = KINDS[kind]
    fields = {"target_devices": "cpu:0", "max_ctx": 512, "verify_width": 8, "kv_cache_dir": "off", **settings}
    return luce.load(reference.path, draft=draft, **fields)


def prompt_of(kind: str) -> list[int]:
    prompt: list[int] = KINDS[kind][0].expected["prompt_long"].tolist()
    return prompt


def ask(model: Model, prompt: list[int], count: int) -> tuple[list[int], Proposals, int, str]:
    """The reply, the proposals, the tokens from the cache, and the tier that held them."""
    with recorded(model) as found:
        generation = model.generate(prompt, max_tokens=count, temperature=0, ignore_eos=True)
        reply = [token.id for token in generation]
    assert generation.finish is not None
    timings = generation.finish.timings
    return reply, found, timings.cached_tokens, timings.cache_tier


#: settings for trees of the most rows. In float32 on some CPUs (AVX-512), the library rounds by the number of rows, and
#: near ties of a tree's probabilities fall otherwise
TREES: dict[str, Any] = {"ddtree": True, "verify_width": 16, "cpu_weights": "packed"}


@cache
def whole(kind: str, *, tree: bool = False) -> tuple[list[int], dict[int, list[int]]]:
    """The reply, and the proposals by length of the text, without a cache."""
    with load(kind, cache_ram=0, **(TREES if tree else {})) as model:
        reply, found, _, _ = ask(model, prompt_of(kind), ALL)
    return reply, dict(found)


def goes_on(kind: str, model: Model, tier: str, *, tail: bool = True, tree: bool = False) -> None:
    """The rest of the reply is drafted as in `whole`, from its first token on."""
    prompt, (reply, proposals) = prompt_of(kind), whole(kind, tree=tree)
    rest, found, cached, where = ask(model, prompt + reply[:BEFORE], ALL - BEFORE)
    assert (rest, where) == (reply[BEFORE:], tier) and cached == len(prompt) + BEFORE - 1
    common = [(tokens, proposals[at]) for at, tokens in found if at in proposals]
    assert len(common) > 3
    assert all(tokens == expected for tokens, expected in common) == tail
    assert found[0][1]


@pytest.mark.parametrize("draft", [{}, {"draft_ipc_bin": str(WARM)}], ids=["here", "daemon"])
@pytest.mark.parametrize("kind", KINDS)
def test_from_memory(kind: str, draft: dict[str, str]) -> None:
    with load(kind, **draft) as model:
        assert ask(model, prompt_of(kind), BEFORE)[0] == whole(kind)[0][:BEFORE]
        goes_on(kind, model, "ram")


@pytest.mark.parametrize("draft", [{}, {"draft_ipc_bin": str(WARM)}], ids=["here", "daemon"])
def test_behind_trees(draft: dict[str, str], tmp_path: Path) -> None:
    """Rows of accepted branches lie where the rows of a text lie, in a saved tail too."""
    settings = {"kv_cache_dir": str(tmp_path), "kv_cache_min_tokens": 1, **TREES, **draft}
    with load("dflash", **settings) as model:
        assert ask(model, prompt_of("dflash"), BEFORE)[0] == whole("dflash", tree=True)[0][:BEFORE]
    with load("dflash", **settings) as model:
        goes_on("dflash", model, "disk", tree=True)


@pytest.mark.parametrize("residency", ["persistent", "request-scoped"])
def test_a_prompt_that_was_kept_whole(residency: str) -> None:
    prompt, (reply, proposals) = prompt_of("dflash"), whole("dflash")
    with load("dflash", draft_residency=residency) as model:
        ask(model, prompt, 1)
        again, found, cached, _ = ask(model, prompt, ALL)
    assert (again, cached) == (reply, len(prompt))
    assert all(tokens == proposals[at] for at, tokens in found if at in proposals) and found[0][0] == len(prompt) + 1


def saved(directory: Path, kind: str = "dflash", **settings: Any) -> None:
    """An earlier run leaves its snapshots."""
    with load(kind, kv_cache_dir=str(directory), kv_cache_min_tokens=1, **settings) as model:
        ask(model, prompt_of(kind), BEFORE)


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_restart_and_in_another_placement(kind: str, tmp_path: Path) -> None:
    saved(tmp_path, kind, target_devices="cpu:0,cpu:1")
    assert list(tmp_path.rglob("state-features.part"))
    for devices in ("cpu:0", "cpu:0,cpu:1,cpu:2"):
        with load(kind, kv_cache_dir=str(tmp_path), target_devices=devices, draft_device="cpu:5") as model:
            goes_on(kind, model, "disk")


@pytest.mark.parametrize(("devices", "shares"), [("cpu:0,cpu:1,cpu:2", "0.08,0.46,0.46"), ("cpu:0,cpu:1", "1,1")])
def test_after_a_cold_restart_of_daemons(devices: str, shares: str, tmp_path: Path) -> None:
    split = {"target_devices": devices, "target_layer_split": shares, "target_shard_ipc_bin": str(WARM)}
    saved(tmp_path, **split)
    with load("dflash", kv_cache_dir=str(tmp_path), **split) as model:
        goes_on("dflash", model, "disk")
        stats = model.engine.stats().draft
    assert stats is not None and stats.accepted > 0


def test_without_a_tail_the_context_grows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "luce.engine")
    saved(tmp_path, draft_feature_tail=0)
    assert not list(tmp_path.rglob("state-features.part"))
    with load("dflash", kv_cache_dir=str(tmp_path)) as model:
        goes_on("dflash", model, "disk", tail=False)
    assert "drafting begins anew" in caplog.text
    with load("dflash", draft_feature_tail=0) as model:
        ask(model, prompt_of("dflash"), BEFORE)
        goes_on("dflash", model, "ram", tail=False)


def test_a_damaged_tail_costs_proposals_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path)
    for path in tmp_path.rglob("state-features.part"):
        data = bytearray(path.read_bytes())
        data[40] ^= 1
        path.write_bytes(data)
    with load("dflash", kv_cache_dir=str(tmp_path)) as model:
        goes_on("dflash", model, "disk", tail=False)
    assert "drafting begins with an empty context" in caplog.text


def test_a_tail_that_is_cut_off_costs_the_snapshot(tmp_path: Path) -> None:
    saved(tmp_path)
    for path in tmp_path.rglob("state-features.part"):
        path.write_bytes(path.read_bytes()[:-5])
    reply, _ = whole("dflash")
    with load("dflash", kv_cache_dir=str(tmp_path)) as model:
        rest, _, cached, tier = ask(model, prompt_of("dflash") + reply[:BEFORE], ALL - BEFORE)
    assert (rest, cached, tier) == (reply[BEFORE:], 0, "none")


def test_the_draft_of_another_run_reads_other_layers(tmp_path: Path) -> None:
    saved(tmp_path)
    reply, _ = whole("dflash")
    other = str(DraftReference("qwen35-a-draft-F32").path)
    fields = {"target_devices": "cpu:0", "max_ctx": 512, "verify_width": 8, "kv_cache_dir": str(tmp_path)}
    with luce.load(FIT.target.path, draft=other, **fields) as model:
        rest, found, _, tier = ask(model, prompt_of("dflash") + reply[:BEFORE], ALL - BEFORE)
    assert (rest, tier) == (reply[BEFORE:], "disk") and found[-1][1]


def ring_of(capacity: int) -> FeatureRing:
    return FeatureRing(HostDevice(), (1, 3), 4, slots=2, capacity=capacity)


def rows(begin: int, count: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    return np.repeat(np.arange(begin, begin + count, dtype=np.uint16)[:, None], 8, axis=1)


@pytest.mark.parametrize("capacity", [5, 64])
@pytest.mark.parametrize("most", [1, 4, 9])
def test_tails_of_rings(capacity: int, most: int) -> None:
    ring = ring_of(capacity)
    tails = FeatureTails(ring, most)
    for begin, count in ((0, 7), (7, 3), (9, 4)):
        ring.write(1, begin, rows(begin, count))
        tails.observe([Span(1, 0, count, begin)])
    for end in (11, 13):
        tail = tails.save(1, end)
        first = max(13 - capacity, end - most, 0)
        assert tail is not None and tail.layers == (1, 3) and (tail.rows == rows(first, end - first)).all()
    assert tails.save(1, 14) is None and tails.save(0, 1) is None
    assert [len(part.rows) for part in tail.windows()] == [len(tail.rows)]
    other = ring_of(3)
    put = FeatureTails(other, 64)
    span = put.restore(0, 13, tail)
    count = min(3, len(tail.rows))
    assert span == Span(0, 0, count, 13 - count)
    again = put.save(0, 13)
    assert again is not None and (again.rows == rows(13 - count, count)).all()
    put.forget(0)
    assert put.save(0, 13) is None


@pytest.mark.parametrize(
    "tail",
    [
        FeatureTail.of((1, 2), rows(0, 3)),
        FeatureTail.of((1, 3), rows(0, 9)),
        FeatureTail.of((1, 3), rows(0, 0)),
        FeatureTail.of((1, 3), rows(0, 3)[:, :6]),
        FeatureTail.of((1, 3), rows(0, 3).astype(np.float32)),  # type: ignore[arg-type]
    ],
)
def test_tails_that_do_not_fit(tail: FeatureTail) -> None:
    ring = ring_of(16)
    assert FeatureTails(ring, 16).restore(0, 8, tail) is None
    assert not ring.rows.any()
