"""The only backend: runs a step through its shards in order, handing the residual stream from device to device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from luce.backend.local import LocalShard
from luce.backend.plan import pages_for, plan_layers, state_bytes
from luce.backend.shard import Shard
from luce.errors import OutOfMemoryError
from luce.gguf.reader import GGUFFile
from luce.layers.build import tensor_bytes
from luce.models.spec import ModelSpec
from luce.ops.kvtype import AUTO, KVTypes
from luce.runtime.device import Array, Device
from luce.runtime.step import PAGE, Output, Step

#: of a device's free memory, what is left to activations and to other programs
_RESERVE = 0.06


class LayerSplitBackend:
    """`spec`'s layers on `devices`, split by `weights`. See luce.backend.backend.Backend for the properties.

    Raises UsageError if the split is impossible or the heads do not take a type of `kv`, OutOfMemoryError naming shard,
    bytes and the context that would fit.
    The devices stay their owner's: they are closed after the backend.
    """

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        devices: Sequence[Device],
        *,
        weights: Sequence[float] = (),
        slots: int = 1,
        context: int = 4096,
        chunk: int = 512,
        kv: KVTypes = AUTO,
    ) -> None:
        self.spec = spec
        self._kv = kv
        self.vocab = spec.vocab
        self.slots = slots
        self.context = context
        self.recurrent = spec.recurrent
        self.windows = tuple(group.window for group in spec.page_groups)
        self.pages = tuple(slots * pages_for(window, context, chunk) for window in self.windows)
        self._shards: list[Shard] = []
        try:
            ranges = plan_layers(spec, len(devices), weights)
            for layers, device in zip(ranges, devices, strict=True):
                self._check_memory(file, layers, device)
                self._shards.append(LocalShard(file, spec, layers, device, pages=self.pages, slots=slots, kv=kv))
        except BaseException:
            self.close()
            raise

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards in the order of their layers."""
        return tuple(self._shards)

    @property
    def layers(self) -> tuple[range, ...]:
        return tuple(shard.info.layers for shard in self._shards)

    def forward(self, step: Step) -> Output:
        hidden: Array | Output | None = None
        before: Shard | None = None
        for shard in self._shards:
            if before is not None and not (before.device.host and shard.device.host):
                hidden = shard.device.upload(before.device.download(hidden))
            hidden = shard.forward(step, hidden)
            before = shard
        assert isinstance(hidden, Output)
        return hidden

    def save(self, slot: int | None, pages: Sequence[Sequence[int]]) -> dict[str, NDArray[np.generic]]:
        return {name: tensor for shard in self._shards for name, tensor in shard.save(slot, pages).items()}

    def restore(
        self, slot: int | None, pages: Sequence[Sequence[int]], tensors: Mapping[str, NDArray[np.generic]]
    ) -> None:
        for shard in self._shards:
            shard.restore(slot, pages, tensors)

    def close(self) -> None:
        for shard in reversed(self._shards):
            shard.close()
        self._shards.clear()

    def _check_memory(self, file: GGUFFile, layers: range, device: Device) -> None:
        """Refuse before anything is allocated; the message says what would fit."""
        weights = tensor_bytes(file, self.spec, layers, device)
        state = state_bytes(device, self.spec, layers, self._kv)
        pages = sum(n * size for n, size in zip(self.pages, state.page, strict=True))
        asked = weights + pages + self.slots * state.slot
        free = int(device.memory().free * (1 - _RESERVE))
        if asked <= free:
            return
        per_page = self.slots * sum(
            size for size, window in zip(state.page, self.windows, strict=True) if window is None
        )
        left = free - asked + pages
        fits = left // per_page * PAGE if per_page and left > 0 else 0
        advice = f"--max-ctx {fits} would fit" if fits else "not even one page of context would fit"
        raise OutOfMemoryError(
            f"{device.name}: layers {layers.start}..{layers.stop - 1} need {asked} bytes ({weights} of weights, "
            f"{asked - weights} of context state), {free} are free; {advice}",
            param="max_ctx",
        )
