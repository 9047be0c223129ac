"""The base of drafters that read the target's features: positions whose features are known, and context to append."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from luce.draft.context import CONTEXT_CHUNK, WARM_UP_ROWS, Context
from luce.draft.drafter import Draftable
from luce.draft.feature_window import FeatureWindow, SlotPositions, batches
from luce.draft.target_head import TargetHead
from luce.layers.features import FeatureRing
from luce.ops.matmul import FEW_ROWS
from luce.runtime.step import Span

# More rows that are owed in a proposal are read CONTEXT_CHUNK at a time: those of a prompt.
_MANY_OWED = 8 * FEW_ROWS


class ContextModel(Protocol):
    """A model with a context of each slot's text."""

    context: Context
    #: bytes of its weights, and of its context, on the device
    weights: int
    state: int

    def close(self) -> None:
        """Idempotent."""


class FeatureDrafter:
    """Most of a drafter whose `model` reads `ring`, which the target writes.

    `kind` names the drafter for people; `block`: most tokens of a proposal; `lookahead`: the token that the row of
    position p has read stands at p + lookahead.
    """

    def __init__(
        self, model: ContextModel, ring: FeatureRing, head: TargetHead, *, kind: str, block: int, lookahead: int = 0
    ) -> None:
        self.block = block
        self.context = model.context
        self.window = FeatureWindow(ring)
        #: bytes of the model's weights, and of its context, on the device
        self.weights, self.state = model.weights, model.state
        self._close = model.close
        self._head = head
        self._kind = kind
        self._lookahead = lookahead

    def observe(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self.window.observe(span)
            self.context.rewind(span.slot, max(0, span.position - self._lookahead))

    def forget(self, slot: int) -> None:
        self.window.forget(slot)
        self.context.forget(slot)

    def idle(self) -> None:
        pass

    def describe(self) -> dict[str, str | int]:
        return {"kind": self._kind, "block": self.block, "device": str(self._head.device.name)}

    def close(self) -> None:
        self._close()

    def _ready(self, one: Draftable) -> bool:
        """Whether a text can be drafted for: the features of the position before the seed are in the window."""
        return self.window.has(one.slot, len(one.tokens) - 2)

    def _missing(self, slots: Sequence[int], ends: Sequence[int]) -> Iterator[list[SlotPositions]]:
        """Each slot's positions before an end that its context lacks, as far back as the model sees."""
        missing = [
            (slot, range(self.context.resume(slot, self.window.first(slot), end), end))
            for slot, end in zip(slots, ends, strict=True)
        ]
        return self._pieces(missing)

    def _capture_few(self, append: Callable[[Sequence[SlotPositions]], None]) -> None:
        """Build and capture the steps that append few rows: what a sequence owes after a rest costs its time only."""
        if self._head.device.captures:
            for rows in 2 * WARM_UP_ROWS:
                append([SlotPositions(0, np.arange(rows, dtype=np.int32))])
            self.context.forget(0)

    def _pieces(self, ranges: Sequence[tuple[int, range]]) -> Iterator[list[SlotPositions]]:
        """Slots' positions in steps that append them: of few rows where a prompt is not among them, since a device
        builds and captures each further number of rows anew."""
        rows = sum(len(positions) for _, positions in ranges)
        return batches(ranges, CONTEXT_CHUNK if rows > _MANY_OWED else FEW_ROWS)
