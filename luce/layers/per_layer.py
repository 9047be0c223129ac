"""Per-layer embeddings (Gemma 4 E models): each token brings an input for each layer, mixed with a projection of its
embedding.
"""

from __future__ import annotations

import math

from luce.ops.activation import add, scale
from luce.ops.embedding import embed
from luce.ops.matmul import matmul
from luce.ops.norm import head_rms_norm
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device
from luce.runtime.step import DeviceStep


class PerLayerInputs:
    """(norm(projection x / sqrt(hidden)) + sqrt(width) table[token]) / sqrt(2), the norm over each layer's width.

    `table` holds the columns of the layers `own`; only these get their inputs. The projection is whole: it is small,
    and a product with a part of it could differ in the last bits.
    """

    def __init__(
        self, device: Device, *, layers: int, own: range, table: Weight, projection: Weight, norm: Array, eps: float
    ) -> None:
        self._device = device
        self._layers = layers
        self._own = own
        self._table = table
        self._projection = projection
        self._norm = norm
        self._eps = eps

    def __call__(self, x: Array, step: DeviceStep) -> Array:
        """x float32 [rows, hidden], the scaled embeddings -> float32 [rows, layers, width]; valid for the layers `own`
        only."""
        device, rows, own = self._device, x.shape[0], self._own
        inputs = matmul(device, x, self._projection)
        width = inputs.shape[1] // self._layers
        scale(device, inputs, self._projection.cols**-0.5)
        head_rms_norm(device, inputs.reshape(rows, self._layers, width)[:, own.start : own.stop], self._norm, self._eps)
        looked_up = embed(device, self._table, step.tokens)
        scale(device, looked_up, math.sqrt(width))
        add(device, inputs[:, own.start * width : own.stop * width], looked_up)
        scale(device, inputs, math.sqrt(0.5))
        return inputs.reshape(rows, self._layers, width)
