"""Rows from a GPU to a GPU of another process, through pinned memory of both, without their hosts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from luce.runtime.device import Array, Device, Flag

#: most bytes that are handed over: one block copies them, and a copy engine is faster with more
MOST_BYTES = 512 << 10
_THREADS = 1024
# Words that a block takes over at a time.
_BLOCK_WORDS = 8 * _THREADS


def can_hand_over(device: Device, arrays: Sequence[Array]) -> bool:
    """Whether a device can hand over, or take over, arrays: few bytes, and each of them contiguous."""
    few = sum(array.nbytes for array in arrays) <= MOST_BYTES
    return device.maps_pinned and few and all(array.flags.c_contiguous for array in arrays)


def hand_over(device: Device, rows: Sequence[Array], places: Sequence[NDArray[np.float32]], flag: Flag) -> None:
    """Queue places = rows, and then set the flag: float32 of any shapes, contiguous, at least one array; `places` and
    the flag's counter in pinned memory."""
    if device.host:
        for place, array in zip(places, rows, strict=True):
            place[...] = array
        flag.set()
        return
    for number, (place, array) in enumerate(zip(places, rows, strict=True), 1):
        counter = device.mapped(flag.memory) if number == len(rows) else None
        args = (array.view(np.uint32), device.mapped(place).view(np.uint32), counter)
        device.launch("handover", "hand_over", (1,), (_THREADS,), (*args, np.int64(array.size), _value(flag)))


def take_over(device: Device, flag: Flag, places: Sequence[NDArray[np.float32]], rows: Sequence[Array]) -> None:
    """Let the device wait until the flag is done, and then queue rows = places, as for `hand_over`."""
    if device.host:
        flag.wait()
        for place, array in zip(places, rows, strict=True):
            array[...] = place
        return
    counter = device.mapped(flag.memory)
    for place, array in zip(places, rows, strict=True):
        grid = (-(-array.size // _BLOCK_WORDS),)
        args = (device.mapped(place).view(np.uint32), counter, array.view(np.uint32))
        device.launch("handover", "take_over", grid, (_THREADS,), (*args, np.int64(array.size), _value(flag)))


def _value(flag: Flag) -> np.int32:
    """The bits of a flag's value, as kernels take them."""
    return np.uint32(flag.value).view(np.int32)
