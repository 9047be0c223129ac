"""The tree of prefixes against a list of them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from luce.kvcache.prefix_tree import Checkpoint, PrefixTree
from luce.runtime.step import PAGE

#: token 1 behind a gap of 5 positions
BEHIND_A_GAP = 1 + (5 << 32)


def ids(*parts: tuple[int, int]) -> NDArray[np.int64]:
    """Runs of one id: (id, length), ..."""
    return np.concatenate([np.full(n, token, np.int64) for token, n in parts])


PROMPTS = st.lists(
    st.tuples(st.sampled_from([0, 1, BEHIND_A_GAP]), st.sampled_from([1, 5, PAGE - 5, PAGE - 1, PAGE])),
    min_size=1,
    max_size=6,
).map(lambda parts: ids(*parts))


class Prefixes(RuleBasedStateMachine):
    """`saved` are the ids of every checkpoint."""

    @initialize()
    def start(self) -> None:
        self.tree = PrefixTree()
        self.saved: dict[Checkpoint, NDArray[np.int64]] = {}

    @rule(prompt=PROMPTS, interim=st.booleans())
    def add(self, prompt: NDArray[np.int64], interim: bool) -> None:
        found = self.tree.find(prompt)
        expected = [p for p, known in self.saved.items() if np.array_equal(known, prompt)]
        assert [found] == (expected or [None])
        if found is None:
            self.saved[self.tree.add(prompt, {}, None, interim=interim)] = prompt

    @rule(prompt=PROMPTS)
    def match(self, prompt: NDArray[np.int64]) -> None:
        nodes, checkpoints = self.tree.match(prompt)
        prefixes = [p for p, known in self.saved.items() if np.array_equal(known, prompt[: len(known)])]
        assert checkpoints == sorted(prefixes, key=lambda checkpoint: checkpoint.length)
        known = [
            next((i for i in range(min(len(k), len(prompt))) if k[i] != prompt[i]), min(len(k), len(prompt))) // PAGE
            for k in self.saved.values()
        ]
        assert len(nodes) == max(known, default=0)
        assert b"".join(node.tokens for node in nodes) == prompt[: len(nodes) * PAGE].tobytes()

    @rule()
    def remove_the_least_recently_used(self) -> None:
        coldest = self.tree.eviction_candidate()
        assert (coldest is None) == (not self.saved)
        if coldest is None:
            return
        assert coldest.last_used == min(checkpoint.last_used for checkpoint in self.saved)
        gone = self.tree.remove(coldest)
        assert not any(node.in_tree for node in gone)
        del self.saved[coldest]

    @invariant()
    def blocks_are_those_of_the_points(self) -> None:
        wanted = {k[: (i + 1) * PAGE].tobytes() for k in self.saved.values() for i in range(len(k) // PAGE)}
        assert len(self.tree.nodes) == len(wanted)
        assert set(self.tree.checkpoints) == set(self.saved)
        for checkpoint, known in self.saved.items():
            assert np.array_equal(self.tree.ids(checkpoint), known)
            assert len(self.tree.path(checkpoint)) == len(known) // PAGE


TestPrefixes = Prefixes.TestCase


def test_superseded_checkpoints_are_evicted_before_older_ones() -> None:
    tree = PrefixTree()
    cold, warm = (tree.add(ids((token, 10)), {}, None, interim=True) for token in (1, 2))
    assert tree.eviction_candidate() is cold
    warm.superseded = True
    assert tree.eviction_candidate() is warm


def test_of_two_checkpoints_used_together_the_shorter_one_stays() -> None:
    tree = PrefixTree()
    short, long = (tree.add(ids((1, n)), {}, None, interim=True) for n in (10, 200))
    tree.match(ids((1, 300)))
    assert tree.eviction_candidate() is long
    tree.remove(long)
    assert tree.eviction_candidate() is short
