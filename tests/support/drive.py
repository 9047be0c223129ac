"""Drives a backend without the engine: several sequences, any chunking, logits of every row."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from luce.backend.layersplit import LayerSplitBackend
from luce.engine import draft_tree
from luce.runtime.step import PAGE, PageView, Span, Step
from luce.shard.saved_state import JoinedSavedState, SavedState, StatePiece


@dataclass
class Sequence:
    """A sequence as the driver knows it: slot, length, pages of each group in order of position, and how many rows of
    its last span, which was speculative, are part of that length: of a tree, which ones. branches: of its last tree,
    the pages of each group that a sequence would have that ends with the row."""

    slot: int
    length: int = 0
    accepted: int = 0
    pages: list[list[int]] = field(default_factory=list)
    path: tuple[int, ...] = ()
    branches: dict[int, list[list[int]]] = field(default_factory=dict)


class Driver:
    """Hands out pages round-robin between sequences, so that they are neither consecutive nor ordered."""

    def __init__(self, backend: LayerSplitBackend) -> None:
        self.backend = backend
        self._free = [list(range(n))[::-1] for n in backend.capacity.pages]
        self._slots = list(range(backend.capacity.slots))

    def start(self) -> Sequence:
        """A new sequence."""
        return Sequence(self._slots.pop(), pages=[[] for _ in self._free])

    def end(self, sequence: Sequence) -> None:
        """Its slot and pages are free."""
        self._slots.append(sequence.slot)
        for free, pages in zip(self._free, sequence.pages, strict=True):
            free += pages

    def feed(self, *work: tuple[Sequence, NDArray[np.int32]], wanted: bool = True) -> list[NDArray[np.float32]]:
        """One step with the given tokens of each sequence; float32 [len(tokens), vocab] for each, or nothing."""
        step = self.step(*work)
        if not wanted:
            step = replace(step, output_rows=step.output_rows[:0], needs_logits=step.needs_logits[:0])
            assert not len(self.backend.forward(step).ids)
            return []
        return self._logits(step)

    def verify(self, *work: tuple[Sequence, NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """The same with speculative spans; `accept` tells which of the rows count."""
        lengths = [sequence.length for sequence, _ in work]
        step = self.step(*work)
        for (sequence, _), length in zip(work, lengths, strict=True):
            sequence.length = length
        return self._logits(replace(step, spans=tuple(replace(span, speculative=True) for span in step.spans)))

    def tree(self, sequence: Sequence, ids: NDArray[np.int32], parents: Many[int]) -> NDArray[np.float32]:
        """Logits of a tree's rows: parents[i] is the row of the parent of row i + 1, in depth-first order.

        Each branch gets copies of all pages from the root's on."""
        root = sequence.length
        step = self.step((sequence, ids))
        sequence.length = root
        spans = draft_tree.tree_spans(parents, step.spans[0])
        positions = np.concatenate([np.arange(s.position, s.position + s.rows, dtype=np.int32) for s in spans])
        sequence.branches = {}
        views = []
        for group, free in enumerate(self._free):
            own = sequence.pages[group]
            table = np.tile(np.array(own, np.int32), (len(spans), 1))
            dest, copies = np.empty(len(ids), np.int32), []
            for index, span in enumerate(spans):
                first = root // PAGE
                if span.ancestors:
                    table[index, first:] = [free.pop() for _ in own[first:]]
                pages = table[index]
                at = positions[span.start : span.start + span.rows]
                dest[span.start : span.start + span.rows] = pages[at // PAGE] * PAGE + at % PAGE
                if span.ancestors:
                    before = np.arange(first * PAGE, span.position)
                    old = np.array(own)[before // PAGE] * PAGE + before % PAGE
                    old[root - first * PAGE :] = dest[list(span.ancestors)]
                    copies.append(np.stack([old, pages[before // PAGE] * PAGE + before % PAGE], axis=1))
                for row in range(span.start, span.start + span.rows):
                    sequence.branches.setdefault(row, []).append(pages.tolist())
            first_rows = np.tile(np.arange(len(own), dtype=np.int32) * PAGE, (len(spans), 1))
            count = np.full(len(spans), len(own), np.int32)
            pairs = np.concatenate(copies).astype(np.int32) if copies else None
            views.append(PageView(table, first_rows, count, dest, copies=pairs))
        step = replace(step, spans=tuple(spans), positions=positions, views=tuple(views))
        return np.concatenate(self._logits(step))

    def accept(self, sequence: Sequence, rows: int) -> None:
        """The first `rows` rows of the last span are part of the sequence."""
        sequence.accepted = rows
        sequence.length += rows

    def accept_path(self, sequence: Sequence, path: Many[int]) -> None:
        """These rows of the last tree are part of the sequence; pages of other branches are free."""
        self.accept(sequence, len(path))
        sequence.path = tuple(path)
        chosen = sequence.branches[path[-1]]
        for group, free in enumerate(self._free):
            used = {page for pages in sequence.branches.values() for page in pages[group]}
            free += sorted(used - set(chosen[group]))
        sequence.pages = [list(pages) for pages in chosen]
        self.backend.move_features(sequence.slot, sequence.length - len(path), path)

    def _logits(self, step: Step) -> list[NDArray[np.float32]]:
        output = self.backend.forward(step)
        assert (output.ids == output.logits.argmax(axis=1)).all()
        return [output.logits[s.start : s.start + s.rows] for s in step.spans]

    def keep(self, sequence: Sequence) -> JoinedSavedState:
        """What the shards put aside of a sequence."""
        if sequence.accepted:
            self.backend.accept(sequence.slot, sequence.path or range(sequence.accepted))
            sequence.accepted, sequence.path = 0, ()
        return self.backend.state.save(sequence.slot, sequence.pages)

    def resume(self, sequence: Sequence, kept: JoinedSavedState) -> None:
        """Give a sequence of the same length what `keep` returned."""
        self.backend.state.restore(sequence.slot, sequence.pages, kept)

    def save(self, sequence: Sequence) -> dict[str, NDArray[np.generic]]:
        """The same as tensors of this process, of all shards; none is there twice."""
        saved: dict[str, NDArray[np.generic]] = {}
        for tensors in self.keep(sequence).windows():
            assert not saved.keys() & tensors.keys()
            saved |= tensors
        return saved

    def restore(self, sequence: Sequence, saved: Mapping[str, NDArray[np.generic]]) -> None:
        """Give a sequence of the same length what `save` returned, in two pieces."""
        layers = len(self.backend.spec.layers)
        parts = range(layers // 2), range(layers // 2, layers)
        self.backend.state.load(StatePiece(sequence.slot, sequence.pages, part, saved) for part in parts)

    def step(self, *work: tuple[Sequence, NDArray[np.int32]]) -> Step:
        """The step that `feed` runs; the sequences count its rows as done."""
        spans, tokens = [], []
        for sequence, ids in work:
            accepted, sequence.accepted = sequence.accepted, 0
            path, sequence.path = sequence.path, ()
            spans.append(Span(sequence.slot, len(tokens), len(ids), sequence.length, accepted, path=path))
            tokens += [int(t) for t in ids]
            sequence.length += len(ids)
        views = []
        for group, free in enumerate(self._free):
            for sequence, _ in work:
                while len(sequence.pages[group]) * PAGE < sequence.length:
                    sequence.pages[group].append(free.pop())
            width = max(len(s.pages[group]) for s, _ in work)
            table, first = np.zeros((2, len(work), width), np.int32)
            count = np.zeros(len(work), np.int32)
            dest: list[int] = []
            for index, (sequence, ids) in enumerate(work):
                own = sequence.pages[group]
                table[index, : len(own)] = own
                first[index, : len(own)] = np.arange(len(own)) * PAGE
                count[index] = len(own)
                dest += [own[p // PAGE] * PAGE + p % PAGE for p in range(sequence.length - len(ids), sequence.length)]
            views.append(PageView(table, first, count, np.array(dest, np.int32)))
        return Step.of_spans(spans, tokens, tuple(views), range(len(tokens)), needs_logits=True)


def gathered(saved: SavedState, first: int = 0, count: int | None = None) -> dict[str, NDArray[np.generic]]:
    """All tensors of a saved state at once."""
    return {name: tensor for window in saved.windows(first, count) for name, tensor in window.items()}
