"""The formats whose blocks index a grid, IQ1_S to IQ3_S, to what luce/cpu_kernels/unpack.py says.

An index names eight neighbouring columns (IQ3: four). IQ2 and IQ3: the grid has magnitudes, the signs stand beside the
indices. IQ1: the grid has -1, 0 and 1, and groups of eight columns are raised or lowered by an eighth; bytes are in
eighths.
"""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType, quants

from luce.cpu_kernels.dimensions import SCALES
from luce.cpu_kernels.gather import gather_pairs, gather_two
from luce.cpu_kernels.jit import compiled, inlined
from luce.cpu_kernels.vectors import column, halves, splat, splat_float, store, to_floats

_T = GGMLQuantizationType
IQ1_S, IQ1_M, IQ3_XXS, IQ3_S = (int(t) for t in (_T.IQ1_S, _T.IQ1_M, _T.IQ3_XXS, _T.IQ3_S))
IQ2_XXS, IQ2_XS, IQ2_S = (int(t) for t in (_T.IQ2_XXS, _T.IQ2_XS, _T.IQ2_S))

#: of these formats, as OFFSETS and GROUPS16 of luce.cpu_kernels.unpack
GRID_OFFSETS = {IQ1_S: 16, IQ1_M: 16, IQ2_XXS: 64, IQ2_XS: 64, IQ2_S: 64, IQ3_XXS: 64, IQ3_S: 64}
GRID_GROUPS16 = frozenset({IQ1_M, IQ2_XS, IQ2_S})


def _grid(decoder, times=1, offset=0):
    """The grid of one of the gguf package's decoders, its elements as bytes: int32, each of four elements."""
    decoder.init_grid()
    elements = np.asarray(decoder.grid).reshape(-1) * times + offset
    return elements.astype(np.uint8).view(np.int32)


_IQ1 = _grid(quants.IQ1_S, 8, 16)
_IQ2_XXS, _IQ2_XS, _IQ2_S = _grid(quants.IQ2_XXS), _grid(quants.IQ2_XS), _grid(quants.IQ2_S)
_IQ3_XXS, _IQ3_S = _grid(quants.IQ3_XXS), _grid(quants.IQ3_S)


@inlined
def _spread(bits):
    """The lowest four bits of each lane as the lowest ones of its four bytes."""
    return ((bits & 15) * splat(0x00204081)) & 0x01010101


@inlined
def _even(seven):
    """Seven bits of signs and the eighth that makes their number even."""
    seven = seven & 127
    parity = seven ^ (seven >> 4)
    parity = parity ^ (parity >> 2)
    return seven | (((parity ^ (parity >> 1)) & 1) << 7)


@inlined
def _signed(magnitudes, signs):
    """64 plus or minus the bytes of each lane, which are below 64: minus where one of the lowest four bits is set."""
    minus = _spread(signs) * splat(63)
    return (magnitudes ^ minus) + splat(0x40404040) - minus


@inlined
def _store_signed(pair, signs, to):
    store(to, _signed(pair[0], signs))
    store(to + 64, _signed(pair[1], signs >> 4))


@inlined
def _odd(bits):
    """Twice a number and one, as floats."""
    return to_floats(bits + bits + splat(1))


@compiled
def unpack_iq2_xxs(weights, stride, columns, to):
    scale, grid = halves(column(weights, stride)) * splat_float(np.float32(0.125)), _IQ2_XXS.ctypes.data
    for group in range(8):
        indices, signs = column(weights + 2 + group * 8, stride), column(weights + 6 + group * 8, stride)
        for i in range(4):
            pair = gather_pairs(grid, (indices >> (i * 8)) & 255)
            _store_signed(pair, _even(signs >> (i * 7)), to + group * 512 + i * 128)
        store(to + SCALES + group * 64, scale * _odd(signs >> 28))


@compiled
def unpack_iq2_xs(weights, stride, columns, to):
    scale, grid = halves(column(weights, stride)) * splat_float(np.float32(0.125)), _IQ2_XS.ctypes.data
    for group in range(8):
        for half in range(2):
            both = column(weights + 2 + group * 8 + half * 4, stride)
            for i in range(2):
                own = both >> (i * 16)
                into = to + group * 512 + half * 256 + i * 128
                _store_signed(gather_pairs(grid, own & 511), _even(own >> 9), into)
    _scales16(weights + 66, stride, scale, to)


@inlined
def _scales16(scales, stride, scale, to):
    """16 scales of four bits each."""
    for i in range(2):
        packed = column(scales + i * 4, stride)
        for k in range(8):
            store(to + SCALES + (i * 8 + k) * 64, scale * _odd((packed >> (k * 4)) & 15))


@compiled
def unpack_iq2_s(weights, stride, columns, to):
    scale, grid = halves(column(weights, stride)) * splat_float(np.float32(0.125)), _IQ2_S.ctypes.data
    for quarter in range(2):
        upper = column(weights + 66 + quarter * 4, stride)
        for k in range(4):
            group = quarter * 4 + k
            indices, signs = column(weights + 2 + group * 4, stride), column(weights + 34 + group * 4, stride)
            for i in range(4):
                index = ((indices >> (i * 8)) & 255) | (((upper >> (k * 8 + i * 2)) & 3) << 8)
                _store_signed(gather_pairs(grid, index), signs >> (i * 8), to + group * 512 + i * 128)
    _scales16(weights + 74, stride, scale, to)


@compiled
def unpack_iq3_xxs(weights, stride, columns, to):
    scale, grid = halves(column(weights, stride)) * splat_float(np.float32(0.25)), _IQ3_XXS.ctypes.data
    for group in range(8):
        signs = column(weights + 66 + group * 4, stride)
        for half in range(2):
            indices = column(weights + 2 + group * 8 + half * 4, stride)
            for i in range(2):
                own = indices >> (i * 16)
                pair = gather_two(grid, own & 255, (own >> 8) & 255)
                into = to + group * 512 + half * 256 + i * 128
                _store_signed(pair, _even(signs >> (half * 14 + i * 7)), into)
        store(to + SCALES + group * 64, scale * _odd(signs >> 28))


@compiled
def unpack_iq3_s(weights, stride, columns, to):
    scale, scales, grid = halves(column(weights, stride)), column(weights + 106, stride), _IQ3_S.ctypes.data
    for group in range(8):
        upper = column(weights + 66 + group // 4 * 4, stride) >> (group % 4 * 8)
        signs = column(weights + 74 + group * 4, stride)
        for half in range(2):
            indices = column(weights + 2 + group * 8 + half * 4, stride)
            for i in range(2):
                own, ninths = indices >> (i * 16), upper >> (half * 4 + i * 2)
                first = (own & 255) | ((ninths & 1) << 8)
                second = ((own >> 8) & 255) | ((ninths & 2) << 7)
                into = to + group * 512 + half * 256 + i * 128
                _store_signed(gather_two(grid, first, second), signs >> (half * 16 + i * 8), into)
        store(to + SCALES + group * 64, scale * _odd((scales >> (group * 4)) & 15))


@inlined
def _store_raised(pair, lowered, to):
    """Add one eighth, or subtract it where `lowered` is 1."""
    eighth = (splat(1) - lowered - lowered) * splat(0x01010101)
    store(to, pair[0] + eighth)
    store(to + 64, pair[1] + eighth)


@compiled
def unpack_iq1_s(weights, stride, columns, to):
    scale, grid = halves(column(weights, stride)) * splat_float(np.float32(0.125)), _IQ1.ctypes.data
    for group in range(8):
        indices = column(weights + 2 + group * 4, stride)
        # Two groups' words at once: the last group's end the row.
        upper = column(weights + 34 + group // 2 * 4, stride) >> (group % 2 * 16)
        for i in range(4):
            index = ((indices >> (i * 8)) & 255) | (((upper >> (i * 3)) & 7) << 8)
            _store_raised(gather_pairs(grid, index), (upper >> 15) & 1, to + group * 512 + i * 128)
        store(to + SCALES + group * 64, scale * _odd((upper >> 12) & 7))


@compiled
def unpack_iq1_m(weights, stride, columns, to):
    low, high, grid = column(weights + 48, stride), column(weights + 52, stride), _IQ1.ctypes.data
    # The highest four bits of four halves are the block's scale; below them are four scales of three bits each.
    whole = ((low >> 12) & 0x000F) | ((low >> 24) & 0x00F0) | ((high >> 4) & 0x0F00) | ((high >> 16) & 0xF000)
    scale = halves(whole) * splat_float(np.float32(0.125))
    for group in range(8):
        indices = column(weights + group * 4, stride)
        upper = column(weights + 32 + group // 2 * 4, stride) >> (group % 2 * 16)
        for i in range(4):
            bits = upper >> (i * 4)
            index = ((indices >> (i * 8)) & 255) | ((bits & 7) << 8)
            _store_raised(gather_pairs(grid, index), (bits >> 3) & 1, to + group * 512 + i * 128)
        own = (low if group < 4 else high) >> (group // 2 % 2 * 16 + group % 2 * 6)
        store(to + SCALES + group * 128, scale * _odd(own & 7))
        store(to + SCALES + group * 128 + 64, scale * _odd((own >> 3) & 7))


#: by quant type, as luce.cpu_kernels.unpack.UNPACK: a block of 256 columns
UNPACK_GRID = {
    IQ1_S: unpack_iq1_s,
    IQ1_M: unpack_iq1_m,
    IQ2_XXS: unpack_iq2_xxs,
    IQ2_XS: unpack_iq2_xs,
    IQ2_S: unpack_iq2_s,
    IQ3_XXS: unpack_iq3_xxs,
    IQ3_S: unpack_iq3_s,
}
