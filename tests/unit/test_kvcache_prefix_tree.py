"""The tree of prefixes against a list of them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from luce.kvcache.prefix_tree import Checkpoint, Tree
from luce.runtime.step import PAGE, Int32


def ids(*parts: tuple[int, int]) -> Int32:
    """Runs of one token: (token, length), ..."""
    return np.concatenate([np.full(n, token, np.int32) for token, n in parts])


PROMPTS = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from([1, 5, PAGE - 5, PAGE - 1, PAGE])), min_size=1, max_size=6
).map(lambda parts: ids(*parts))


class Prefixes(RuleBasedStateMachine):
    """`kept` are the ids of every point."""

    @initialize()
    def start(self) -> None:
        self.tree = Tree()
        self.kept: dict[Checkpoint, Int32] = {}

    @rule(prompt=PROMPTS, passing=st.booleans())
    def add(self, prompt: Int32, passing: bool) -> None:
        found = self.tree.find(prompt)
        expected = [p for p, known in self.kept.items() if np.array_equal(known, prompt)]
        assert [found] == (expected or [None])
        if found is None:
            self.kept[self.tree.add(prompt, {}, None, passing=passing)] = prompt

    @rule(prompt=PROMPTS)
    def match(self, prompt: Int32) -> None:
        blocks, points = self.tree.match(prompt)
        prefixes = [p for p, known in self.kept.items() if np.array_equal(known, prompt[: len(known)])]
        assert points == sorted(prefixes, key=lambda point: point.length)
        known = [
            next((i for i in range(min(len(k), len(prompt))) if k[i] != prompt[i]), min(len(k), len(prompt))) // PAGE
            for k in self.kept.values()
        ]
        assert len(blocks) == max(known, default=0)
        assert b"".join(block.tokens for block in blocks) == prompt[: len(blocks) * PAGE].tobytes()

    @rule(stale=st.booleans())
    def remove_coldest(self, stale: bool) -> None:
        coldest = self.tree.coldest()
        assert (coldest is None) == (not self.kept)
        if coldest is None:
            return
        assert coldest.used == min(point.used for point in self.kept)
        gone = self.tree.remove(coldest)
        assert not any(block.alive for block in gone)
        del self.kept[coldest]

    @invariant()
    def blocks_are_those_of_the_points(self) -> None:
        wanted = {k[: (i + 1) * PAGE].tobytes() for k in self.kept.values() for i in range(len(k) // PAGE)}
        assert len(self.tree.blocks) == len(wanted)
        assert set(self.tree.points) == set(self.kept)
        for point, known in self.kept.items():
            assert np.array_equal(self.tree.ids(point), known)
            assert len(self.tree.trail(point)) == len(known) // PAGE


TestPrefixes = Prefixes.TestCase


def test_stale_points_go_before_colder_ones() -> None:
    tree = Tree()
    cold, warm = (tree.add(ids((token, 10)), {}, None, passing=True) for token in (1, 2))
    assert tree.coldest() is cold
    warm.stale = True
    assert tree.coldest() is warm


def test_of_two_points_used_together_the_shorter_one_stays() -> None:
    tree = Tree()
    short, long = (tree.add(ids((1, n)), {}, None, passing=True) for n in (10, 200))
    tree.match(ids((1, 300)))
    assert tree.coldest() is long
    tree.remove(long)
    assert tree.coldest() is short
