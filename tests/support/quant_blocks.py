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
    # its scales are bytes
    "NVFP4": (),
    # in four pieces
    "IQ1_M": (),
    "IQ1_S": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
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
    "NVFP4",
    "TQ1_0",
    "TQ2_0",
    "IQ1_S",
    "IQ1_M",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
)


def block_cols(name: str) -> int:
    """Elements of a block."""
    return int(gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]][0])


def whole_blocks(name: str, least: int) -> int:
    """The columns of a row of whole blocks, at least `least`."""
    return -(-least // block_cols(name)) * block_cols(name)


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
        raw[:, :, at : at + 2] = _scales(rng, raw.shape[:2], wild=wild)[..., None].view(np.uint8)
    if name == "IQ1_M":
        pieces = _scales(rng, raw.shape[:2], wild=wild).view(np.uint16)[..., None] >> np.arange(0, 16, 4, np.uint16)
        raw[:, :, 49::2] = raw[:, :, 49::2] & 15 | (pieces & 15).astype(np.uint8) << 4
    if name == "NVFP4":
        # From 2^-8 on; then nothing, subnormal, the largest, no number, and with a sign, which does not count.
        bits = rng.integers(0x08, 0x28, (*raw.shape[:2], 4))
        special = rng.choice([0, 1, 7, 0x7E, 0x7F, 0x80, 0x8A, 0xFF], bits.shape)
        raw[:, :, :4] = np.where(rng.random(bits.shape) < (0.2 if wild else 0), special, bits)
    if name == "MXFP4":
        exponents = rng.integers(118, 125, raw.shape[:2])
        special = rng.choice([0, 1, 2, 140], raw.shape[:2])
        raw[:, :, 0] = np.where(rng.random(raw.shape[:2]) < (0.2 if wild else 0), special, exponents)
    return RawTensor(name, raw.reshape(rows, -1), type, cols)


def _scales(rng: np.random.Generator, shape: tuple[int, ...], *, wild: bool) -> NDArray[np.float16]:
    scale = (rng.uniform(-1, 1, shape) * 2.0 ** rng.integers(-10, -5, shape)).astype(np.float16)
    if wild:
        special = np.array([0, -0.0, 6e-8, -3e-6, 65504], np.float16)
        scale = np.where(rng.random(scale.shape) < 0.2, rng.choice(special, scale.shape), scale)
    return scale


def decoded(tensor: RawTensor) -> NDArray[np.float32]:
    """float32 [rows, cols] by the gguf package."""
    with np.errstate(all="ignore"):
        values: NDArray[np.float32] = gguf.quants.dequantize(np.ascontiguousarray(tensor.raw), tensor.type)
    return values.reshape(tensor.rows, tensor.cols)
