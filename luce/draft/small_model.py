"""Drafting by a small model of any family that has the target's vocabulary: it continues the text greedily."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from luce.draft.context import CONTEXT_CHUNK, Context, PageRing
from luce.draft.drafter import Draftable, PendingProposals
from luce.draft.feature_window import batches
from luce.draft.probabilities import draft_one_by_one
from luce.errors import LuceError, ModelError
from luce.gguf.metadata import Metadata
from luce.gguf.reader import GGUFFile
from luce.layers.tensors import tensor_bytes
from luce.layers.weight_pool import WeightPool
from luce.models.spec import ModelSpec
from luce.runtime.device import Device
from luce.runtime.step import Int32, Output, Span, Step
from luce.shard.local import LocalShard
from luce.shard.saved_state import SavedState
from luce.shard.shard_options import DeviceLayers, ShardOptions
from luce.shard.sizes import state_bytes

_TOKENS = "tokenizer.ggml.tokens"


def check_tokens(file: GGUFFile, target: Metadata) -> None:
    """Raises ModelError unless a file has the target's vocabulary."""
    if file.metadata.strings(_TOKENS) != target.strings(_TOKENS):
        raise ModelError(f"{file.paths[0]}: has another vocabulary than {target.path}, so it cannot draft for it")


def model_bytes(file: GGUFFile, spec: ModelSpec, device: Device, *, slots: int, context: int) -> tuple[int, int]:
    """Bytes of a ModelDrafter's weights and context."""
    layers = range(len(spec.layers))
    size = state_bytes(device, spec, layers, ShardOptions(slots))
    pages = [slots * ring.pages for ring in _rings(spec, context)]
    return tensor_bytes(file, spec, layers, device), size.total(pages, slots)


def _rings(spec: ModelSpec, context: int) -> list[PageRing]:
    """Of each page group."""
    context = min(context, spec.context_length)
    return [PageRing(min(group.window or context, context), CONTEXT_CHUNK) for group in spec.page_groups]


class ModelDrafter:
    """Proposes up to `block` tokens by a model on `device`, which sees the last `context` positions or somewhat more.

    `weights`: shares them with others.
    """

    block = 8

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        device: Device,
        *,
        slots: int,
        context: int,
        weights: WeightPool | None = None,
    ) -> None:
        self._device = device
        self._longest = spec.context_length
        self._context = Context(_rings(spec, context), slots)
        self._recurrent = spec.recurrent
        layers = range(len(spec.layers))
        self.shard = LocalShard(
            file, spec, DeviceLayers(device, layers, pool=weights), ShardOptions(slots), self._context.pages
        )
        self._no_pages: list[list[int]] = [[] for _ in spec.page_groups]
        #: the tokens at each slot's cached positions
        self._tokens = [np.empty(0, np.int32)] * slots
        #: bytes of the weights, and of the context, on the device
        self.weights, self.state = self.shard.info.weights, self.shard.info.state

    def observe(self, spans: Sequence[Span]) -> None:
        # `propose` compares the text with the cached tokens.
        pass

    def propose(self, asked: Sequence[Draftable]) -> PendingProposals:
        slots = [one.slot for one in asked]
        texts = {one.slot: one.tokens for one in asked}
        for parts in batches([(one.slot, self._missing(one)) for one in asked], CONTEXT_CHUNK):
            tokens = np.concatenate([texts[part.slot][part.positions] for part in parts])
            counts = [len(part.positions) for part in parts]
            self._run([part.slot for part in parts], counts, tokens, candidates=False)
            self._context.commit([part.slot for part in parts], counts)
        saved: list[SavedState] = []

        def run(depth: int, tokens: Int32) -> Output:
            output = self._run(slots, [1] * len(slots), tokens, behind=depth)
            if depth == 0 and self._recurrent:
                # The seed is committed; the tokens that follow it may be rejected.
                saved.extend(self.shard.state.save(slot, self._no_pages) for slot in slots)
            return output

        proposals = draft_one_by_one(asked, self.block, run)
        for slot, state in zip(slots, saved, strict=False):
            self.shard.state.restore(slot, self._no_pages, state)
        self._context.commit(slots, [1] * len(slots))
        for one in asked:
            self._tokens[one.slot] = one.tokens[self._context.cached(one.slot).start :].copy()
        return lambda: proposals

    def forget(self, slot: int) -> None:
        self._context.forget(slot)

    def idle(self) -> None:
        pass

    def describe(self) -> dict[str, str | int]:
        return {"kind": "model", "block": self.block, "device": str(self._device.name)}

    def close(self) -> None:
        # Whoever shares the weights may release them next, and the memory goes to work on another stream.
        with contextlib.suppress(LuceError):
            self._device.synchronize()
        self.shard.close()

    def _rewind(self, one: Draftable) -> None:
        """Drop cached positions whose tokens differ from the text's, or that are not before its seed."""
        cached, tokens = self._context.cached(one.slot), self._tokens[one.slot]
        text = one.tokens[cached.start : min(cached.stop, len(one.tokens) - 1)]
        count = min(len(text), len(tokens))
        other = np.flatnonzero(tokens[:count] != text[:count])
        end = cached.start + int(other[0] if len(other) else count)
        if self._recurrent and end < cached.stop:
            self._context.forget(one.slot)
        self._context.rewind(one.slot, end)

    def _missing(self, one: Draftable) -> range:
        """The positions before the seed that the model has not cached."""
        end = len(one.tokens) - 1
        self._rewind(one)
        if end + self.block - self._context.cached(one.slot).start > self._longest:
            # Beyond the trained length: start again with half of it.
            self._context.forget(one.slot, max(0, end - self._longest // 2))
        return range(self._context.resume(one.slot, 0, end), end)

    def _run(
        self, slots: Sequence[int], counts: Sequence[int], tokens: Int32, *, behind: int = 0, candidates: bool = True
    ) -> Output:
        rows = np.arange(len(tokens) if candidates else 0, dtype=np.int32)
        step: Step = self._context.step(slots, counts, tokens, rows, behind=behind, candidates=candidates)
        pending = self.shard.forward(step, None)
        assert callable(pending)
        return pending()
