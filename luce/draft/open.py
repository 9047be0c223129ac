"""The drafter that settings name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from luce.backend.shard import Shard
from luce.config import Config
from luce.draft.dflash import DFlashDrafter
from luce.draft.drafter import Drafter
from luce.draft.ends import Ends
from luce.draft.model import DraftModel
from luce.draft.mtp import MTPDrafter, MTPModel, captured
from luce.draft.ngram import NgramDrafter
from luce.draft.plain import ModelDrafter, check_tokens
from luce.draft.resident import ResidentDrafter
from luce.draft.safetensors import is_checkpoint, open_checkpoint
from luce.draft.spec import ARCHITECTURES, DraftSpec, read_draft
from luce.errors import ModelError, UsageError
from luce.gguf.quants import dequantize
from luce.gguf.reader import GGUFFile, open_gguf
from luce.layers.build import EMBEDDING
from luce.layers.features import FeatureRing
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.models.spec import ModelSpec
from luce.ops.deltanet import RECURRENT_ROWS
from luce.runtime.device import Device
from luce.runtime.open import named, open_device

#: tokens that drafts of these families begin with behind the seed, where their files do not say
_MASKS = {"qwen35": 248070, "qwen35moe": 248070, "gemma4": 4, "laguna": 12}


@dataclass(frozen=True)
class Prepared:
    """A drafter that is still without its target.

    ring  where the target leaves what the drafter reads of it, None if that is nothing
    open  the drafter, for the target's first and last shard; whoever calls it closes the drafter
    """

    ring: FeatureRing | None
    open: Callable[[Shard, Shard], Drafter]


def verified_rows(config: Config) -> int:
    """Most rows of a sequence that are verified at once, 0 if nothing is drafted."""
    return (config.verify_width or RECURRENT_ROWS) if config.draft else 0


def open_drafter(
    opened: contextlib.ExitStack,
    config: Config,
    file: GGUFFile,
    spec: ModelSpec,
    devices: Sequence[Device],
    *,
    context: int,
) -> Prepared | None:
    """What --draft names for a target of `context` positions on `devices`; None if nothing is to be drafted.

    `opened` closes files and devices that only the drafter has. Raises UsageError, and ModelError or DeviceError naming
    the file or the device that cannot be used.
    """
    if not config.draft:
        return None
    if config.draft == "ngram":
        ngram = NgramDrafter(block=verified_rows(config) - 1 or 1)
        return Prepared(None, lambda first, last: ngram)
    device = _device(opened, config, devices)
    wanted = _Wanted(config, file, spec, device, min(context, config.draft_ctx_max))
    if config.draft == "mtp":
        return _mtp(wanted)
    path = Path(config.draft).expanduser()
    draft = opened.enter_context(open_checkpoint(path) if is_checkpoint(path) else open_gguf(path))
    source = Source(str(path), draft.metadata, draft.tensors)
    if source.architecture in ARCHITECTURES:
        return _dflash(wanted, draft, read_draft(source, window=config.draft_swa))
    if config.draft_swa:
        raise UsageError(f"--draft-swa: {path} is no DFlash draft", param="draft_swa")
    return _model(wanted, draft, read_spec(source))


@dataclass(frozen=True)
class _Wanted:
    """What every kind of drafter is made of: the target's file and spec, the drafter's device, and how far it sees."""

    config: Config
    file: GGUFFile
    spec: ModelSpec
    device: Device
    context: int

    def ring(self, layers: Sequence[int]) -> FeatureRing:
        """A ring for the features of these layers."""
        return FeatureRing(self.device, layers, self.spec.hidden, slots=self.config.parallel, capacity=self.context)

    def resident(self, make: Callable[[], Drafter], block: int, **facts: str | int) -> Drafter:
        """The drafter as --draft-residency has it."""
        keep = self.config.draft_residency != "request-scoped"
        return ResidentDrafter(make, keep=keep, block=block, facts=facts)


def _dflash(wanted: _Wanted, draft: GGUFFile, spec: DraftSpec) -> Prepared:
    target, slots = wanted.spec, wanted.config.parallel
    layers = spec.captured(target)
    mask = _mask(wanted, spec)
    if spec.target_scale:
        spec = replace(spec, embedding_scale=spec.embedding_scale * target.embedding_scale)
    ring = wanted.ring(layers)

    def open(first: Shard, last: Shard) -> Drafter:
        ends = Ends(wanted.device, first, last)

        def make() -> Drafter:
            model = DraftModel(
                draft, spec, wanted.device, slots=slots, context=wanted.context, rows=ring.rows, mask=mask
            )
            return DFlashDrafter(model, ring, ends)

        return wanted.resident(make, spec.block - 1, kind="dflash", file=spec.path)

    return Prepared(ring, open)


def _mtp(wanted: _Wanted) -> Prepared:
    if wanted.config.draft_swa:
        raise UsageError("--draft-swa: mtp is no DFlash draft", param="draft_swa")
    target, slots = wanted.spec, wanted.config.parallel
    if not target.skipped_blocks:
        raise ModelError(f"{wanted.file.paths[0]}: --draft mtp: has no block for multi-token prediction")
    ring = wanted.ring(captured(target))

    def open(first: Shard, last: Shard) -> Drafter:
        ends = Ends(wanted.device, first, last)

        def make() -> Drafter:
            model = MTPModel(wanted.file, target, wanted.device, slots=slots, context=wanted.context, rows=ring.rows)
            return MTPDrafter(model, ring, ends)

        return wanted.resident(make, MTPDrafter.block, kind="mtp")

    return Prepared(ring, open)


def _model(wanted: _Wanted, draft: GGUFFile, spec: ModelSpec) -> Prepared:
    check_tokens(draft, wanted.file.metadata)
    slots = wanted.config.parallel

    def make() -> Drafter:
        return ModelDrafter(draft, spec, wanted.device, slots=slots, context=wanted.context)

    return Prepared(
        None,
        lambda first, last: wanted.resident(make, ModelDrafter.block, kind="model", file=str(draft.paths[0])),
    )


def _device(opened: contextlib.ExitStack, config: Config, devices: Sequence[Device]) -> Device:
    """The device of --draft-device: one of the target's, or one of this process that is opened for the drafter."""
    own = [device for device in devices if not device.shared]
    if config.draft_device == "auto":
        # Beside the head, which every proposal passes; of a daemon's head as near as can be.
        if own:
            return own[-1]
        return opened.enter_context(contextlib.closing(open_device(named(["cpu:0"])[0])))
    (name, *more) = named([config.draft_device])
    if more or name.place:
        raise UsageError(
            f"--draft-device {config.draft_device}: expected one device of this machine", param="draft_device"
        )
    for device in own:
        if device.name == name:
            return device
    return opened.enter_context(contextlib.closing(open_device(name)))


def _mask(wanted: _Wanted, spec: DraftSpec) -> NDArray[np.float32]:
    """What rows behind the seed begin as, by the target's table. Raises ModelError if it has no such row."""
    if spec.mask_embedding:
        return np.zeros(spec.hidden, np.float32)
    token = spec.mask_token if spec.mask_token is not None else _MASKS.get(wanted.spec.family)
    if token is None or not 0 <= token < wanted.spec.vocab:
        raise ModelError(f"{spec.path}: dflash.mask_token_id {token} is no token of the model")
    table = wanted.file.tensors[EMBEDDING]
    row = dequantize(wanted.file.raw(EMBEDDING)[token : token + 1], table.type)
    return row.reshape(-1)
