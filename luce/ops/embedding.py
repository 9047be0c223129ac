"""Token embedding: rows of a (quantised) table."""

from __future__ import annotations

from functools import partial

import numpy as np

from luce.gguf.quants import dequantize
from luce.ops.weight import Weight, WeightPart
from luce.runtime.device import Array, Device
from luce.runtime.host import HostDevice

_THREADS = (256,)


def embed(device: Device, table: Weight, tokens: Array, to: Array | None = None) -> Array:
    """Rows `tokens` (int32 [n], each in [0, table.rows)) of the table, dequantised: float32 [n, cols]. `to`, if given,
    is the array to write them to: C-contiguous, at a multiple of 16 bytes.

    The values equal those of gguf.quants.dequantize, bit for bit. The table is a weight of one part; on the host it is
    a matrix or raw quant blocks.
    """
    (part,) = table.parts
    if isinstance(device, HostDevice):
        rows = device.compute(partial(_host_rows, part, table.cols), (len(tokens), table.cols), tokens)
        if to is None:
            return rows
        device.call_host(np.copyto, to, rows)
        return to
    out = device.empty((len(tokens), table.cols)) if to is None else to
    if len(tokens):
        args = (part.data, tokens, out, np.int32(table.cols))
        device.launch("embedding", "embed", (len(tokens),), _THREADS, args, defines={"QTYPE": part.type.name})
    return out


def take_rows(device: Device, x: Array, rows: Array) -> Array:
    """x[rows]: x float32 [n, features] (any row stride), rows int32 [m], each in [0, n) -> float32 [m, features]."""
    if isinstance(device, HostDevice):
        return device.compute(np.ndarray.__getitem__, (len(rows), x.shape[1]), x, rows)
    out = device.empty((len(rows), x.shape[1]))
    if len(rows):
        args = (x, rows, out, np.int32(x.shape[1]), np.int32(x.strides[0] // 4))
        device.launch("embedding", "take_rows", (len(rows),), _THREADS, args, defines={"QTYPE": "F32"})
    return out


def _host_rows(part: WeightPart, cols: int, tokens: Array) -> Array:
    rows = part.data[tokens]
    # Rows of floats may be longer than the weight's (luce.ops.weight).
    return rows[:, :cols] if rows.dtype == np.float32 else dequantize(rows, part.type)[:, :cols]
