"""Numbers told in texts eight times as long as the pool: the policies let the page that is asked for come back, and all
placements, with drafting and without, give the same replies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import luce
from luce.compress.compression_options import Verdict
from tests.support.warm import WARM
from tools.bench_retrieval import Case, cases, recalled

TINY = Path(__file__).parents[2] / "models" / "tiny"
POOL, CONTEXT = 512, 4096
SLOTS = 4
DEPTHS = np.linspace(0, 1, 20).tolist()
#: of these, the ones that are tried by default, and those that are tried in other ways, far from both ends
TRIED = (0, 3, 5, 10, 12, 15, 19)
SOME = (5, 12)


def opened(policy: str | None, **settings: Any) -> luce.Model:
    # Packed: half the time of float32 for these thousands of tokens.
    chosen: dict[str, Any] = {"target_devices": "cpu:0", "kv_cache_dir": "off", "cache_ram": "0", **settings}
    chosen["cpu_weights"] = "packed"
    path = TINY / "target.gguf"
    if policy is not None:
        chosen["kvflash_policy"] = policy
    return luce.load(path, max_ctx=CONTEXT + 64, parallel=SLOTS, kvflash=str(POOL), **chosen)


def some(model: luce.Model) -> Sequence[Case]:
    every = list(cases(model, CONTEXT, DEPTHS))
    return [every[number] for number in SOME]


Found = dict[int, tuple[bool, list[int]]]


def found_by_queries(numbers: Sequence[int]) -> Found:
    """What comes back with qk, on one device, by the number of the case."""
    with opened("qk") as model:
        every = list(cases(model, CONTEXT, DEPTHS))
        found = dict(zip(numbers, recalled(model, [every[number] for number in numbers]), strict=True))
        residency = model.engine.stats().paging
        assert residency is not None and residency.policy == "qk" and residency.max_resident_pages * 64 == POOL
        assert residency.rescores == len(numbers) and residency.swapped_in > 0 and residency.lost_pages == 0
        return found


@pytest.fixture(scope="module")
def by_queries() -> Found:
    return found_by_queries(TRIED)


@pytest.fixture(scope="module")
def by_queries_at_all_depths() -> Found:
    return found_by_queries(range(len(DEPTHS)))


def test_queries_swap_in_the_page_with_the_answer(by_queries: Found) -> None:
    assert all(right for right, _ in by_queries.values())


@pytest.mark.slow
def test_queries_swap_in_the_page_at_all_depths(by_queries_at_all_depths: Found) -> None:
    assert sum(right for right, _ in by_queries_at_all_depths.values()) >= 0.95 * len(DEPTHS)


SHARDS = {"target_devices": "cpu:0,cpu:1,cpu:2"}
DAEMON = {"target_devices": "cpu:0,cpu:1", "target_shard_ipc_bin": f"cpu={WARM}", "isolate_shards": True}
DFLASH = {"draft": str(TINY / "draft.gguf"), "verify_width": 16}
PLACES: dict[str, dict[str, Any]] = {
    "three shards": SHARDS,
    "three shards, drafting": {**SHARDS, **DFLASH},
    "daemon, drafting": {**DAEMON, **DFLASH},
    "trees": {**DFLASH, "ddtree": True},
    "another model drafting": {"draft": str(TINY / "drafter.gguf"), "verify_width": 9},
}


def check_replies(expected: Found, place: str, numbers: Sequence[int]) -> None:
    """The same as on one device; some tokens of the draft are accepted."""
    with opened("qk", **PLACES[place]) as model:
        every = list(cases(model, CONTEXT, DEPTHS))
        found = list(recalled(model, [every[number] for number in numbers]))
        draft = model.engine.stats().draft
    assert found == [expected[number] for number in numbers]
    if "draft" in PLACES[place]:
        assert draft is not None and draft.state == "on" and draft.accepted > 0


@pytest.mark.parametrize("place", PLACES)
def test_replies_are_the_same(by_queries: Found, place: str) -> None:
    check_replies(by_queries, place, SOME)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_replies_at_all_depths_are_the_same(by_queries_at_all_depths: Found, place: str) -> None:
    check_replies(by_queries_at_all_depths, place, range(len(DEPTHS)))


def test_a_drafter_swaps_in_the_page_with_the_answer() -> None:
    with opened("drafter", kvflash_drafter=str(TINY / "drafter.gguf")) as model:
        found = [right for right, _ in recalled(model, some(model))]
        residency = model.engine.stats().paging
    assert residency is not None and residency.policy == "drafter" and residency.rescores > 0
    assert all(found)


def test_scores_of_the_prompt_decide_which_pages_stay() -> None:
    """--prefill-compression residency: nothing is left out, and the small model's scores choose the pages."""
    settings = {"prefill_compression": "residency", "prefill_drafter": str(TINY / "drafter.gguf")}
    with opened(None, **settings) as model:
        found = [right for right, _ in recalled(model, some(model))]
        residency = model.engine.stats().paging
        assert model.compression.read(some(model)[0].ids).verdict is Verdict.OFF
    assert residency is not None and residency.policy == "drafter" and residency.max_resident_pages * 64 == POOL
    # The prompt is scored before it is read: the page with the answer never leaves.
    assert residency.rescores > 0 and residency.swapped_out > 0
    assert all(found)


def test_age_does_not(record_property: Any) -> None:
    with opened("lru") as model:
        found = [right for right, _ in recalled(model, some(model))]
    record_property("lru", f"{sum(found)} of {len(found)}")
    assert not any(found)
