"""Drafting by a DFlash draft: one forward of the draft computes a block of tokens behind the seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from luce.draft.coupled_draws import Draws
from luce.draft.dflash.correction import F32, F64, corrected, lattice_scores, take_first
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
        self._capture_few(self._append)

    def observe(self, spans: Sequence[Span]) -> None:
        super().observe(spans)
        # A GPU appends the rows of a verification at once, rejected ones too, while the host learns which are accepted.
        ahead = [] if self._head.device.host else [span for span in spans if self._follows(span)]
        for parts in self._pieces([(span.slot, range(span.position, span.position + span.rows)) for span in ahead]):
            self._append(parts)

    def propose(self, asked: Sequence[Draftable]) -> PendingProposals:
        proposals = [Proposal()] * len(asked)
        ready = [index for index, one in enumerate(asked) if self._ready(one)]
        if not ready:
            return lambda: proposals
        slots = [asked[index].slot for index in ready]
        for parts in self._missing(slots, [len(asked[index].tokens) - 1 for index in ready]):
            self._append(parts)
        seeds = np.array([asked[index].tokens[-1] for index in ready], np.int32)
        rows = self._model.draft_block(slots, seeds if self._model.embeds else self._head.embed(seeds))
        correction, spec = self._model.correction, self._spec
        read = None if correction is None else self._head.device.fetch(correction.read(rows))
        draws = Draws([asked[index].draw for index in ready], [len(asked[index].tokens) for index in ready])
        # A greedy proposal that is not a tree takes the likeliest token of each position.
        top = MAX_CANDIDATES if draws.any or any(one.max_depth for one in asked) else 1
        top = top if correction is None else correction.top
        pending = self._head.project(rows, top=top, scale=spec.logit_scale, softcap=spec.logit_softcap)

        def wait() -> list[Proposal]:
            best = pending().candidates
            assert best is not None
            texts = (len(ready), self.block, -1)
            scores = log_probabilities(best, scale=spec.logit_scale, softcap=spec.logit_softcap).reshape(texts)
            z = None if read is None else read().reshape(texts)
            found = self._proposed([asked[index] for index in ready], seeds, z, best.ids.reshape(texts), scores, draws)
            for index, proposal in zip(ready, found, strict=True):
                proposals[index] = proposal
            return proposals

        return wait

    def _proposed(
        self, asked: Sequence[Draftable], seeds: Int32, z: F32 | None, ids: Int32, scores: F64, draws: Draws
    ) -> list[Proposal]:
        """The proposals for texts: seeds int32 [texts], z as luce.draft.dflash.correction takes it, and the candidates
        of each position, ids int32 and log probabilities float64 [texts, positions, k]."""
        correction, confidence = self._model.correction, None
        pairwise: dict[int, tuple[Int32, F64]] = {}
        # The noise of a tree's branches is added to all candidates.
        choose = draws.choose if draws.any and not any(one.max_depth for one in asked) else None
        if correction is not None and z is not None:
            for row, one in enumerate(asked):
                if one.max_depth:
                    pairs = lattice_scores(correction, int(seeds[row]), z[row], ids[row], scores[row])
                    if pairs is not None:
                        pairwise[row] = ids[row], pairs
            ids, scores, confidence = corrected(correction, seeds, z, ids, scores, self._head.embed, choose)
        elif choose is not None:
            ids, scores = ids.copy(), scores.copy()
            take_first(ids, scores, slice(0, self.block), choose)
        found = []
        for row, one in enumerate(asked):
            depth = min(self.block, one.max_depth or one.max_tokens)
            if one.max_depth:
                candidates, pairs = pairwise.get(row, (ids[row], scores[row][:, None]))
                pairs = draws.perturbed(row, candidates[:depth], pairs[:depth])
                found.append(_tree(candidates[:depth], pairs, one.max_tokens))
                continue
            # A head's confidence is that of the likeliest token.
            sure = None if confidence is None or draws.drawn[row] else confidence[row]
            probabilities = np.exp(scores[row, :, 0]) if sure is None else sure
            found.append(Proposal(ids[row, :depth, 0].tolist(), probabilities[:depth].tolist()))
        return found

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
