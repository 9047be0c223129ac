"""Token prefixes as a tree. Pure: ids in, nodes out.

A block is one page of tokens behind its parent's. A point marks a length at which something was kept: it hangs below
the last whole block and adds the tokens of a page that is not full. Blocks live as long as a point lies behind them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from luce.draft.feature_tail import FeatureTail
from luce.runtime.step import PAGE, Int32
from luce.shard.saved_state import SavedState


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive pages in host memory. Its blocks take up an equal share each."""

    kept: SavedState
    pages: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.kept.nbytes // self.pages


@dataclass(eq=False)
class PageNode:
    """PAGE tokens at positions [index * PAGE, (index + 1) * PAGE).

    page    where their keys and values lie on the devices, in the page group of full attention
    data    the same in host memory: a segment, and which of its pages
    used    the tree's tick when it was last of use
    alive   whether it is in the tree
    """

    parent: PageNode | None
    tokens: bytes
    index: int
    page: int | None = None
    data: tuple[Segment, int] | None = None
    used: int = 0
    alive: bool = True
    children: dict[bytes, PageNode] = field(default_factory=dict)
    points: dict[bytes, Checkpoint] = field(default_factory=dict)


@dataclass(frozen=True)
class Residency:
    """Which pages of a long sequence are on the devices, and why: luce.kvcache.paging goes on from there."""

    present: frozenset[int]
    used: dict[int, int]
    scores: NDArray[np.float32] | None
    scored: int

    def encode(self) -> Int32:
        """As int32 [n + 1, 3]: `scored` and how many scores there are (-1: None).

        Then for each page whether it is present, when it was used, and the bits of its score.
        """
        scores = np.empty(0, np.float32) if self.scores is None else self.scores
        count = 1 + max(*self.present, *self.used, len(scores) - 1, -1)
        rows: Int32 = np.zeros((count + 1, 3), np.int32)
        rows[0, :2] = self.scored, -1 if self.scores is None else len(scores)
        rows[1 + np.array(sorted(self.present), np.int32), 0] = 1
        for page, when in self.used.items():
            rows[1 + page, 1] = when
        rows[1 : 1 + len(scores), 2] = scores.view(np.int32)
        return rows

    @classmethod
    def decode(cls, rows: NDArray[np.generic]) -> Residency:
        """The reverse. Raises ValueError."""
        if rows.ndim != 2 or rows.shape[1] != 3 or not len(rows) or rows.dtype != np.int32:
            raise ValueError("not of the shape of a residency")
        (scored, count, _), pages = rows[0].tolist(), rows[1:]
        if not -1 <= count <= len(pages):
            raise ValueError("more scores than pages")
        return cls(
            frozenset(np.flatnonzero(pages[:, 0]).tolist()),
            {page: int(pages[page, 1]) for page in np.flatnonzero(pages[:, 1]).tolist()},
            None if count < 0 else np.ascontiguousarray(pages[:count, 2]).view(np.float32),
            scored,
        )


@dataclass(eq=False)
class Checkpoint:
    """What a sequence of `length` tokens needs beside its whole blocks.

    tail     tokens behind the last whole block
    state    recurrent states, pages of windowed groups, and the page that is not full
    logits   float32 [vocab] of the last token, None if nobody asked for them
    residency  which pages of a long sequence were on the devices, None if all were
    passing  whether a longer point of the same conversation makes it dispensable: `stale` then
    features what a drafter reads of the positions before it, if that is kept
    """

    block: PageNode
    tail: bytes
    length: int
    state: SavedState
    logits: NDArray[np.float32] | None
    passing: bool
    stale: bool = False
    used: int = 0
    features: FeatureTail | None = None
    residency: Residency | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self.state.nbytes + sum(extra.nbytes for extra in (self.logits, self.features) if extra is not None)


class Tree:
    """All blocks and points."""

    def __init__(self) -> None:
        self._root = PageNode(None, b"", -1)
        #: every block and every point, in order of arrival
        self.blocks: dict[PageNode, None] = {}
        self.points: dict[Checkpoint, None] = {}
        self._tick = 0

    def match(self, ids: Int32) -> tuple[list[PageNode], list[Checkpoint]]:
        """The blocks that `ids` begin with, and all points at prefixes of `ids`, shorter ones first: of use now."""
        self._tick += 1
        blocks: list[PageNode] = []
        points: list[Checkpoint] = []
        block = self._root
        while True:
            rest = ids[(block.index + 1) * PAGE :]
            tail = rest[:PAGE].tobytes()
            found = [p for p in block.points.values() if tail.startswith(p.tail)]
            points += sorted(found, key=lambda point: point.length)
            child = block.children.get(tail)
            if child is None:
                break
            blocks.append(child)
            block = child
        for node in blocks:
            node.used = self._tick
        for point in points:
            point.used = self._tick
        return blocks, points

    def find(self, ids: Int32) -> Checkpoint | None:
        """The point at exactly `ids`."""
        block = self._root
        for begin in range(0, len(ids) - PAGE + 1, PAGE):
            child = block.children.get(ids[begin : begin + PAGE].tobytes())
            if child is None:
                return None
            block = child
        return block.points.get(_tail(ids))

    def add(self, ids: Int32, state: SavedState, logits: NDArray[np.float32] | None, *, passing: bool) -> Checkpoint:
        """A new point at `ids`, and the blocks that it needs."""
        self._tick += 1
        block = self._root
        for begin in range(0, len(ids) - PAGE + 1, PAGE):
            tokens = ids[begin : begin + PAGE].tobytes()
            child = block.children.get(tokens)
            if child is None:
                child = block.children[tokens] = PageNode(block, tokens, block.index + 1)
                self.blocks[child] = None
            child.used = self._tick
            block = child
        point = Checkpoint(block, _tail(ids), len(ids), state, logits, passing, used=self._tick)
        block.points[point.tail] = point
        self.points[point] = None
        return point

    def remove(self, point: Checkpoint) -> list[PageNode]:
        """Take a point away, and the blocks that no other point needs; returns these."""
        del self.points[point], point.block.points[point.tail]
        gone, block = [], point.block
        while block.parent is not None and not block.children and not block.points:
            del block.parent.children[block.tokens], self.blocks[block]
            block.alive = False
            gone.append(block)
            block = block.parent
        return gone

    def coldest(self) -> Checkpoint | None:
        """The point to give up first: stale ones, then the one that was of no use for longest."""
        return min(self.points, key=lambda p: (not p.stale, p.used, -p.length), default=None)

    def trail(self, point: Checkpoint) -> list[PageNode]:
        """The blocks before a point, in order of position."""
        trail, block = [], point.block
        while block.parent is not None:
            trail.append(block)
            block = block.parent
        return trail[::-1]

    def ids(self, point: Checkpoint) -> Int32:
        """The tokens of a point: int32 [length]."""
        return np.frombuffer(b"".join([*(block.tokens for block in self.trail(point)), point.tail]), np.int32)


def _tail(ids: Int32) -> bytes:
    return ids[len(ids) // PAGE * PAGE :].tobytes()
