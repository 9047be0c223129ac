"""Which replica gets a prompt, and what a replica reports of its prefix cache."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce.kvcache.block_keys import salted, text_keys, token_keys
from luce.kvcache.prefix_tree import PrefixTree
from luce.ray import group_keys
from luce.ray.group_keys import GroupKeys
from luce.ray.routing_state import ASSUMED_SECONDS, RoutingState

KEYS = token_keys(range(640))
OTHER = token_keys(range(1000, 1640))


def report(added: Any = (), removed: Any = (), *, since: int = -1, sequence: int = 0, **more: Any) -> dict[str, Any]:
    facts = {"life": "one", "running": 0, "waiting": 0, "parallel": 2, "prefill_seconds": 0.01, "reply_seconds": 2.0}
    return {"since": since, "sequence": sequence, "added": list(added), "removed": list(removed), **facts, **more}


def state(**reports: dict[str, Any]) -> RoutingState:
    found = RoutingState()
    found.keep(reports)
    for name, each in reports.items():
        assert found.apply(name, each, 0.0)
    return found


def test_keys_are_a_chain_of_whole_blocks() -> None:
    ids = np.arange(200, dtype="<i8")
    first = hashlib.sha256(ids[:64].tobytes()).digest()
    assert token_keys(ids.tolist()) == [
        first,
        second := hashlib.sha256(first + ids[64:128].tobytes()).digest(),
        hashlib.sha256(second + ids[128:192].tobytes()).digest(),
    ]
    assert token_keys(range(63)) == []
    changed = token_keys([7, *range(1, 200)])
    assert not set(changed) & set(token_keys(range(200)))
    assert token_keys([*range(199), 7, 8]) == token_keys(range(200))
    assert len(text_keys("é" * 600)) == 2 and text_keys("a" * 255) == []
    assert text_keys("a" * 300) == text_keys("a" * 256) and text_keys("\ud800" * 256)
    # What a page of the tree is known by.
    tree = PrefixTree()
    checkpoint = tree.add(np.arange(130, dtype=np.int32), None, None, interim=False)  # type: ignore[arg-type]
    assert [hashlib.sha256(node.tokens).digest() for node in tree.path(checkpoint)[:1]] == [first]


def test_the_replica_with_most_of_the_prompt_gets_it() -> None:
    here = state(a=report(KEYS[:3]), b=report(KEYS[:7]), c=report(OTHER))
    assert here.ranked(KEYS, 1.0)[0] == "b"
    assert here.ranked(OTHER, 1.0)[0] == "c"
    assert here.ranked(KEYS, 1.0, among={"a", "c"})[0] == "a"


@pytest.mark.parametrize("reply_seconds, best", [(1.1, "b"), (1.2, "a")])
def test_waiting_costs_what_it_takes(reply_seconds: float, best: str) -> None:
    # 7 blocks save 4.48 s, and a request may wait for a fourth of that. One behind three requests with two slots waits
    # for one of them.
    busy = report(KEYS[:7], running=2, waiting=1, reply_seconds=reply_seconds)
    here = state(a=report(), b=busy)
    assert here.replicas["b"].waiting_seconds == reply_seconds
    assert here.ranked(KEYS, 1.0)[0] == best
    # Where tokens are read fast, nobody waits for a cached prompt.
    assert state(a=report(), b={**busy, "prefill_seconds": 0.001}).ranked(KEYS, 1.0)[0] == "a"


def test_a_crowded_replica_is_left_out_unless_all_are() -> None:
    full = report(KEYS, running=2, waiting=3, prefill_seconds=9.0)
    assert state(a=report(), b=full).ranked(KEYS, 1.0) == ["a"]
    assert state(a=report(running=2, waiting=3), b=full).ranked(KEYS, 1.0)[0] == "b"


def test_equal_scores_go_to_the_least_loaded() -> None:
    here = state(a=report(KEYS, running=1, parallel=4), b=report(KEYS, parallel=4))
    assert here.ranked(KEYS, 1.0) == ["b", "a"]
    for _ in range(2):
        here.began("b", KEYS)
    assert here.ranked(KEYS, 1.0) == ["a", "b"]


def test_a_beginning_that_all_requests_share_queues_up_at_no_replica() -> None:
    router, draw = state(a=report(KEYS, parallel=4), b=report(parallel=4)), random.Random(5)
    under_way = list[str]()
    for number in range(400):
        name = router.ranked(KEYS, float(number))[0]
        router.began(name, KEYS)
        under_way.append(name)
        if len(under_way) > 9:
            router.ended(ended := under_way.pop(draw.randrange(4)), KEYS, float(number))
            assert ended in ("a", "b")
        least, most = sorted(under_way.count(each) for each in ("a", "b"))
        # The first ones go where the beginning is cached; the other replica reads it once they would wait too long.
        assert number < 16 or most <= 2 * least


def test_an_unknown_prompt_stays_with_its_replica_by_its_fourth_block() -> None:
    names = [f"r{number}" for number in range(8)]
    here = state(**{name: report() for name in names})
    first = here.ranked(KEYS[:4], 1.0)[0]
    assert here.ranked(KEYS, 1.0)[0] == first
    prompts = [token_keys([number, *range(300)]) for number in range(400)]
    chosen = [here.ranked(prompt, 1.0)[0] for prompt in prompts]
    assert min(chosen.count(name) for name in names) > 25
    # Only what was with the replica that is gone moves.
    here.keep([name for name in names if name != "r3"])
    moved = [
        (now, before)
        for prompt, before in zip(prompts, chosen, strict=True)
        if (now := here.ranked(prompt, 1.0)[0]) != before
    ]
    assert {before for _, before in moved} == {"r3"} and len({now for now, _ in moved}) > 3
    first = here.ranked(KEYS, 1.0)[0]
    here.replicas[first].reported = 9
    assert here.ranked(KEYS, 1.0)[0] != first


def test_short_prompts_go_around() -> None:
    here = state(a=report(), b=report(), c=report())
    chosen = []
    for _ in range(6):
        chosen.append(here.ranked([], 1.0)[0])
        here.began(chosen[-1], [])
        here.ended(chosen[-1], [], 1.0)
    assert sorted(chosen[:3]) == ["a", "b", "c"] and chosen[3:] == chosen[:3]


def test_what_was_sent_counts_until_it_must_have_been_reported() -> None:
    here = state(a=report(), b=report())
    name = next(other for other in "ab" if other != here.ranked(KEYS, 0.0)[0])
    here.began(name, KEYS)
    assert here.ranked(KEYS, 1e6)[0] == name and here.replicas[name].load == 1
    here.ended(name, KEYS, 10.0)
    assert here.replicas[name].load == 0
    assert here.ranked(KEYS, 10 + ASSUMED_SECONDS - 0.1)[0] == name
    assert here.ranked(KEYS, 10 + ASSUMED_SECONDS + 0.1)[0] != name
    assert here.apply(name, report(since=0, sequence=1), 20.0)
    assert not here.replicas[name].assumed
    here.began("gone", KEYS)
    here.ended("gone", KEYS, 1.0)
    assert here.apply("gone", report(), 1.0)


def test_reports_follow_each_other_and_a_gap_asks_for_the_whole_list() -> None:
    here = state(a=report(KEYS[:2], sequence=4))
    assert here.apply("a", report(KEYS[2:4], since=4, sequence=5), 0.0)
    assert here.apply("a", report(removed=KEYS[3:4], since=5, sequence=6), 0.0)
    view = here.replicas["a"]
    assert view.keys == set(KEYS[:3]) and view.sequence == 6
    assert not here.apply("a", report(OTHER, since=7, sequence=8), 0.0)
    assert view.sequence == -1 and view.keys == set(KEYS[:3])
    assert here.apply("a", report(OTHER, sequence=8), 0.0)
    assert view.keys == set(OTHER) and view.sequence == 8
    assert not here.apply("a", report(KEYS, since=8, sequence=9, life="two"), 0.0)
    here.keep(["b"])
    assert here.replicas["b"].sequence == -1 and "a" not in here.replicas


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_a_router_that_misses_reports_has_the_replicas_list_in_the_end(seed: int, steps: int) -> None:
    draw = random.Random(seed)
    held, sequence, here = set[bytes](), 0, state(a=report())
    pool = KEYS + OTHER
    for _ in range(steps):
        added = set(draw.sample(pool, 3)) - held
        removed = set(draw.sample(sorted(held), min(2, len(held))))
        held, sequence = (held | added) - removed, sequence + 1
        if draw.random() < 0.7 and not here.apply(
            "a", report(added, removed, since=sequence - 1, sequence=sequence), 0
        ):
            assert here.apply("a", report(held, sequence=sequence), 0)
            assert here.replicas["a"].keys == held
    here.apply("a", report(held, sequence=sequence), 0)
    assert here.replicas["a"].keys == held


def test_a_group_learns_only_of_blocks_that_it_has_sent() -> None:
    groups, mine, theirs = GroupKeys(), b"mine", b"theirs"
    assert groups.sent(KEYS[:2], mine) == []
    assert groups.changed(KEYS[:4], ()) == ([salted(key, mine) for key in KEYS[:2]], [])
    # The reply's blocks, once the next turn has them.
    assert groups.sent(KEYS[:4], mine) == [salted(key, mine) for key in KEYS[2:4]]
    assert groups.sent(KEYS[:4], mine) == []
    assert groups.sent(KEYS[:1], theirs) == [salted(KEYS[0], theirs)]
    assert set(groups.held()) == {salted(KEYS[0], theirs), *(salted(key, mine) for key in KEYS[:4])}
    added, removed = groups.changed((), [KEYS[0], KEYS[3], OTHER[0]])
    assert added == [] and set(removed) == {
        salted(KEYS[0], mine),
        salted(KEYS[0], theirs),
        salted(KEYS[3], mine),
    }
    assert salted(KEYS[0], mine) != salted(KEYS[0], theirs) != KEYS[0]
    assert set(groups.clear()) == {salted(key, mine) for key in KEYS[1:3]}
    assert groups.held() == []


def test_blocks_that_are_never_cached_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_keys, "MOST_ABSENT", 8)
    groups = GroupKeys()
    groups.sent(KEYS[:2], b"salt")
    groups.changed(KEYS[:2], ())
    for number in range(20):
        groups.sent([bytes([number])], b"salt")
    # The oldest of those that are not held are gone, the newest and the held ones are not.
    assert groups.changed([bytes([0])], ())[0] == [] != groups.changed([bytes([19])], ())[0]
    assert len(groups.held()) == 3
