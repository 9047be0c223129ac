"""Token prefixes as a tree. Pure: ids in, nodes out.

A node is one page of tokens behind its parent's. A checkpoint marks a length at which a sequence can resume: it hangs
below the node of its last whole page and adds the tokens of a page that is not full. Nodes live as long as a checkpoint
lies behind them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from luce.draft.feature_tail import FeatureTail
from luce.kvcache.block_keys import next_key
from luce.kvcache.block_log import BlockLog
from luce.kvcache.prefix_ids import PrefixIds
from luce.runtime.step import PAGE, Int32
from luce.shard.saved_state import SavedState

#: where a page lies in host memory: saved pages, and its number among them
HostPage = tuple[SavedState, int]


@dataclass(eq=False)
class PageNode:
    """PAGE tokens at positions [index * PAGE, (index + 1) * PAGE), and where their keys and values lie."""

    parent: PageNode | None
    #: PrefixIds as int64
    tokens: bytes
    index: int
    #: luce.kvcache.block_keys
    key: bytes = b""
    #: on the devices: the page in the group of full attention
    page: int | None = None
    #: in host memory
    host: HostPage | None = None
    #: the tree's clock at the last use
    last_used: int = 0
    #: whether it is part of the tree
    in_tree: bool = True
    children: dict[bytes, PageNode] = field(default_factory=dict)
    #: by the tokens behind the node
    checkpoints: dict[bytes, Checkpoint] = field(default_factory=dict)


@dataclass(frozen=True)
class Residency:
    """Which pages of a long sequence are resident, and their scores: luce.kvcache.paging continues from there."""

    resident: frozenset[int]
    #: by page, the pager's clock when it was last swapped in
    swapped_in_at: dict[int, int]
    #: float32 [pages], None if the pages were never scored
    scores: NDArray[np.float32] | None
    #: length of the sequence when the pages were scored
    scored_at: int

    def encode(self) -> Int32:
        """int32 [pages + 1, 3]. The first row: `scored_at`, the number of scores (-1 for None), 0.

        Then for each page: 1 if it is resident, its `swapped_in_at`, and the bits of its score.
        """
        scores = np.empty(0, np.float32) if self.scores is None else self.scores
        count = 1 + max(*self.resident, *self.swapped_in_at, len(scores) - 1, -1)
        rows: Int32 = np.zeros((count + 1, 3), np.int32)
        rows[0, :2] = self.scored_at, -1 if self.scores is None else len(scores)
        rows[1 + np.array(sorted(self.resident), np.int32), 0] = 1
        for page, when in self.swapped_in_at.items():
            rows[1 + page, 1] = when
        rows[1 : 1 + len(scores), 2] = scores.view(np.int32)
        return rows

    @classmethod
    def decode(cls, rows: NDArray[np.generic]) -> Residency:
        """The reverse of `encode`. Raises ValueError."""
        if rows.ndim != 2 or rows.shape[1] != 3 or not len(rows) or rows.dtype != np.int32:
            raise ValueError(f"{rows.dtype} of shape {rows.shape} instead of int32 [pages + 1, 3]")
        (scored_at, count, _), pages = rows[0].tolist(), rows[1:]
        if not -1 <= count <= len(pages):
            raise ValueError(f"{count} scores of {len(pages)} pages")
        return cls(
            frozenset(np.flatnonzero(pages[:, 0]).tolist()),
            {page: int(pages[page, 1]) for page in np.flatnonzero(pages[:, 1]).tolist()},
            None if count < 0 else np.ascontiguousarray(pages[:count, 2]).view(np.float32),
            scored_at,
        )


@dataclass(eq=False)
class Checkpoint:
    """A length of a text at which a sequence can resume, with everything that it needs beside whole pages."""

    #: of the last whole page
    node: PageNode
    #: the tokens behind the last whole page, as those of nodes
    remainder: bytes
    #: tokens
    length: int
    #: recurrent states, pages of windowed groups, and the page that is not full
    state: SavedState
    #: float32 [vocab] of the last token, if known
    logits: NDArray[np.float32] | None
    #: whether a longer checkpoint of the same conversation replaces this one
    interim: bool
    #: whether that longer checkpoint exists
    superseded: bool = False
    #: the tree's clock at the last use
    last_used: int = 0
    #: features of the positions before it, for drafters
    features: FeatureTail | None = None
    #: of a long sequence, None if all pages were resident
    residency: Residency | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self.state.nbytes + sum(extra.nbytes for extra in (self.logits, self.features) if extra is not None)


class PrefixTree:
    """All nodes and checkpoints."""

    def __init__(self) -> None:
        self._root = PageNode(None, b"", -1)
        #: in order of insertion
        self.nodes: dict[PageNode, None] = {}
        #: in order of insertion
        self.checkpoints: dict[Checkpoint, None] = {}
        self._clock = 0
        #: the keys of the nodes, for routers
        self.block_log = BlockLog()

    def match(self, ids: PrefixIds) -> tuple[list[PageNode], list[Checkpoint]]:
        """The nodes whose tokens `ids` begin with, and all checkpoints at prefixes of `ids`, shorter ones first. All of
        them count as used now."""
        self._clock += 1
        ids = _wide(ids)
        nodes: list[PageNode] = []
        checkpoints: list[Checkpoint] = []
        node = self._root
        while True:
            rest = ids[(node.index + 1) * PAGE :]
            tokens = rest[:PAGE].tobytes()
            found = [c for c in node.checkpoints.values() if tokens.startswith(c.remainder)]
            checkpoints += sorted(found, key=lambda checkpoint: checkpoint.length)
            child = node.children.get(tokens)
            if child is None:
                break
            nodes.append(child)
            node = child
        for node in nodes:
            node.last_used = self._clock
        for checkpoint in checkpoints:
            checkpoint.last_used = self._clock
        return nodes, checkpoints

    def find(self, ids: PrefixIds) -> Checkpoint | None:
        """The checkpoint at exactly `ids`."""
        ids = _wide(ids)
        node = self._root
        for begin in range(0, len(ids) - PAGE + 1, PAGE):
            child = node.children.get(ids[begin : begin + PAGE].tobytes())
            if child is None:
                return None
            node = child
        return node.checkpoints.get(_remainder(ids))

    def add(
        self, ids: PrefixIds, state: SavedState, logits: NDArray[np.float32] | None, *, interim: bool
    ) -> Checkpoint:
        """A new checkpoint at `ids`, with the nodes that it needs."""
        self._clock += 1
        ids = _wide(ids)
        node = self._root
        for begin in range(0, len(ids) - PAGE + 1, PAGE):
            tokens = ids[begin : begin + PAGE].tobytes()
            child = node.children.get(tokens)
            if child is None:
                child = node.children[tokens] = PageNode(node, tokens, node.index + 1, next_key(node.key, tokens))
                self.nodes[child] = None
                self.block_log.note(child.key, held=True)
            child.last_used = self._clock
            node = child
        checkpoint = Checkpoint(node, _remainder(ids), len(ids), state, logits, interim, last_used=self._clock)
        node.checkpoints[checkpoint.remainder] = checkpoint
        self.checkpoints[checkpoint] = None
        return checkpoint

    def remove(self, checkpoint: Checkpoint) -> list[PageNode]:
        """Remove a checkpoint, and the nodes that no other checkpoint needs; returns these nodes."""
        del self.checkpoints[checkpoint], checkpoint.node.checkpoints[checkpoint.remainder]
        removed, node = [], checkpoint.node
        while node.parent is not None and not node.children and not node.checkpoints:
            del node.parent.children[node.tokens], self.nodes[node]
            node.in_tree = False
            self.block_log.note(node.key, held=False)
            removed.append(node)
            node = node.parent
        return removed

    def eviction_candidate(self) -> Checkpoint | None:
        """The checkpoint to evict next: a superseded one, otherwise the least recently used, the longest of equals."""
        return min(self.checkpoints, key=lambda c: (not c.superseded, c.last_used, -c.length), default=None)

    def path(self, checkpoint: Checkpoint) -> list[PageNode]:
        """The nodes before a checkpoint, in order of position."""
        path, node = [], checkpoint.node
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def ids(self, checkpoint: Checkpoint) -> NDArray[np.int64]:
        """The PrefixIds of a checkpoint: int64 [length]."""
        pages = (node.tokens for node in self.path(checkpoint))
        return np.frombuffer(b"".join([*pages, checkpoint.remainder]), np.int64)


def _wide(ids: PrefixIds) -> NDArray[np.int64]:
    return ids.astype(np.int64, copy=False)


def _remainder(ids: NDArray[np.int64]) -> bytes:
    return ids[len(ids) // PAGE * PAGE :].tobytes()
