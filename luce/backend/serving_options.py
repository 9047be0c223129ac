"""How a model is loaded onto devices and runs: what the settings ask for."""

from __future__ import annotations

from dataclasses import dataclass

from luce.backend.kvflash_size import KVFlashRequest
from luce.runtime.device import Device
from luce.shard.shard_options import ShardOptions


@dataclass(frozen=True)
class Claim:
    """Bytes that something other than layers will take on a device."""

    device: Device
    bytes: int


@dataclass(frozen=True)
class ServingOptions(ShardOptions):
    """Settings of a whole model."""

    #: most positions of one sequence
    context: int = 4096
    #: most prompt rows of a step
    chunk: int = 512
    #: how many pages of a long sequence stay on the devices; None: all
    kvflash: KVFlashRequest | None = None
    #: further pages of each page group, for branches of draft trees
    branch_pages: int = 0
    #: weights of --target-layer-split; empty: split by bytes
    layer_split: tuple[float, ...] = ()
    #: memory that a drafter will take of the devices
    claims: tuple[Claim, ...] = ()
    #: whether GPUs keep matrices unpacked beside the weights, in spare memory; that makes prompts faster
    unpack: bool = False
    #: rows of a microbatch, in which long steps pass through several shards; 0: the usual number
    microbatch: int = 0
