"""Steps on a backend, timed from the host: prompts, decoding, verification, many sequences."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from luce.backend.backend import Backend
from luce.bench.cost import Rows
from luce.engine.pages import Pages
from luce.runtime.step import Int32, Span, Step

Kind = Literal["prompt", "decode", "verify", "batch"]
# Steps of a verification test: enough to time with the host's clock.
_VERIFIED = 16


@dataclass(frozen=True)
class Workload:
    """`size` prompt tokens, generated tokens, verified rows or sequences, each sequence at position `depth`.

    `steps`: tokens that a batch's sequences generate.
    """

    kind: Kind
    size: int
    depth: int
    steps: int = 1

    @property
    def name(self) -> str:
        """As the table calls it."""
        label = {"prompt": "prompt {}", "decode": "decode {}", "verify": "verify {} rows", "batch": "{} sequences"}
        return label[self.kind].format(self.size) + (f" at {self.depth}" if self.depth else "")

    @property
    def context(self) -> int:
        """Positions that a sequence needs."""
        return self.depth + (self.size if self.kind != "batch" else self.steps)

    def plan(self, chunk: int) -> list[tuple[list[Rows], int]]:
        """Spans and wanted rows of each step."""
        at = self.depth
        if self.kind == "prompt":
            starts = range(0, self.size, chunk)
            return [([Rows(min(chunk, self.size - s), at + s)], int(s + chunk >= self.size)) for s in starts]
        if self.kind == "verify":
            return [([Rows(self.size, at)], self.size)] * _VERIFIED
        if self.kind == "decode":
            return [([Rows(1, at + n)], 1) for n in range(self.size)]
        return [([Rows(1, at + n)] * self.size, self.size) for n in range(self.steps)]

    @property
    def tokens(self) -> int:
        """Rows that a run computes."""
        return self.size * {"verify": _VERIFIED, "batch": self.steps}.get(self.kind, 1)


def seconds(work: Callable[[], object], times: int = 1) -> float:
    """Wall time of a number of calls."""
    start = time.perf_counter()
    for _ in range(times):
        work()
    return time.perf_counter() - start


class Stepper:
    """Sequences with random prompts on a backend, continued greedily. Slot s is sequence s."""

    def __init__(self, backend: Backend, chunk: int) -> None:
        self._backend = backend
        self._chunk = chunk
        self._pages = Pages(backend.pages, backend.windows, slots=backend.slots, context=backend.context, chunk=chunk)
        self._random = np.random.default_rng(0)
        self._position = [0] * backend.slots
        self._next = np.zeros(backend.slots, np.int32)

    def read(self, slot: int, rows: int) -> None:
        """Read `rows` prompt tokens, in chunks, and wait for the token that follows them."""
        end = self._position[slot] + rows
        while (left := end - self._position[slot]) > 0:
            count = min(left, self._chunk)
            tokens = self._random.integers(0, self._backend.vocab, count, np.int32)
            self._forward([slot], tokens, count, wanted=int(count == left))

    def verify(self, slot: int, rows: int) -> None:
        """Rows of one sequence whose next tokens are all wanted; the sequence does not advance."""
        tokens = self._random.integers(0, self._backend.vocab, rows, np.int32)
        self._forward([slot], tokens, rows, wanted=rows)
        self._position[slot] -= rows

    def decode(self, slots: Sequence[int]) -> None:
        """One greedy token more for each sequence."""
        self._forward(slots, self._next[list(slots)], 1, wanted=1)

    def place(self, slot: int, position: int) -> None:
        """Let a sequence stand at a position. Its pages hold what they held: time does not depend on it."""
        self._pages.release(slot)
        self._pages.reserve(slot, self._backend.context)
        for at in range(0, position, self._chunk):
            self._pages.extend(slot, at, min(self._chunk, position - at))
        self._position[slot] = position

    def fill(self, slots: Sequence[int], depth: int) -> None:
        """Let sequences read `depth` tokens, so that what `place` finds in their pages are numbers like any others."""
        for slot in slots:
            self.place(slot, 0)
            self.read(slot, depth)

    def _forward(self, slots: Sequence[int], tokens: Int32, rows: int, wanted: int) -> None:
        """`rows` rows of each sequence in one step; the next tokens of the last `wanted` of them are waited for."""
        starts = [self._position[slot] for slot in slots]
        for slot, position in zip(slots, starts, strict=True):
            self._pages.extend(slot, position, rows)
        own = np.arange(len(slots) * rows, dtype=np.int32)
        positions = (np.repeat(starts, rows) + own % rows).astype(np.int32)
        wanted_rows = own[own % rows >= rows - wanted]
        step = Step(
            tokens=tokens,
            positions=positions,
            spans=tuple(
                Span(slot, i * rows, rows, start) for i, (slot, start) in enumerate(zip(slots, starts, strict=True))
            ),
            views=self._pages.views(np.array(slots, np.int32), np.repeat(np.array(slots, np.int32), rows), positions),
            wanted=wanted_rows,
            full=np.zeros(len(wanted_rows), np.bool_),
        )
        output = self._backend.forward(step)
        for slot in slots:
            self._position[slot] += rows
        if wanted:
            self._next[list(slots)] = output.ids[wanted - 1 :: wanted]

    def run(self, test: Workload) -> float:
        """Seconds of one run of a test."""
        slots = range(test.size if test.kind == "batch" else 1)
        for slot in slots:
            self.place(slot, test.depth)
        if test.kind == "prompt":
            return seconds(lambda: self.read(0, test.size))
        if test.kind == "verify":
            return seconds(lambda: self.verify(0, test.size), _VERIFIED)
        return seconds(lambda: self.decode(slots), test.steps if test.kind == "batch" else test.size)
