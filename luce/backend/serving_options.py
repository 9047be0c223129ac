"""Options of a whole model."""

from __future__ import annotations

from dataclasses import dataclass

from luce.backend.expert_placement import ExpertRequest
from luce.backend.kvflash_size import KVFlashRequest
from luce.layers.kept_weights import KeptWeights
from luce.runtime.device import Device
from luce.shard.shard_options import ShardOptions


@dataclass(frozen=True)
class Claim:
    """Memory of a device that is reserved for something other than layers."""

    device: Device
    bytes: int


@dataclass(frozen=True)
class ServingOptions(ShardOptions):
    """Settings of a whole model and of its shards."""

    #: most positions of one sequence
    context: int = 4096
    #: most prompt rows of a step
    chunk: int = 512
    #: --kvflash, for the number of resident pages of a sequence; None: all pages are resident
    kvflash: KVFlashRequest | None = None
    #: further pages of each page group, for branches of draft trees
    branch_pages: int = 0
    #: weights of --target-layer-split; empty: split by bytes
    layer_split: tuple[float, ...] = ()
    #: the layers of each device, as the planner has chosen them; empty: `layer_split` or bytes say it
    layers: tuple[range, ...] = ()
    #: --experts-on; None: routed experts lie with their layers
    experts: ExpertRequest | None = None
    #: memory of the devices that a drafter will take
    claims: tuple[Claim, ...] = ()
    #: whether GPUs store unpacked copies of matrices in free memory, which makes prompts faster
    unpack: bool = False
    #: rows of a microbatch, for long steps on several shards; 0: the default
    microbatch: int = 0
    #: the matrices of this process's devices, which may stay from one load to the next one; None: they do not
    weights: KeptWeights | None = None
    #: whether one GPU replays long steps of one span too, as several GPUs of a process do
    long_graphs: bool = False
