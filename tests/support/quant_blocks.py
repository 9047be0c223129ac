"""Random matrices in GGUF formats: arbitrary bits everywhere but in scales, which are finite."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from luce.ops.weight import RawTensor

#: byte offsets of the half-precision fields of a block
_SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    # its scale is an exponent
    "MXFP4": (),
    "IQ2_XS": (0,),
    "IQ3_S": (0,),
}
PLAIN = ("F32", "F16", "BF16")
#: every format that kernels/quants.h unpacks
FORMATS = (
    *PLAIN,
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
)


def block_cols(name: str) -> int:
    """Elements of a block."""
    return int(gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]][0])


def random_tensor(name: str, rows: int, cols: int, seed: int, *, wild: bool = False) -> RawTensor:
    """A matrix of about unit size; `wild` adds scales that are zero, subnormal or huge, or such elements and infinite
    ones."""
    rng = np.random.default_rng(seed)
    type = GGMLQuantizationType[name]
    elements, size = gguf.GGML_QUANT_SIZES[type]
    if name in PLAIN:
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        if wild:
            special = np.array([0, -0.0, 1e-41, 6e-8, 6e4, np.inf, -np.inf], np.float32)
            spots = rng.integers(values.size, size=len(special))
            values.reshape(-1)[spots] = special
        raw = gguf.quants.quantize(values, type).view(np.uint8)
        return RawTensor(name, raw.reshape(rows, -1), type, cols)
    raw = rng.integers(0, 256, (rows, cols // elements, size), np.uint8)
    for at in _SCALES[name]:
        scale = (rng.uniform(-1, 1, raw.shape[:2]) * 2.0 ** rng.integers(-10, -5, raw.shape[:2])).astype(np.float16)
        if wild:
            special = np.array([0, -0.0, 6e-8, -3e-6, 65504], np.float16)
            scale = np.where(rng.random(scale.shape) < 0.2, rng.choice(special, scale.shape), scale)
        raw[:, :, at : at + 2] = scale[..., None].view(np.uint8)
    if name == "MXFP4":
        exponents = rng.integers(118, 125, raw.shape[:2])
        special = rng.choice([0, 1, 2, 140], raw.shape[:2])
        raw[:, :, 0] = np.where(rng.random(raw.shape[:2]) < (0.2 if wild else 0), special, exponents)
    return RawTensor(name, raw.reshape(rows, -1), type, cols)


def decoded(tensor: RawTensor) -> NDArray[np.float32]:
    """float32 [rows, cols] by the gguf package."""
    with np.errstate(all="ignore"):
        values: NDArray[np.float32] = gguf.quants.dequantize(np.ascontiguousarray(tensor.raw), tensor.type)
    return values.reshape(tensor.rows, tensor.cols)
