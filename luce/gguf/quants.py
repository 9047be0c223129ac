"""Tensor types: sizes of quant blocks, and bytes to float32 by the gguf package's decoders."""

from __future__ import annotations

from functools import cache
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from luce.errors import UnsupportedError

# The decoders take 12 to 21 bytes of temporary memory per element (measured), about 5 MB here; from 2 million elements
# on they exceed the caches and become three times slower.
_CHUNK = 1 << 18


def block_size(type: GGMLQuantizationType) -> tuple[int, int]:
    """(elements, bytes) of one quant block; a row is a whole number of them."""
    elements, size = gguf.GGML_QUANT_SIZES[type]
    return elements, size


@cache
def supported(type: GGMLQuantizationType) -> bool:
    """Whether `dequantize` decodes this type."""
    try:
        gguf.quants.dequantize(np.zeros((1, block_size(type)[1]), np.uint8), type)
    except NotImplementedError:
        return False
    return True


def dequantize(raw: NDArray[np.uint8], type: GGMLQuantizationType) -> NDArray[np.float32]:
    """raw uint8 [rows, row_bytes] to float32 [rows, cols].

    F32 aligned to 4 bytes returns a view of `raw`, read-only if `raw` is. Otherwise a new array; temporary memory stays
    below 64 MB for every size. Raises UnsupportedError for types without a decoder.
    """
    if not supported(type):
        raise UnsupportedError(f"tensors of type {type.name} cannot be decoded")
    elements, size = block_size(type)
    rows, row_bytes = raw.shape
    cols = row_bytes // size * elements
    if type == GGMLQuantizationType.F32:
        floats: NDArray[np.float32] = np.ascontiguousarray(raw).view(np.float32)
        return floats if floats.flags.aligned else floats.copy()
    # Chunks are runs of quant blocks, not rows: one row may be the whole tensor. gguf gets each chunk as one row, as it
    # calls its decoder once for every 16 rows.
    blocks = raw.reshape(-1, size)
    result = np.empty((len(blocks), elements), np.float32)
    step = _CHUNK // elements
    # Hostile scales may be infinite; the caller handles the results, so no warning.
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            chunk: Any = blocks[start : start + step].reshape(1, -1)
            result[start : start + step] = gguf.quants.dequantize(chunk, type).reshape(-1, elements)
    return result.reshape(rows, cols)
