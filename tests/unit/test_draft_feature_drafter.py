"""What a drafter reads of the target's features after a rest: every row once, in steps of a few shapes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from luce.draft.context import CONTEXT_CHUNK, Context, PageRing, of_few_sizes
from luce.draft.feature_drafter import FeatureDrafter
from luce.runtime.step import PAGE, Span, StepShape

SLOTS, SEEN = 3, 2048
RINGS = (PageRing(SEEN, CONTEXT_CHUNK), PageRing(24, CONTEXT_CHUNK, both=True))


class Owing(FeatureDrafter):
    """A drafter whose context is appended to, without a model."""

    def __init__(self) -> None:
        model = SimpleNamespace(context=Context(RINGS, SLOTS), weights=0, state=0, close=lambda: None)
        ring = SimpleNamespace(slots=SLOTS, capacity=4096)
        super().__init__(model, ring, None, kind="", block=7)  # type: ignore[arg-type]
        self.shapes: list[StepShape] = []
        #: of each slot the positions whose keys and values lie in the pages of a ring now
        self.written = [{ring: dict[int, int]() for ring in range(len(RINGS))} for _ in range(SLOTS)]

    def append(self, ends: dict[int, int]) -> None:
        """Read all features before these positions of the slots."""
        for slot, end in ends.items():
            at = self.window.positions(slot).stop
            self.observe([Span(slot, 0, end - at, at)])
        for parts in self._missing(list(ends), list(ends.values())):
            slots, counts = [part.slot for part in parts], [len(part.positions) for part in parts]
            rows = of_few_sizes(self.window.ring_rows(parts))
            step = self.context.append_step(slots, counts, rows)
            places = [place for slot, n in zip(slots, counts, strict=True) for place in [slot] * n]
            for index, view in enumerate(step.views):
                assert len(set(view.dest.tolist())) == len(view.dest)
                for slot, position, to, row in zip(places, step.positions, view.dest, rows, strict=False):
                    assert row == slot * 4096 + position
                    self.written[slot][index][int(to) - slot * RINGS[index].pages * PAGE] = int(position)
            self.context.commit(slots, counts)
            self.shapes.append(StepShape.of(step))


@pytest.mark.parametrize("rests", [(0,), (0, 2), (1, 0, 2)])
def test_owed_rows_of_every_number_are_steps_of_the_same_shapes(rests: tuple[int, ...]) -> None:
    drafter, random = Owing(), np.random.default_rng(len(rests))
    ends = dict.fromkeys(rests, 40)
    drafter.append(ends)
    for _ in range(60):
        for slot in rests:
            ends[slot] += int(random.integers(1, 128 // len(rests)))
        drafter.append(ends)
    assert {shape.rows for shape in drafter.shapes} == {1, 2, 4, 8, 16}
    assert len(set(drafter.shapes)) == 5
    for slot in rests:
        for index, ring in enumerate(RINGS):
            # What later rows see of the text is there, each position in its place.
            found = drafter.written[slot][index]
            seen = range(max(0, ends[slot] - ring.seen), ends[slot])
            assert [found[position % (ring.pages * PAGE)] for position in seen] == list(seen)


def test_a_prompt_is_read_in_long_steps() -> None:
    drafter = Owing()
    drafter.append({0: 1300, 1: 200})
    assert [shape.rows for shape in drafter.shapes] == [512, 512, 476]
    assert drafter.context.cached(0) == range(1300) and drafter.context.cached(1) == range(200)


def test_rows_behind_the_text_are_written_anew() -> None:
    """A step has more rows than are owed: they stand behind the text, where the next ones overwrite them."""
    context = Context(RINGS[:1], 2)
    step = context.append_step([1, 0], [3, 2], np.arange(8, dtype=np.int32))
    context.commit([1, 0], [3, 2])
    first = RINGS[0].pages * PAGE
    assert step.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert step.views[0].dest.tolist() == [first, first + 1, first + 2, 0, 1, 2, 3, 4]
    assert [context.cached(slot) for slot in (0, 1)] == [range(2), range(3)]
    following = context.append_step([0], [1], np.zeros(1, np.int32))
    assert following.positions.tolist() == [2] and following.views[0].dest.tolist() == [2]
