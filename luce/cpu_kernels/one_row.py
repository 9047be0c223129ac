"""Products of one row of x, as most steps of a reply have, with 16 weight rows: unpacked weights stay in registers.

Bytes are as unpack.py has them, groups' sums are exact, and floats are added as in product.py: the bits are the same.
Each function adds all columns of the row of x whose records are at `x`, and writes 16 floats to `to`.
"""

from __future__ import annotations

from numba import int32

from luce.cpu_kernels.dimensions import RECORD, SCALE, SCALED
from luce.cpu_kernels.jit import compiled, inlined
from luce.cpu_kernels.unpack import (
    IQ4_HIGH,
    IQ4_LOW,
    IQ4_NL,
    IQ4_XS,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_0,
)
from luce.cpu_kernels.vector_rows import add_rows, add_scaled, store_rows, sum_own, zero_rows
from luce.cpu_kernels.vectors import (
    bytes16,
    columns16,
    forget_loads,
    halves,
    look_up,
    prefetch,
    signed_byte,
    splat,
    to_floats,
)

_LOW = 0x0F0F0F0F
# Rows between those that are read and those that are asked for.
_AHEAD = 32


@inlined
def _ask(address, size):
    for at in range(0, size, 64):
        prefetch(address + at)


@inlined
def _add(sums, words, x, offset, scale):
    """Add a group of 32 columns."""
    return add_rows(sums, sum_own(words, 0, x, int32(offset)), scale, x + SCALE, 0)


@inlined
def _nibbles(weights, stride):
    """32 columns from 16 bytes: the low nibbles are the first 16."""
    a, b, c, d = bytes16(weights, stride)
    e, f, g, h = a >> 4, b >> 4, c >> 4, d >> 4
    return a & _LOW, b & _LOW, c & _LOW, d & _LOW, e & _LOW, f & _LOW, g & _LOW, h & _LOW


@inlined
def _values(weights, stride):
    """As _nibbles, by the table of IQ4_NL."""
    a, b, c, d, e, f, g, h = _nibbles(weights, stride)
    return (
        look_up(a, IQ4_LOW, IQ4_HIGH),
        look_up(b, IQ4_LOW, IQ4_HIGH),
        look_up(c, IQ4_LOW, IQ4_HIGH),
        look_up(d, IQ4_LOW, IQ4_HIGH),
        look_up(e, IQ4_LOW, IQ4_HIGH),
        look_up(f, IQ4_LOW, IQ4_HIGH),
        look_up(g, IQ4_LOW, IQ4_HIGH),
        look_up(h, IQ4_LOW, IQ4_HIGH),
    )


@compiled
def q4_0(weights, stride, cols, x, to):
    sums, ahead = zero_rows(1), weights + _AHEAD * stride
    for block in range(cols // 32):
        at = weights + block * 18
        _ask(ahead + block * 288, 288)
        scale = halves(columns16(at, stride)[0])
        sums = _add(sums, _nibbles(at + 2, stride), x + block * RECORD, 8, scale)
    store_rows(sums, to)


@compiled
def q4_1(weights, stride, cols, x, to):
    sums, ahead = zero_rows(1), weights + _AHEAD * stride
    for block in range(cols // 32):
        at, own = weights + block * 20, x + block * RECORD
        _ask(ahead + block * 320, 320)
        both = columns16(at, stride)[0]
        sums = _add(sums, _nibbles(at + 4, stride), own, 0, halves(both))
        sums = add_scaled(sums, halves(both >> 16), own + SCALED + 8, 0)
    store_rows(sums, to)


@compiled
def q8_0(weights, stride, cols, x, to):
    sums, ahead, flip = zero_rows(1), weights + _AHEAD * stride, splat(-0x7F7F7F80)
    for block in range(cols // 32):
        at = weights + block * 34
        _ask(ahead + block * 544, 544)
        a, b, c, d = bytes16(at + 2, stride)
        e, f, g, h = bytes16(at + 18, stride)
        words = a ^ flip, b ^ flip, c ^ flip, d ^ flip, e ^ flip, f ^ flip, g ^ flip, h ^ flip
        sums = _add(sums, words, x + block * RECORD, 128, halves(columns16(at, stride)[0]))
    store_rows(sums, to)


@compiled
def iq4_nl(weights, stride, cols, x, to):
    sums, ahead = zero_rows(1), weights + _AHEAD * stride
    for block in range(cols // 32):
        at = weights + block * 18
        _ask(ahead + block * 288, 288)
        scale = halves(columns16(at, stride)[0])
        sums = _add(sums, _values(at + 2, stride), x + block * RECORD, 128, scale)
    store_rows(sums, to)


@compiled
def iq4_xs(weights, stride, cols, x, to):
    sums, ahead, offset = zero_rows(1), weights + _AHEAD * stride, splat(32)
    for block in range(cols // 256):
        at = weights + block * 136
        # The scale and the highest two bits of the eight groups' scales, then their lowest four.
        first, low, _, _ = columns16(at, stride)
        scale, high = halves(first), first >> 16
        for group in range(8):
            _ask(ahead + (block * 8 + group) * 272, 272)
            own = to_floats(((low & 15) | ((high & 3) << 4)) - offset)
            sums = _add(sums, _values(at + 8 + group * 16, stride), x, 128, scale * own)
            low, high, x = low >> 4, high >> 2, x + RECORD
    store_rows(sums, to)


@inlined
def _half_bytes(weights, stride, shift):
    """32 columns from 32 bytes' low (shift 0) or high nibbles (4)."""
    a, b, c, d = bytes16(weights, stride)
    e, f, g, h = bytes16(weights + 16, stride)
    a, b, c, d = a >> shift, b >> shift, c >> shift, d >> shift
    e, f, g, h = e >> shift, f >> shift, g >> shift, h >> shift
    return a & _LOW, b & _LOW, c & _LOW, d & _LOW, e & _LOW, f & _LOW, g & _LOW, h & _LOW


@inlined
def _add_k(sums, words, x, scale, minimum, scales, minimums, number):
    sums = _add(sums, words, x, 0, scale * signed_byte(scales, number))
    least = to_floats(splat(0)) - minimum * signed_byte(minimums, number)
    return add_scaled(sums, least, x + SCALED + 8, 0)


@compiled
def q4_k(weights, stride, cols, x, to):
    sums, ahead = zero_rows(1), weights + _AHEAD * stride
    for block in range(cols // 256):
        at = weights + block * 144
        both, a, b, c = columns16(at, stride)
        scale, minimum = halves(both), halves(both >> 16)
        scales, minimums = a & 0x3F3F3F3F, b & 0x3F3F3F3F
        for pair in range(4):
            _ask(ahead + (block * 4 + pair) * 576, 576)
            if pair == 2:
                scales, minimums = (c & _LOW) | ((a >> 2) & 0x30303030), ((c >> 4) & _LOW) | ((b >> 2) & 0x30303030)
            own = at + 16 + pair * 32
            sums = _add_k(sums, _half_bytes(own, stride, 0), x, scale, minimum, scales, minimums, 0)
            forget_loads()
            sums = _add_k(sums, _half_bytes(own, stride, 4), x + RECORD, scale, minimum, scales, minimums, 1)
            forget_loads()
            scales, minimums, x = scales >> 16, minimums >> 16, x + 2 * RECORD
    store_rows(sums, to)


@inlined
def _fifth(nibbles, bits, number):
    """Nibbles with bit `number` of each byte as the fifth."""
    return nibbles | (((bits >> number) & 0x01010101) << 4)


@inlined
def _with_fifths(nibbles, first, second, number):
    a, b, c, d, e, f, g, h = nibbles
    return (
        _fifth(a, first[0], number),
        _fifth(b, first[1], number),
        _fifth(c, first[2], number),
        _fifth(d, first[3], number),
        _fifth(e, second[0], number),
        _fifth(f, second[1], number),
        _fifth(g, second[2], number),
        _fifth(h, second[3], number),
    )


@compiled
def q5_k(weights, stride, cols, x, to):
    sums, ahead = zero_rows(1), weights + _AHEAD * stride
    for block in range(cols // 256):
        at = weights + block * 176
        both, a, b, c = columns16(at, stride)
        scale, minimum = halves(both), halves(both >> 16)
        scales, minimums = a & 0x3F3F3F3F, b & 0x3F3F3F3F
        for pair in range(4):
            _ask(ahead + (block * 4 + pair) * 704, 704)
            if pair == 2:
                scales, minimums = (c & _LOW) | ((a >> 2) & 0x30303030), ((c >> 4) & _LOW) | ((b >> 2) & 0x30303030)
            own, first, second = at + 48 + pair * 32, bytes16(at + 16, stride), bytes16(at + 32, stride)
            words = _with_fifths(_half_bytes(own, stride, 0), first, second, 2 * pair)
            sums = _add_k(sums, words, x, scale, minimum, scales, minimums, 0)
            forget_loads()
            first, second = bytes16(at + 16, stride), bytes16(at + 32, stride)
            words = _with_fifths(_half_bytes(own, stride, 4), first, second, 2 * pair + 1)
            sums = _add_k(sums, words, x + RECORD, scale, minimum, scales, minimums, 1)
            forget_loads()
            scales, minimums, x = scales >> 16, minimums >> 16, x + 2 * RECORD
    store_rows(sums, to)


@inlined
def _six(nibbles, bits, quarter):
    """Nibbles with two bits for each byte, both of the columns of that quarter."""
    high = bits << (4 - 2 * quarter) if quarter < 2 else bits >> (2 * quarter - 4)
    return ((nibbles >> quarter // 2 * 4) & _LOW) | (high & 0x30303030)


@inlined
def _sum_six(nibbles, bits, quarter, x, place):
    """The sums of 16 columns."""
    words = (
        _six(nibbles[0], bits[0], quarter),
        _six(nibbles[1], bits[1], quarter),
        _six(nibbles[2], bits[2], quarter),
        _six(nibbles[3], bits[3], quarter),
    )
    return sum_own(words, place, x, int32(32))


@compiled
def q6_k(weights, stride, cols, x, to):
    sums, ahead = zero_rows(1), weights + _AHEAD * stride
    for block in range(cols // 256):
        at = weights + block * 210
        scale = halves(columns16(at + 194, stride)[3] >> 16)
        for half in range(2):
            a, b, c, d = columns16(at + 192, stride)
            first, second = (a, b) if half == 0 else (c, d)
            for part in range(4):
                _ask(ahead + (block * 8 + half * 4 + part) * 420, 420)
            upper, own = at + 128 + half * 32, at + half * 64
            bits, more_bits = bytes16(upper, stride), bytes16(upper + 16, stride)
            # A byte has a column of quarter 0 and one of 2, or of 1 and of 3; floats are added in the columns' order.
            low, more = bytes16(own, stride), bytes16(own + 16, stride)
            y, z = x + RECORD, x + 2 * RECORD
            sums = add_rows(sums, _sum_six(low, bits, 0, x, 0), scale * signed_byte(first, 0), x + SCALE, 0)
            sums = add_rows(sums, _sum_six(more, more_bits, 0, x, 4), scale * signed_byte(first, 1), x + SCALE, 0)
            later, last = _sum_six(low, bits, 2, z, 0), _sum_six(more, more_bits, 2, z, 4)
            low, more = bytes16(own + 32, stride), bytes16(own + 48, stride)
            sums = add_rows(sums, _sum_six(low, bits, 1, y, 0), scale * signed_byte(first, 2), y + SCALE, 0)
            sums = add_rows(sums, _sum_six(more, more_bits, 1, y, 4), scale * signed_byte(first, 3), y + SCALE, 0)
            sums = add_rows(sums, later, scale * signed_byte(second, 0), z + SCALE, 0)
            sums = add_rows(sums, last, scale * signed_byte(second, 1), z + SCALE, 0)
            x += 3 * RECORD
            sums = add_rows(sums, _sum_six(low, bits, 3, x, 0), scale * signed_byte(second, 2), x + SCALE, 0)
            sums = add_rows(sums, _sum_six(more, more_bits, 3, x, 4), scale * signed_byte(second, 3), x + SCALE, 0)
            x += RECORD
    store_rows(sums, to)


#: by quant type
ONE_ROW = {Q4_0: q4_0, Q4_1: q4_1, Q8_0: q8_0, IQ4_NL: iq4_nl, IQ4_XS: iq4_xs, Q4_K: q4_k, Q5_K: q5_k, Q6_K: q6_k}
