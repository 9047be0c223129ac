"""Masks of output rows on the last shard's device.

They are copied beside the layers' work: a copy of pageable memory on the device's own stream would wait for the layers,
and this thread with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luce.ops.sample import mask_logits
from luce.runtime.device import Array, Device, Event
from luce.runtime.step import Int32, RowMasks

# The next copy is prepared while a device may still read the one before it.
_BUFFERS = 2


@dataclass
class _Buffer:
    """uint32 [n], on the host and on the device."""

    host: NDArray[np.uint32]
    device: Array
    #: when nothing reads it any more
    free: Event


class DeviceMasks:
    """Masks logits on one device, which one thread drives."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._copies = device.copy_stream()
        self._buffers: list[_Buffer] = []

    def apply(self, logits: Array, masks: RowMasks) -> None:
        """Queue: the masked tokens of logits float32 [m, vocab] become -inf, in place."""
        rows, words = masks.rows, masks.words
        if not len(rows):
            return
        device, buffer = self._device, self._next(len(rows) + words.size)
        size = len(rows) + words.size
        # One copy for both.
        buffer.host[: len(rows)] = rows.view(np.uint32)
        buffer.host[len(rows) : size] = words.reshape(-1)
        self._copies.copy(buffer.device[:size], buffer.host[:size])
        device.wait_for(self._copies.record())
        numbers, bits = buffer.device[: len(rows)].view(np.int32), buffer.device[len(rows) : size]
        mask_logits(device, logits, numbers, bits.reshape(words.shape))
        buffer.free = device.record()

    def warm_up(self, logits: Array) -> None:
        """Queue what `apply` launches, for a row of logits."""
        rows: Int32 = np.zeros(1, np.int32)
        words = np.zeros((1, -(-logits.shape[1] // 32)), np.uint32)
        mask_logits(self._device, logits[:1], self._device.upload(rows), self._device.upload(words))

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._buffers.clear()

    def _next(self, size: int) -> _Buffer:
        """Memory that no copy and no kernel uses, of at least `size` words."""
        if len(self._buffers) < _BUFFERS:
            buffer = self._allocate(size)
        else:
            buffer = self._buffers.pop(0)
            # It was used two steps ago.
            buffer.free.wait()
            if len(buffer.host) < size:
                buffer = self._allocate(size)
        self._buffers.append(buffer)
        return buffer

    def _allocate(self, size: int) -> _Buffer:
        count = 1 << (size - 1).bit_length()
        host = self._device.staging_buffer(4 * count).view(np.uint32)
        buffer = _Buffer(host, self._device.empty(count, np.uint32), self._device.record())
        # Kernels that are queued already may read what this memory held before.
        self._copies.wait_for(buffer.free)
        return buffer
