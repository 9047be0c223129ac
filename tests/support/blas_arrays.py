"""Arrays as wrappers of BLAS libraries see them, and as these libraries do, for libraries made of ctypes and NumPy."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

# By cudaDataType_t, of which hipDataType has the same.
_TYPES = {0: np.float32, 2: np.float16, 3: np.int8, 10: np.int32}


def on_device(array: NDArray[Any], aligned: int | None = None) -> Any:
    """What CuPy's arrays tell of themselves; `aligned`: a made-up address."""
    return SimpleNamespace(
        memory=array,
        data=SimpleNamespace(ptr=array.ctypes.data if aligned is None else aligned),
        dtype=array.dtype,
        shape=array.shape,
        strides=array.strides,
        itemsize=array.itemsize,
        nbytes=array.nbytes,
    )


def columns(at: int, rows: int, count: int, kind: int, leading: int) -> NDArray[Any]:
    """[rows, count] in memory, one column behind another, `leading` apart."""
    type = np.dtype(_TYPES[kind])
    memory: Any = (ctypes.c_char * (type.itemsize * (leading * (count - 1) + rows))).from_address(at)
    flat: NDArray[Any] = np.ndarray(len(memory) // type.itemsize, type, memory)
    return np.lib.stride_tricks.as_strided(flat, (rows, count), (type.itemsize, type.itemsize * leading))
