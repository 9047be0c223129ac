"""16 weight rows of quant blocks to bytes that products read: 256 columns, or fewer of the types with blocks of 32.

Written to `to`, each vector a lane per weight row:

    0      up to 64 ints: four columns of each row, as unsigned bytes: a value plus the type's OFFSET
    SCALES the groups' scales: floats
    MINIMUMS  the types with minimums: the groups' minimums as added to a product, so negative in the K types

A group is 32 columns, in the types of GROUPS16 16. The layouts of the blocks are those of ggml-quants. The types with a
grid are in unpack_grid.py.
"""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType

from luce.cpu_kernels.dimensions import MINIMUMS, SCALES
from luce.cpu_kernels.jit import compiled, inlined
from luce.cpu_kernels.vectors import (
    as_floats,
    column,
    columns16,
    halves,
    look_up,
    signed_byte,
    splat,
    splat_float,
    store,
    to_floats,
)

_T = GGMLQuantizationType
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 = (int(t) for t in (_T.Q4_0, _T.Q4_1, _T.Q5_0, _T.Q5_1, _T.Q8_0))
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = (int(t) for t in (_T.Q2_K, _T.Q3_K, _T.Q4_K, _T.Q5_K, _T.Q6_K))
IQ4_NL, IQ4_XS, MXFP4, NVFP4 = (int(t) for t in (_T.IQ4_NL, _T.IQ4_XS, _T.MXFP4, _T.NVFP4))
TQ1_0, TQ2_0 = int(_T.TQ1_0), int(_T.TQ2_0)

#: what is added to a value so that it becomes an unsigned byte
OFFSETS = {
    Q4_0: 8,
    Q5_0: 16,
    Q8_0: 128,
    Q3_K: 4,
    Q6_K: 32,
    IQ4_NL: 128,
    IQ4_XS: 128,
    MXFP4: 16,
    NVFP4: 16,
    TQ1_0: 1,
    TQ2_0: 1,
}
GROUPS16 = frozenset({Q2_K, Q3_K, Q6_K, NVFP4})
WITH_MINIMUMS = frozenset({Q4_1, Q5_1, Q2_K, Q4_K, Q5_K})


def _table(values, offset):
    """Values plus an offset as two int64 of bytes."""
    packed = bytes(value + offset for value in values)
    return [int.from_bytes(packed[i : i + 8], "little", signed=True) for i in (0, 8)]


# ggml's kvalues_iq4nl, and twice the values of E2M1.
IQ4_LOW, IQ4_HIGH = _table((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), 128)
_E2M1_LOW, _E2M1_HIGH = _table((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), 16)


@inlined
def _nibbles(weights, stride, to):
    """32 columns from 16 bytes: the low nibbles are the first 16."""
    a, b, c, d = columns16(weights, stride)
    store(to, a & 0x0F0F0F0F)
    store(to + 64, b & 0x0F0F0F0F)
    store(to + 128, c & 0x0F0F0F0F)
    store(to + 192, d & 0x0F0F0F0F)
    store(to + 256, (a >> 4) & 0x0F0F0F0F)
    store(to + 320, (b >> 4) & 0x0F0F0F0F)
    store(to + 384, (c >> 4) & 0x0F0F0F0F)
    store(to + 448, (d >> 4) & 0x0F0F0F0F)


@inlined
def _fifth(bits, shift):
    """Four bits of each lane as bit 4 of its four bytes."""
    return ((((bits >> shift) & 15) * splat(0x00204081)) & 0x01010101) << 4


@inlined
def _with_fifths(weights, stride, bits, to):
    a, b, c, d = columns16(weights, stride)
    store(to, (a & 0x0F0F0F0F) | _fifth(bits, 0))
    store(to + 64, (b & 0x0F0F0F0F) | _fifth(bits, 4))
    store(to + 128, (c & 0x0F0F0F0F) | _fifth(bits, 8))
    store(to + 192, (d & 0x0F0F0F0F) | _fifth(bits, 12))
    store(to + 256, ((a >> 4) & 0x0F0F0F0F) | _fifth(bits, 16))
    store(to + 320, ((b >> 4) & 0x0F0F0F0F) | _fifth(bits, 20))
    store(to + 384, ((c >> 4) & 0x0F0F0F0F) | _fifth(bits, 24))
    store(to + 448, ((d >> 4) & 0x0F0F0F0F) | _fifth(bits, 28))


@compiled
def unpack_q4_0(weights, stride, columns, to):
    for block in range(columns // 32):
        at = weights + block * 18
        _nibbles(at + 2, stride, to + block * 512)
        store(to + SCALES + block * 64, halves(columns16(at, stride)[0]))


@compiled
def unpack_q4_1(weights, stride, columns, to):
    for block in range(columns // 32):
        at = weights + block * 20
        _nibbles(at + 4, stride, to + block * 512)
        both = columns16(at, stride)[0]
        store(to + SCALES + block * 64, halves(both))
        store(to + MINIMUMS + block * 64, halves(both >> 16))


@compiled
def unpack_q5_0(weights, stride, columns, to):
    for block in range(columns // 32):
        at = weights + block * 22
        _with_fifths(at + 6, stride, column(at + 2, stride), to + block * 512)
        store(to + SCALES + block * 64, halves(columns16(at, stride)[0]))


@compiled
def unpack_q5_1(weights, stride, columns, to):
    for block in range(columns // 32):
        at = weights + block * 24
        _with_fifths(at + 8, stride, column(at + 4, stride), to + block * 512)
        both = columns16(at, stride)[0]
        store(to + SCALES + block * 64, halves(both))
        store(to + MINIMUMS + block * 64, halves(both >> 16))


@compiled
def unpack_q8_0(weights, stride, columns, to):
    for block in range(columns // 32):
        at, into = weights + block * 34, to + block * 512
        for half in range(2):
            a, b, c, d = columns16(at + 2 + half * 16, stride)
            # A byte plus 128 is the byte with its highest bit flipped.
            store(into + half * 256, a ^ splat(-0x7F7F7F80))
            store(into + half * 256 + 64, b ^ splat(-0x7F7F7F80))
            store(into + half * 256 + 128, c ^ splat(-0x7F7F7F80))
            store(into + half * 256 + 192, d ^ splat(-0x7F7F7F80))
        store(to + SCALES + block * 64, halves(columns16(at, stride)[0]))


@compiled
def unpack_iq4_nl(weights, stride, columns, to):
    for block in range(columns // 32):
        at = weights + block * 18
        _values(at + 2, stride, to + block * 512, IQ4_LOW, IQ4_HIGH)
        store(to + SCALES + block * 64, halves(columns16(at, stride)[0]))


@compiled
def unpack_mxfp4(weights, stride, columns, to):
    for block in range(columns // 32):
        at = weights + block * 17
        _values(at + 1, stride, to + block * 512, _E2M1_LOW, _E2M1_HIGH)
        # 2^(exponent - 128), which may be subnormal, of two normal factors.
        exponent = column(at, stride) & 255
        half = exponent >> 1
        first, second = as_floats((half + splat(63)) << 23), as_floats((exponent - half + splat(63)) << 23)
        store(to + SCALES + block * 64, first * second)


@compiled
def unpack_nvfp4(weights, stride, columns, to):
    for block in range(columns // 64):
        at = weights + block * 36
        scales = column(at, stride)
        for group in range(4):
            a, b = column(at + 4 + group * 8, stride), column(at + 8 + group * 8, stride)
            into = to + block * 1024 + group * 256
            store(into, look_up(a & 0x0F0F0F0F, _E2M1_LOW, _E2M1_HIGH))
            store(into + 64, look_up(b & 0x0F0F0F0F, _E2M1_LOW, _E2M1_HIGH))
            store(into + 128, look_up((a >> 4) & 0x0F0F0F0F, _E2M1_LOW, _E2M1_HIGH))
            store(into + 192, look_up((b >> 4) & 0x0F0F0F0F, _E2M1_LOW, _E2M1_HIGH))
            # A float of four bits of exponent, of bias 7, and three of mantissa: as bits of a half it has 2^-8 of its
            # value. Half the value is wanted, as the table is doubled. 0x7F is no number, and 0.
            bits = (scales >> (group * 8)) & 255
            number = (bits & 127) * (((bits ^ 127) + splat(255)) >> 8)
            store(to + SCALES + (block * 4 + group) * 64, halves(number << 7) * splat_float(np.float32(128)))


@inlined
def _values(weights, stride, to, low, high):
    """As _nibbles, by a table."""
    a, b, c, d = columns16(weights, stride)
    store(to, look_up(a & 0x0F0F0F0F, low, high))
    store(to + 64, look_up(b & 0x0F0F0F0F, low, high))
    store(to + 128, look_up(c & 0x0F0F0F0F, low, high))
    store(to + 192, look_up(d & 0x0F0F0F0F, low, high))
    store(to + 256, look_up((a >> 4) & 0x0F0F0F0F, low, high))
    store(to + 320, look_up((b >> 4) & 0x0F0F0F0F, low, high))
    store(to + 384, look_up((c >> 4) & 0x0F0F0F0F, low, high))
    store(to + 448, look_up((d >> 4) & 0x0F0F0F0F, low, high))


@compiled
def unpack_iq4_xs(weights, stride, columns, to):
    # The scale and the highest two bits of the eight groups' scales, then their lowest four.
    first, low, _, _ = columns16(weights, stride)
    scale = halves(first)
    for group in range(8):
        _values(weights + 8 + group * 16, stride, to + group * 512, IQ4_LOW, IQ4_HIGH)
        own = ((low >> (group * 4)) & 15) | (((first >> (16 + group * 2)) & 3) << 4)
        store(to + SCALES + group * 64, scale * to_floats(own - splat(32)))


@inlined
def _k_scales(weights, stride, to):
    """The scales and minimums of Q4_K and Q5_K: eight of six bits each in twelve bytes behind two float16."""
    both, a, b, c = columns16(weights, stride)
    scale, minimum = halves(both), halves(both >> 16)
    scales0, minimums0 = a & 0x3F3F3F3F, b & 0x3F3F3F3F
    scales1 = (c & 0x0F0F0F0F) | ((a >> 2) & 0x30303030)
    minimums1 = ((c >> 4) & 0x0F0F0F0F) | ((b >> 2) & 0x30303030)
    zero = to_floats(splat(0))
    for i in range(4):
        store(to + SCALES + i * 64, scale * signed_byte(scales0, i))
        store(to + SCALES + (i + 4) * 64, scale * signed_byte(scales1, i))
        store(to + MINIMUMS + i * 64, zero - minimum * signed_byte(minimums0, i))
        store(to + MINIMUMS + (i + 4) * 64, zero - minimum * signed_byte(minimums1, i))


@compiled
def unpack_q4_k(weights, stride, columns, to):
    _k_scales(weights, stride, to)
    for pair in range(4):
        for half in range(2):
            a, b, c, d = columns16(weights + 16 + pair * 32 + half * 16, stride)
            into = to + pair * 1024 + half * 256
            store(into, a & 0x0F0F0F0F)
            store(into + 64, b & 0x0F0F0F0F)
            store(into + 128, c & 0x0F0F0F0F)
            store(into + 192, d & 0x0F0F0F0F)
            store(into + 512, (a >> 4) & 0x0F0F0F0F)
            store(into + 576, (b >> 4) & 0x0F0F0F0F)
            store(into + 640, (c >> 4) & 0x0F0F0F0F)
            store(into + 704, (d >> 4) & 0x0F0F0F0F)


@compiled
def unpack_q5_k(weights, stride, columns, to):
    _k_scales(weights, stride, to)
    for half in range(2):
        e, f, g, h = columns16(weights + 16 + half * 16, stride)
        for pair in range(4):
            a, b, c, d = columns16(weights + 48 + pair * 32 + half * 16, stride)
            into = to + pair * 1024 + half * 256
            low, high = pair * 2, pair * 2 + 1
            store(into, (a & 0x0F0F0F0F) | (((e >> low) & 0x01010101) << 4))
            store(into + 64, (b & 0x0F0F0F0F) | (((f >> low) & 0x01010101) << 4))
            store(into + 128, (c & 0x0F0F0F0F) | (((g >> low) & 0x01010101) << 4))
            store(into + 192, (d & 0x0F0F0F0F) | (((h >> low) & 0x01010101) << 4))
            store(into + 512, ((a >> 4) & 0x0F0F0F0F) | (((e >> high) & 0x01010101) << 4))
            store(into + 576, ((b >> 4) & 0x0F0F0F0F) | (((f >> high) & 0x01010101) << 4))
            store(into + 640, ((c >> 4) & 0x0F0F0F0F) | (((g >> high) & 0x01010101) << 4))
            store(into + 704, ((d >> 4) & 0x0F0F0F0F) | (((h >> high) & 0x01010101) << 4))


@compiled
def unpack_q6_k(weights, stride, columns, to):
    scale = halves(columns16(weights + 194, stride)[3] >> 16)
    words = columns16(weights + 192, stride)
    for i in range(4):
        scales = words[i]
        for k in range(4):
            store(to + SCALES + (i * 4 + k) * 64, scale * signed_byte(scales, k))
    for half in range(2):
        for part in range(2):  # 16 of 32 columns
            high = columns16(weights + 128 + half * 32 + part * 16, stride)
            first = columns16(weights + half * 64 + part * 16, stride)
            second = columns16(weights + half * 64 + 32 + part * 16, stride)
            into = to + half * 2048 + part * 256
            for i in range(4):
                bits = high[i]
                store(into + i * 64, (first[i] & 0x0F0F0F0F) | ((bits & 0x03030303) << 4))
                store(into + 512 + i * 64, (second[i] & 0x0F0F0F0F) | ((bits & 0x0C0C0C0C) << 2))
                store(into + 1024 + i * 64, ((first[i] >> 4) & 0x0F0F0F0F) | (bits & 0x30303030))
                store(into + 1536 + i * 64, ((second[i] >> 4) & 0x0F0F0F0F) | ((bits >> 2) & 0x30303030))


@compiled
def unpack_q2_k(weights, stride, columns, to):
    both = column(weights + 80, stride)
    scale, minimum = halves(both), halves(both >> 16)
    zero = to_floats(splat(0))
    words = columns16(weights, stride)
    for i in range(4):
        packed = words[i]
        for k in range(4):
            own = packed >> (k * 8)
            store(to + SCALES + (i * 4 + k) * 64, scale * to_floats(own & 15))
            store(to + MINIMUMS + (i * 4 + k) * 64, zero - minimum * to_floats((own >> 4) & 15))
    for half in range(2):
        for part in range(2):
            bits = columns16(weights + 16 + half * 32 + part * 16, stride)
            for group in range(4):
                into = to + half * 2048 + group * 512 + part * 256
                for i in range(4):
                    store(into + i * 64, (bits[i] >> (group * 2)) & 0x03030303)


@compiled
def unpack_q3_k(weights, stride, columns, to):
    _, a, b, c = columns16(weights + 92, stride)
    scale = halves(columns16(weights + 94, stride)[3] >> 16)
    for i in range(4):
        # Four scales of six bits: nibbles of the first two words, upper bits of the third.
        nibbles = ((a if i % 2 == 0 else b) >> (i // 2 * 4)) & 0x0F0F0F0F
        packed = nibbles | (((c >> (i * 2)) & 0x03030303) << 4)
        for k in range(4):
            own = signed_byte(packed, k) - to_floats(splat(32))
            store(to + SCALES + (i * 4 + k) * 64, scale * own)
    for part in range(2):
        high = columns16(weights + part * 16, stride)
        for half in range(2):
            bits = columns16(weights + 32 + half * 32 + part * 16, stride)
            for group in range(4):
                into = to + half * 2048 + group * 512 + part * 256
                for i in range(4):
                    third = ((high[i] >> (half * 4 + group)) & 0x01010101) << 2
                    store(into + i * 64, ((bits[i] >> (group * 2)) & 0x03030303) | third)


@inlined
def _digits(bytes4, count, to, step):
    """`count` ternary digits of four bytes in each lane, the columns of each `step` bytes behind those before.

    A byte b is a fraction b / 256 in base 3, whose digits are the carries of b times 3.
    """
    even, odd = bytes4 & 0x00FF00FF, (bytes4 >> 8) & 0x00FF00FF
    for digit in range(count):
        even, odd = even * splat(3), odd * splat(3)
        store(to + digit * step, ((even >> 8) & 0x00FF00FF) | (odd & 0x7F00FF00))
        even, odd = even & 0x00FF00FF, odd & 0x00FF00FF


@compiled
def unpack_tq1_0(weights, stride, columns, to):
    for half in range(2):
        words = columns16(weights + half * 16, stride)
        for i in range(4):
            _digits(words[i], 5, to + half * 256 + i * 64, 512)
    words = columns16(weights + 32, stride)
    for i in range(4):
        _digits(words[i], 5, to + 2560 + i * 64, 256)
    # The last four bytes of digits, then the scale.
    _digits(column(weights + 48, stride), 4, to + 3840, 64)
    scale = halves(column(weights + 50, stride) >> 16)
    for group in range(8):
        store(to + SCALES + group * 64, scale)


@compiled
def unpack_tq2_0(weights, stride, columns, to):
    for half in range(2):
        for part in range(2):
            bits = columns16(weights + half * 32 + part * 16, stride)
            for group in range(4):
                into = to + half * 2048 + group * 512 + part * 256
                for i in range(4):
                    store(into + i * 64, (bits[i] >> (group * 2)) & 0x03030303)
    scale = halves(column(weights + 62, stride) >> 16)
    for group in range(8):
        store(to + SCALES + group * 64, scale)


#: by quant type: each function unpacks `columns` columns of 16 rows, `stride` bytes apart, to UNPACKED_BYTES
UNPACK = {
    Q4_0: unpack_q4_0,
    Q4_1: unpack_q4_1,
    Q5_0: unpack_q5_0,
    Q5_1: unpack_q5_1,
    Q8_0: unpack_q8_0,
    Q2_K: unpack_q2_k,
    Q3_K: unpack_q3_k,
    Q4_K: unpack_q4_k,
    Q5_K: unpack_q5_k,
    Q6_K: unpack_q6_k,
    IQ4_NL: unpack_iq4_nl,
    IQ4_XS: unpack_iq4_xs,
    MXFP4: unpack_mxfp4,
    NVFP4: unpack_nvfp4,
    TQ1_0: unpack_tq1_0,
    TQ2_0: unpack_tq2_0,
}
