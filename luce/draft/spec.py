"""A drafter with weights as settings and files describe it, before it has a device."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from luce.backend.model_work import head_work, model_work, weight_tensors
from luce.backend.serving_options import ServingOptions
from luce.draft.dflash.correction import SELECTOR_BEFORE
from luce.draft.dflash.dialect import translated
from luce.draft.dflash.drafter import DFlashDrafter
from luce.draft.dflash.model import DFlashModel, draft_bytes, draft_layers
from luce.draft.dflash.safetensors import is_checkpoint, open_checkpoint
from luce.draft.dflash.spec import DFlashSpec, read_dflash
from luce.draft.drafter import Drafter
from luce.draft.mtp import MTP_BLOCK, MTPDrafter, MTPModel, captured, mtp_bytes, mtp_layer
from luce.draft.small_model import ModelDrafter, check_tokens, model_bytes
from luce.draft.target_head import TargetHead
from luce.errors import ModelError, UsageError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.quants import dequantize
from luce.gguf.reader import GGUFFile, TensorInfo, open_gguf
from luce.layers.features import FeatureRing
from luce.layers.tensors import EMBEDDING
from luce.layers.weight_pool import WeightPool
from luce.models.dflash import ARCHITECTURES
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.models.spec import ModelSpec
from luce.planner.draft_time import DraftWork
from luce.runtime.device import Device

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """The model that is drafted for."""

    file: GGUFFile
    spec: ModelSpec
    slots: int
    #: positions that the drafter sees
    context: int
    #: shares the weights of small models
    weights: WeightPool | None = None

    def ring_bytes(self, layers: Sequence[int]) -> int:
        """Bytes of a ring for the features of these layers."""
        return 2 * self.slots * self.context * len(layers) * self.spec.hidden

    def ring(self, device: Device, layers: Sequence[int]) -> FeatureRing:
        """A ring for the features of these layers."""
        return FeatureRing(device, layers, self.spec.hidden, slots=self.slots, capacity=self.context)


#: What it computes on a device for a proposal of so many tokens, and its weights.
Work = Callable[[Device, int], tuple[DraftWork, tuple[TensorInfo, ...]]]
#: Makes the drafter on a device, from its ring on the same device and the target's head, each None if it reads none.
MakeDrafter = Callable[[Device, FeatureRing | None, TargetHead | None], Drafter]


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter without a device."""

    #: dflash, mtp or model
    kind: str
    #: of its file, empty if that is the target's
    path: str
    #: most tokens of a proposal
    block: int
    #: layers of the target whose output it reads; none if it reads only tokens
    layers: tuple[int, ...]
    #: it borrows the target's embedding and head
    borrows_head: bool
    make: MakeDrafter
    #: of its file, as luce.gguf.fingerprint
    digest: Callable[[], str]
    #: bytes of its weights, and of its context, on a device
    bytes: Callable[[Device], tuple[int, int]]
    work: Work
    #: it proposes trees on request
    trees: bool = False
    #: whose weights small models of the same file share; None if none can
    shared: GGUFFile | None = None

    @property
    def facts(self) -> dict[str, str | int]:
        """For people."""
        return {"kind": self.kind, **({"file": self.path} if self.path else {})}


def read_drafter(opened: contextlib.ExitStack, target: Target, draft: str, window: int) -> DrafterSpec:
    """The spec of a --draft that has weights; `window` is --draft-swa. `opened` closes the file.

    Raises UsageError for a window that the drafter cannot use, and ModelError, FormatError or UnsupportedError naming
    the file.
    """
    if draft == "mtp":
        return _mtp(target, window)
    path = Path(draft).expanduser()
    file = translated(opened.enter_context(open_checkpoint(path) if is_checkpoint(path) else open_gguf(path)))
    source = Source(str(path), file.metadata, file.tensors)
    if source.architecture in ARCHITECTURES:
        return _dflash(target, file, read_dflash(source, window=window))
    if window:
        raise UsageError(f"--draft-swa: {path} is not a DFlash draft", param="draft_swa")
    return _model(target, file, read_spec(source))


def _dflash(target: Target, file: GGUFFile, spec: DFlashSpec) -> DrafterSpec:
    layers = spec.captured(target.spec)
    mask = _mask(target, spec)
    if spec.correction is not None and spec.correction.vocab != target.spec.vocab:
        head = spec.correction
        if head.kind == "selector":
            raise ModelError(
                f"{spec.path}: tensor {SELECTOR_BEFORE} is for {head.vocab} tokens; the model has {target.spec.vocab}"
            )
        _log.warning(
            "%s: its %s head is for %d tokens, but the model has %d: the draft runs without the head",
            spec.path,
            head.kind,
            head.vocab,
            target.spec.vocab,
        )
        spec = replace(spec, correction=None)
    if spec.target_scale:
        spec = replace(spec, embedding_scale=spec.embedding_scale * target.spec.embedding_scale)
    # A draft is hardly ever right behind more positions than it was trained with.
    slots, context = target.slots, min(target.context, spec.context_length)

    def make(device: Device, ring: FeatureRing | None, head: TargetHead | None) -> Drafter:
        assert ring is not None and head is not None
        sizes = {"slots": slots, "context": context}
        model = DFlashModel(file, spec, device, **sizes, rows=ring.rows, mask=mask, embedding=head.embedding)
        return DFlashDrafter(model, ring, head)

    def size(device: Device) -> tuple[int, int]:
        return draft_bytes(file, spec, device, slots=slots, context=context)

    def work(device: Device, tokens: int) -> tuple[DraftWork, tuple[TensorInfo, ...]]:
        # A pass computes the whole block, however many tokens are wanted.
        own = draft_layers(file, spec, device)
        infos = tuple(weight_tensors(file, spec.model))
        return DraftWork(own, head_work(target.file, target.spec, device), 1, spec.block, context), infos

    return DrafterSpec(
        "dflash", spec.path, spec.block - 1, layers, True, make, lambda: fingerprint(file), size, work, trees=True
    )


def _mtp(target: Target, window: int) -> DrafterSpec:
    if window:
        raise UsageError("--draft-swa: mtp is not a DFlash draft", param="draft_swa")
    if not target.spec.skipped_layers:
        raise ModelError(f"{target.file.paths[0]}: --draft mtp: has no layer for multi-token prediction")

    def make(device: Device, ring: FeatureRing | None, head: TargetHead | None) -> Drafter:
        assert ring is not None and head is not None
        slots, context = target.slots, target.context
        model = MTPModel(target.file, target.spec, device, slots=slots, context=context, rows=ring.rows)
        return MTPDrafter(model, ring, head)

    def size(device: Device) -> tuple[int, int]:
        return mtp_bytes(target.file, target.spec, device, slots=target.slots, context=target.context)

    def work(device: Device, tokens: int) -> tuple[DraftWork, tuple[TensorInfo, ...]]:
        layer, infos = mtp_layer(target.file, target.spec, device)
        head = head_work(target.file, target.spec, device)
        return DraftWork((layer,), head, min(tokens, MTP_BLOCK), 1, target.context), infos

    return DrafterSpec("mtp", "", MTP_BLOCK, captured(target.spec), True, make, lambda: "", size, work)


def _model(target: Target, file: GGUFFile, spec: ModelSpec) -> DrafterSpec:
    check_tokens(file, target.file.metadata)

    def make(device: Device, ring: FeatureRing | None, head: TargetHead | None) -> Drafter:
        return ModelDrafter(file, spec, device, slots=target.slots, context=target.context, weights=target.weights)

    def size(device: Device) -> tuple[int, int]:
        return model_bytes(file, spec, device, slots=target.slots, context=target.context)

    def work(device: Device, tokens: int) -> tuple[DraftWork, tuple[TensorInfo, ...]]:
        own = model_work(file, spec, device, ServingOptions(target.slots))
        passes, context = min(tokens, ModelDrafter.block), min(target.context, spec.context_length)
        return DraftWork(own.layers, own.head, passes, 1, context), tuple(weight_tensors(file, spec))

    path, block = str(file.paths[0]), ModelDrafter.block
    return DrafterSpec("model", path, block, (), False, make, lambda: fingerprint(file), size, work, shared=file)


def _mask(target: Target, spec: DFlashSpec) -> NDArray[np.float32]:
    """The row of the target's embedding that masked rows begin with. Raises ModelError if the target has no such
    token."""
    if spec.mask_embedding:
        return np.zeros(spec.hidden, np.float32)
    token = spec.mask_token if spec.mask_token is not None else target.spec.mask_token
    if token is None or not 0 <= token < target.spec.vocab:
        raise ModelError(f"{spec.path}: dflash.mask_token_id {token} is not a token of the model")
    table = target.file.tensors[EMBEDDING]
    row = dequantize(target.file.rows(EMBEDDING)[token : token + 1], table.type)
    return row.reshape(-1)
