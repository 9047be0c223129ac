"""Drives a backend without the engine: several sequences, any chunking, logits of every row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from luce.backend.kept import JoinedKept, Piece
from luce.backend.layersplit import LayerSplitBackend
from luce.runtime.step import PAGE, PageView, Span, Step


@dataclass
class Sequence:
    """A sequence as the driver knows it: slot, length, pages of each group in order of position."""

    slot: int
    length: int = 0
    pages: list[list[int]] = field(default_factory=list)


class Driver:
    """Hands out pages round-robin between sequences, so that they are neither consecutive nor ordered."""

    def __init__(self, backend: LayerSplitBackend) -> None:
        self.backend = backend
        self._free = [list(range(n))[::-1] for n in backend.pages]
        self._slots = list(range(backend.slots))

    def start(self) -> Sequence:
        """A new sequence."""
        return Sequence(self._slots.pop(), 0, [[] for _ in self._free])

    def feed(self, *work: tuple[Sequence, NDArray[np.int32]], wanted: bool = True) -> list[NDArray[np.float32]]:
        """One step with the given tokens of each sequence; float32 [len(tokens), vocab] for each, or nothing."""
        step = self.step(*work)
        if not wanted:
            step = replace(step, wanted=step.wanted[:0], full=step.full[:0])
            assert not len(self.backend.forward(step).ids)
            return []
        output = self.backend.forward(step)
        assert (output.ids == output.logits.argmax(axis=1)).all()
        return [output.logits[s.start : s.start + s.rows] for s in step.spans]

    def keep(self, sequence: Sequence) -> JoinedKept:
        """What the shards put aside of a sequence."""
        return self.backend.save(sequence.slot, sequence.pages)

    def resume(self, sequence: Sequence, kept: JoinedKept) -> None:
        """Give a sequence of the same length what `keep` returned."""
        self.backend.restore(sequence.slot, sequence.pages, kept)

    def save(self, sequence: Sequence) -> dict[str, NDArray[np.generic]]:
        """The same as tensors of this process, of all shards; none is there twice."""
        saved: dict[str, NDArray[np.generic]] = {}
        for tensors in self.keep(sequence).windows():
            assert not saved.keys() & tensors.keys()
            saved |= tensors
        return saved

    def restore(self, sequence: Sequence, saved: Mapping[str, NDArray[np.generic]]) -> None:
        """Give a sequence of the same length what `save` returned, in two pieces."""
        layers = len(self.backend.spec.blocks)
        parts = range(layers // 2), range(layers // 2, layers)
        self.backend.fill(Piece(sequence.slot, sequence.pages, part, saved) for part in parts)

    def step(self, *work: tuple[Sequence, NDArray[np.int32]]) -> Step:
        """The step that `feed` runs; the sequences count its rows as done."""
        spans, tokens, positions = [], [], []
        for sequence, ids in work:
            spans.append(Span(sequence.slot, len(tokens), len(ids), sequence.length))
            tokens += [int(t) for t in ids]
            positions += range(sequence.length, sequence.length + len(ids))
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
        rows = np.arange(len(tokens), dtype=np.int32)
        return Step(
            tokens=np.array(tokens, np.int32),
            positions=np.array(positions, np.int32),
            spans=tuple(spans),
            views=tuple(views),
            wanted=rows,
            full=np.ones(len(rows), np.bool_),
        )
