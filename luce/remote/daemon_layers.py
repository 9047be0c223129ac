"""Loads the layers of a Load message into a daemon's pipeline."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence

from luce import log
from luce.gguf.reader import GGUFFile
from luce.layers.kept_weights import KeptWeights, wanted_tensors
from luce.layers.routed_experts import ExpertOffload
from luce.models.spec import ModelSpec
from luce.ops.kvtype import KVTypes
from luce.remote.messages import Load
from luce.runtime.device import Device
from luce.runtime.open import open_expert_cpu
from luce.shard.local import LocalShard
from luce.shard.pipeline import Pipeline
from luce.shard.shard_options import DeviceLayers, ShardHooks, ShardOptions
from luce.shard.sizes import activation_bytes

_log = logging.getLogger(__name__)


def build_layers(
    pipeline: Pipeline,
    file: GGUFFile,
    spec: ModelSpec,
    load: Load,
    devices: Sequence[Device],
    layers: Sequence[range],
    hooks: ShardHooks,
    weights: KeptWeights | None,
    opened: contextlib.ExitStack,
) -> None:
    """Load layers, a range on each device, into a pipeline, which `opened` closes; `weights` holds theirs then, and has
    those of earlier loads."""
    offloaded = load.offloaded or ((),) * len(devices)
    opened.callback(pipeline.close if weights is None else functools.partial(weights.keep, pipeline.close))
    if weights is not None:
        wanted = zip(devices, layers, offloaded, strict=True)
        weights.retain(file, {str(d.name): wanted_tensors(file, spec, own, away) for d, own, away in wanted})
    options = ShardOptions(
        load.slots,
        KVTypes(*load.kv),
        load.verify_rows,
        load.captured,
        load.rank_pages,
        load.peer,
        load.prompt_precision,
    )
    for number, (device, part, unpack_bytes, away) in enumerate(
        zip(devices, layers, load.unpack_bytes, offloaded, strict=True)
    ):
        log.event(_log, "loading", device=str(device.name), layers=f"{part.start}..{part.stop - 1}")
        own = DeviceLayers(device, part, unpack_bytes, _offload(load, devices, away), weights)
        shard = LocalShard(file, spec, own, options, load.pages, hooks, long_graphs=len(devices) > 1)
        # Errors of the device name it.
        pipeline.add(f"layers {part.start}..{part.stop - 1}", str(device.name), shard)
        if number:
            pipeline.link(load.rows * activation_bytes(spec, part.start, load.captured) // 4)
    if weights is not None:
        loaded = weights.release()
        log.event(_log, "weights loaded", read=loaded.read, kept=loaded.kept)


def _offload(load: Load, devices: Sequence[Device], layers: tuple[int, ...]) -> ExpertOffload | None:
    """Where the experts of these layers lie; None without layers."""
    if not layers:
        return None
    weights = "packed" if load.offloaded_packed else "float32"
    return ExpertOffload(open_expert_cpu(devices, weights), frozenset(layers))
