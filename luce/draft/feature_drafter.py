"""What drafters have in common that read the target's features: which of a text they know, and what they are still to
be told of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from luce.draft.context import CONTEXT_CHUNK, Context
from luce.draft.drafter import Draftable
from luce.draft.feature_window import FeatureWindow, SlotPositions, batches
from luce.draft.target_head import TargetHead
from luce.layers.features import FeatureRing
from luce.runtime.step import Span


class ContextModel(Protocol):
    """A model that remembers rows of each slot's text."""

    context: Context

    def close(self) -> None:
        """Idempotent."""


class FeatureDrafter:
    """Most of a drafter whose `model` reads `ring`, which the target fills.

    block      most tokens that it proposes
    kind       its name, for people
    lookahead  how many positions behind its own the last token lies that a remembered row has read
    """

    def __init__(
        self, model: ContextModel, ring: FeatureRing, ends: TargetHead, *, kind: str, block: int, lookahead: int = 0
    ) -> None:
        self.block = block
        self._context = model.context
        self._close = model.close
        self._window = FeatureWindow(ring)
        self._ends = ends
        self._kind = kind
        self._lookahead = lookahead

    def observe(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self._window.observe(span)
            self._context.rewind(span.slot, max(0, span.position - self._lookahead))

    def forget(self, slot: int) -> None:
        self._window.forget(slot)
        self._context.forget(slot)

    def idle(self) -> None:
        pass

    def describe(self) -> dict[str, str | int]:
        return {"kind": self._kind, "block": self.block, "device": str(self._ends.device.name)}

    def close(self) -> None:
        self._close()

    def _ready(self, one: Draftable) -> bool:
        """Whether all that a guess needs is known of a text: the features of the position before the seed."""
        return self._window.has(one.slot, len(one.tokens) - 2)

    def _owed(self, slots: Sequence[int], ends: Sequence[int]) -> Iterator[list[SlotPositions]]:
        """What the model does not remember yet of each slot's positions before an end, as far back as it sees."""
        owed = [
            (slot, range(self._context.resume(slot, self._window.first(slot), end), end))
            for slot, end in zip(slots, ends, strict=True)
        ]
        return batches(owed, CONTEXT_CHUNK)
