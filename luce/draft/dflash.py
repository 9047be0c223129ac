"""Drafting by a DFlash draft: one forward of the draft fills a block behind the seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from luce.draft.chances import chances
from luce.draft.drafter import Draftable, Proposal
from luce.draft.ends import Ends
from luce.draft.features import Known, batches
from luce.draft.model import PIECE, DraftModel
from luce.layers.features import FeatureRing
from luce.runtime.step import Span


class DFlashDrafter:
    """Proposes by a model that reads `ring`, which the target fills."""

    def __init__(self, model: DraftModel, ring: FeatureRing, ends: Ends) -> None:
        self.block = model.spec.block - 1
        self._spec = model.spec
        self._model = model
        self._known = Known(ring)
        self._ends = ends

    def observe(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self._known.observe(span)
            self._model.context.rewind(span.slot, span.position)

    def propose(self, asked: Sequence[Draftable]) -> Sequence[Proposal]:
        proposals = [Proposal()] * len(asked)
        ready = [index for index, one in enumerate(asked) if self._known.has(one.slot, len(one.tokens) - 2)]
        if not ready:
            return proposals
        slots = [asked[index].slot for index in ready]
        self._catch_up(slots, [len(asked[index].tokens) - 1 for index in ready])
        seeds = np.array([asked[index].tokens[-1] for index in ready], np.int32)
        output = self._ends.project(self._model.fill(slots, self._ends.embed(seeds)))
        assert output.top is not None
        sure = chances(output.top, scale=self._spec.logit_scale, softcap=self._spec.logit_softcap)
        for row, index in enumerate(ready):
            own = slice(row * self.block, row * self.block + min(self.block, asked[index].most))
            proposals[index] = Proposal(output.ids[own].tolist(), sure[own].tolist())
        return proposals

    def forget(self, slot: int) -> None:
        self._known.forget(slot)
        self._model.context.forget(slot)

    def idle(self) -> None:
        pass

    def describe(self) -> dict[str, str | int]:
        return {"kind": "dflash", "block": self._spec.block, "device": str(self._ends.device.name)}

    def close(self) -> None:
        self._model.close()

    def _catch_up(self, slots: Sequence[int], committed: Sequence[int]) -> None:
        """Let the model remember what it does not yet of each slot's text, as far back as it sees."""
        owed = [
            (slot, range(self._model.context.resume(slot, self._known.first(slot), end), end))
            for slot, end in zip(slots, committed, strict=True)
        ]
        for parts in batches(owed, PIECE):
            counts = [len(part.positions) for part in parts]
            self._model.remember([part.slot for part in parts], counts, self._known.places(parts))
