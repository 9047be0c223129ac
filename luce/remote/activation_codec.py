"""Activations in messages: float32 as in memory, or 16 bits, which halves the bytes on a network.

float16 keeps 11 significant bits of a value and limits it to +-65504; bfloat16 keeps 8 significant bits of any value.
Captured outputs are bfloat16 already and are sent unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from luce.errors import BackendError
from luce.models.spec import ModelSpec
from luce.ops.features import bfloat16
from luce.shard.sizes import activation_widths

#: types of activations in messages
TYPES = ("f32", "f16", "bf16")
_LARGEST = np.float32(np.finfo(np.float16).max)


class ActivationCodec:
    """Encodes the activations at a boundary. `kind`: one of TYPES. Memory is uint8, laid out as by Arena.floats."""

    def __init__(self, kind: str, spec: ModelSpec, boundary: int, captured: Sequence[int] = ()) -> None:
        self._kind = kind
        widths = activation_widths(spec, boundary, captured)
        features = sum(layer < boundary for layer in captured)
        self._columns = sum(widths)
        self._rounded = 0 if kind == "f32" else sum(widths[: len(widths) - features])

    def size(self, rows: int) -> int:
        """Bytes of `rows` rows in a message."""
        return rows * (4 * self._columns - 2 * self._rounded)

    def pack(self, memory: NDArray[np.uint8], rows: int) -> NDArray[np.uint8]:
        """Encode the rows at the beginning of the memory: uint8 [size(rows)]."""
        values, rest = self._parts(memory, rows)
        if not len(values):
            return rest
        halves = bfloat16(values) if self._kind == "bf16" else np.clip(values, -_LARGEST, _LARGEST).astype(np.float16)
        return np.concatenate([halves.view(np.uint8), rest])

    def unpack(self, data: NDArray[np.uint8], memory: NDArray[np.uint8], rows: int) -> None:
        """Decode rows to the beginning of the memory. Raises BackendError if the data has another size."""
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
        """The values that are rounded, and the bytes behind them."""
        begin, end = 4 * rows * self._rounded, 4 * rows * self._columns
        return memory[:begin].view(np.float32), memory[begin:end]
