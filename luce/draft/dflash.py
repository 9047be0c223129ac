"""Drafting by a DFlash draft: one forward of the draft fills a block behind the seed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from luce.draft.chances import chances
from luce.draft.drafter import Draftable, Proposal
from luce.draft.ends import Ends
from luce.draft.features import Known, batches
from luce.draft.model import PIECE, DraftModel
from luce.draft.spec import DraftSpec
from luce.layers.features import FeatureRing
from luce.runtime.step import Span

_log = logging.getLogger(__name__)


class DFlashDrafter:
    """Proposes by the model that `load` makes.

    ring   the features that the target captures for the draft
    keep   whether the model stays loaded while no sequence runs
    facts  for `describe`, beside what the draft itself knows
    """

    def __init__(
        self,
        spec: DraftSpec,
        load: Callable[[], DraftModel],
        ring: FeatureRing,
        ends: Ends,
        *,
        keep: bool = True,
        facts: dict[str, str | int] | None = None,
    ) -> None:
        self.block = spec.block - 1
        self._spec = spec
        self._load = load
        self._ends = ends
        self._keep = keep
        self._facts = dict(facts or {})
        self._known = Known(ring)
        self._model: DraftModel | None = load()

    def observe(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self._known.observe(span)
            if self._model is not None:
                self._model.context.rewind(span.slot, span.position)

    def propose(self, asked: Sequence[Draftable]) -> Sequence[Proposal]:
        proposals = [Proposal()] * len(asked)
        ready = [index for index, one in enumerate(asked) if self._known.has(one.slot, len(one.tokens) - 2)]
        if not ready:
            return proposals
        model = self._model = self._model or self._load()
        slots = [asked[index].slot for index in ready]
        self._catch_up(model, slots, [len(asked[index].tokens) - 1 for index in ready])
        seeds = np.array([asked[index].tokens[-1] for index in ready], np.int32)
        output = self._ends.project(model.fill(slots, self._ends.embed(seeds)))
        assert output.top is not None
        sure = chances(output.top, scale=self._spec.logit_scale, softcap=self._spec.logit_softcap)
        for row, index in enumerate(ready):
            own = slice(row * self.block, row * self.block + min(self.block, asked[index].most))
            proposals[index] = Proposal(output.ids[own].tolist(), sure[own].tolist())
        return proposals

    def forget(self, slot: int) -> None:
        self._known.forget(slot)
        if self._model is not None:
            self._model.context.forget(slot)

    def idle(self) -> None:
        if not self._keep and self._model is not None:
            self._model.close()
            self._model = None
            _log.info("the draft's memory is released until it is wanted")

    def describe(self) -> dict[str, str | int]:
        own: dict[str, str | int] = {"kind": "dflash", "block": self._spec.block, "device": str(self._ends.device.name)}
        return own | self._facts | {"loaded": "no" if self._model is None else "yes"}

    def close(self) -> None:
        if self._model is not None:
            self._model.close()
            self._model = None

    def _catch_up(self, model: DraftModel, slots: Sequence[int], committed: Sequence[int]) -> None:
        """Let the model remember what it does not yet of each slot's text, as far back as it sees."""
        owed = [
            (slot, range(model.context.resume(slot, self._known.first(slot), end), end))
            for slot, end in zip(slots, committed, strict=True)
        ]
        for parts in batches(owed, PIECE):
            counts = [len(part.positions) for part in parts]
            model.remember([part.slot for part in parts], counts, self._known.places(parts))
