"""Weights that stay on their devices while a model moves: what the next load needs of them is not read again."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import GGUFFile
from luce.layers.tensors import expert_tensors, shard_tensors
from luce.layers.weight_pool import WeightPool
from luce.models.spec import ModelSpec
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device


@dataclass(frozen=True)
class LoadedBytes:
    """Bytes of matrices that a load has read from the file, and of those that were on the device already."""

    read: int
    kept: int


class KeptWeights(WeightPool):
    """The matrices of one model's layers on the devices of this process. For one thread at a time.

    They belong to the layers that use them. `keep` holds those of layers that are closed; until `release` the next load
    finds them. They are known by file, device, tensors and type, so it does not matter for which placement they were
    read.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[tuple[Any, ...], Weight] = {}
        self._read = 0

    def weight(self, key: tuple[Any, ...], device: Device, load: Callable[[], Weight]) -> Weight:
        """As WeightPool.weight."""
        found = self._weights.get(key)
        if found is None:
            found = self._weights[key] = load()
            self._read += found.nbytes
        return found

    def keep(self, close: Callable[[], None]) -> None:
        """Call `close`, which closes the layers, and hold their matrices. Raises the errors of `close`."""
        self._kept |= self._weights.items()
        close()
        for weight in self._kept.values():
            # How many have an unpacked copy is for the next plan to say.
            weight.copy = weight.int8_experts = None

    def free_bytes(self, device: Device) -> int:
        """Bytes of a device's memory that are not free, but are for the next load: those of what is held."""

        def holds(name: str) -> bool:
            # CPU devices of a process share their memory.
            return name == str(device.name) or (device.host and name.startswith("cpu:"))

        own = [weight for key, weight in self._kept.items() if holds(key[1])]
        return sum(_own_bytes(part.data) for weight in own for part in weight.parts)

    def retain(self, file: GGUFFile, wanted: Mapping[str, set[str]]) -> None:
        """Let go of what a load does not need: `wanted` has the names of its tensors, by device."""
        identity = fingerprint(file)
        self._kept = {
            key: weight
            for key, weight in self._kept.items()
            if key[0] == identity and _tensors(key) <= wanted.get(key[1], set())
        }

    def release(self) -> LoadedBytes:
        """Let go of everything but what layers use; what has been loaded since the last call."""
        held, read = list(self._kept), self._read
        self._kept, self._read = {}, 0
        used = (self._weights.get(key) for key in held)
        return LoadedBytes(read, sum(weight.nbytes for weight in used if weight is not None))


def wanted_tensors(file: GGUFFile, spec: ModelSpec, layers: range, offloaded: Collection[int] = ()) -> set[str]:
    """The names of the tensors that a device with these layers has. `offloaded`: layers whose routed experts lie on
    the CPU."""
    names = shard_tensors(file, spec, layers)
    return names.difference(*(expert_tensors(file, layer) for layer in offloaded))


def _tensors(key: tuple[Any, ...]) -> set[str]:
    """The tensors of a matrix that is known by this key of WeightLoader's; something else of a table's columns, which
    are others for other layers."""
    *_, kind, names, _ = key
    return {names[0]} if kind == "table" and names[1] == "None" else set(names)


def _own_bytes(array: Array) -> int:
    """Bytes of memory that an array takes; what is mapped counts as free while nobody else needs it."""
    base: Any = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    base = base.obj if isinstance(base, memoryview) else base
    return 0 if isinstance(base, mmap.mmap) else int(array.nbytes)
