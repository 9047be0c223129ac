"""Drafting by a DFlash draft: one forward of the draft computes a block of tokens behind the seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from luce.draft.dflash.correction import F64, corrected, lattice_scores
from luce.draft.dflash.model import DFlashModel
from luce.draft.dflash.tree import likeliest
from luce.draft.drafter import Draftable, PendingProposals, Proposal
from luce.draft.feature_drafter import FeatureDrafter
from luce.draft.feature_window import SlotPositions
from luce.draft.probabilities import log_probabilities
from luce.draft.target_head import TargetHead
from luce.layers.features import FeatureRing
from luce.runtime.step import MAX_CANDIDATES, Int32, Span


class DFlashDrafter(FeatureDrafter):
    """Proposes by a model that reads `ring`, which the target writes."""

    def __init__(self, model: DFlashModel, ring: FeatureRing, head: TargetHead) -> None:
        super().__init__(model, ring, head, kind="dflash", block=model.spec.block - 1)
        self._spec = model.spec
        self._model = model

    def observe(self, spans: Sequence[Span]) -> None:
        super().observe(spans)
        # A GPU appends the rows of a verification at once, rejected ones too, while the host learns which are accepted.
        ahead = [] if self._head.device.host else [span for span in spans if self._follows(span)]
        if ahead:
            rows = [np.arange(span.position, span.position + span.rows, dtype=np.int32) for span in ahead]
            self._append([SlotPositions(span.slot, own) for span, own in zip(ahead, rows, strict=True)])

    def propose(self, asked: Sequence[Draftable]) -> PendingProposals:
        proposals = [Proposal()] * len(asked)
        ready = [index for index, one in enumerate(asked) if self._ready(one)]
        if not ready:
            return lambda: proposals
        slots = [asked[index].slot for index in ready]
        for parts in self._missing(slots, [len(asked[index].tokens) - 1 for index in ready]):
            self._append(parts)
        seeds = np.array([asked[index].tokens[-1] for index in ready], np.int32)
        rows = self._model.draft_block(slots, self._head.embed(seeds))
        correction, spec = self._model.correction, self._spec
        read = None if correction is None else self._head.device.fetch(correction.read(rows))
        # A proposal that is not a tree takes the likeliest token of each position.
        top = MAX_CANDIDATES if any(one.max_depth for one in asked) else 1
        top = top if correction is None else correction.top
        pending = self._head.project(rows, top=top, scale=spec.logit_scale, softcap=spec.logit_softcap)

        def wait() -> list[Proposal]:
            best = pending().candidates
            assert best is not None
            texts = (len(ready), self.block, -1)
            scores = log_probabilities(best, scale=spec.logit_scale, softcap=spec.logit_softcap).reshape(texts)
            ids, confidence = best.ids.reshape(texts), None
            pairwise: dict[int, tuple[Int32, F64]] = {}
            if correction is not None and read is not None:
                z = read().reshape(texts)
                for row, index in enumerate(ready):
                    pairs = None
                    if asked[index].max_depth:
                        pairs = lattice_scores(correction, int(seeds[row]), z[row], ids[row], scores[row])
                    if pairs is not None:
                        pairwise[row] = ids[row], pairs
                ids, scores, confidence = corrected(correction, seeds, z, ids, scores, self._head.embed)
            for row, index in enumerate(ready):
                one = asked[index]
                own = row, slice(min(self.block, one.max_depth or one.max_tokens))
                if one.max_depth:
                    candidates, pairs = pairwise.get(row, (ids[row], scores[row][:, None]))
                    proposals[index] = _tree(candidates[own[1]], pairs[own[1]], one.max_tokens)
                else:
                    probabilities = np.exp(scores[own][:, 0]) if confidence is None else confidence[own]
                    proposals[index] = Proposal(ids[own][:, 0].tolist(), probabilities.tolist())
            return proposals

        return wait

    def _follows(self, span: Span) -> bool:
        """Whether a span verifies a proposal without branches, right behind its slot's context, with features in the
        ring."""
        linear = span.speculative and not span.ancestors
        stop = self._model.context.cached(span.slot).stop
        return linear and stop == span.position and self.window.has(span.slot, stop)

    def _append(self, parts: Sequence[SlotPositions]) -> None:
        counts = [len(part.positions) for part in parts]
        self._model.append_context([part.slot for part in parts], counts, self.window.ring_rows(parts))


def _tree(ids: Int32, scores: F64, budget: int) -> Proposal:
    """The `budget` likeliest texts: ids [positions, k] of each position's likeliest tokens, scores as `likeliest` takes
    them."""
    nodes = likeliest(scores, budget)
    before = [nodes[node.parent].candidate if node.parent >= 0 and scores.shape[1] > 1 else 0 for node in nodes]
    return Proposal(
        [int(ids[node.depth, node.candidate]) for node in nodes],
        [float(np.exp(scores[node.depth, row, node.candidate])) for node, row in zip(nodes, before, strict=True)],
        [node.parent for node in nodes],
    )
