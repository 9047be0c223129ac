"""Activations in messages: as they lie in memory, or in 16 bits, half of what crosses a network.

float16 keeps 11 bits of a value and what is beyond 65504 becomes that; bfloat16 keeps 8 bits of any. Captured outputs
are bfloat16 already and travel as they are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from luce.errors import BackendError
from luce.models.spec import ModelSpec
from luce.ops.features import bfloat16
from luce.shard.sizes import handed_widths

#: how values may travel
WIRES = ("f32", "f16", "bf16")
_LARGEST = np.float32(np.finfo(np.float16).max)


class ActivationCodec:
    """What passes a boundary, in messages. `kind`: one of WIRES. Memory is uint8, laid out as Arena.floats does."""

    def __init__(self, kind: str, spec: ModelSpec, boundary: int) -> None:
        self._kind = kind
        widths = handed_widths(spec, boundary)
        captured = sum(layer < boundary for layer in spec.captured)
        self._columns = sum(widths)
        self._rounded = 0 if kind == "f32" else sum(widths[: len(widths) - captured])

    def size(self, rows: int) -> int:
        """Bytes of so many rows in a message."""
        return rows * (4 * self._columns - 2 * self._rounded)

    def pack(self, memory: NDArray[np.uint8], rows: int) -> NDArray[np.uint8]:
        """What travels of the rows at the beginning of the memory."""
        values, rest = self._parts(memory, rows)
        if not len(values):
            return rest
        halves = bfloat16(values) if self._kind == "bf16" else np.clip(values, -_LARGEST, _LARGEST).astype(np.float16)
        return np.concatenate([halves.view(np.uint8), rest])

    def unpack(self, data: NDArray[np.uint8], memory: NDArray[np.uint8], rows: int) -> None:
        """What has travelled, to the beginning of the memory. Raises BackendError unless it is of these rows."""
        if data.shape != (self.size(rows),):
            raise BackendError(f"an activation of {data.shape} bytes, expected {self.size(rows)}")
        values, rest = self._parts(memory, rows)
        end = 2 * len(values)
        if self._kind == "bf16":
            np.left_shift(data[:end].view(np.uint16), 16, out=values.view(np.uint32), dtype=np.uint32)
        else:
            values[...] = data[:end].view(np.float16)
        rest[...] = data[end:]

    def _parts(self, memory: NDArray[np.uint8], rows: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        """The values that are rounded, and what lies behind them."""
        begin, end = 4 * rows * self._rounded, 4 * rows * self._columns
        return memory[:begin].view(np.float32), memory[begin:end]
