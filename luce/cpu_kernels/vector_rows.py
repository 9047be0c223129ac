"""A vector for each of several rows of x: what products keep in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, models, register_model

from luce.cpu_kernels.dimensions import FINER, LANES, REST, SUMS
from luce.cpu_kernels.lowering import (
    BYTE_LANES,
    F32,
    FLOAT_LANES,
    I32,
    I64,
    INT_LANES,
    PAIR_LANES,
    PAIRS,
    add_lanes,
    add_quarters,
    all_lanes,
    dot,
    fused,
    keep_order,
    load,
    save,
    shuffle,
    splat_value,
)
from luce.cpu_kernels.vectors import FLOATS, INTS, Vector

#: computes a group's words when they are asked for
Words = Sequence[Callable[[], Any]]


class Rows(types.Type):
    """A vector for each of a fixed number of rows of x."""

    def __init__(self, vector: Vector, count: int) -> None:
        self.vector, self.count = vector, count
        super().__init__(name=f"Rows({vector.name}, {count})")


@register_model(Rows)
class _RowsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Rows) -> None:
        super().__init__(manager, kind, ir.ArrayType(kind.vector.lowered, kind.count))


@intrinsic(prefer_literal=True)
def load_rows(typing: Any, count: Any, address: Any) -> Any:
    """The floats of `count` rows, which lie one behind another."""
    if not isinstance(count, types.IntegerLiteral):
        return None
    kind = Rows(FLOATS, count.literal_value)

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = ir.Constant(ir.ArrayType(FLOAT_LANES, kind.count), ir.Undefined)
        for row in range(kind.count):
            rows = builder.insert_value(rows, load(builder, args[1], FLOAT_LANES, row * 4 * LANES, align=4), row)
        return rows

    return kind(count, types.int64), make


@intrinsic
def store_rows(typing: Any, rows: Any, address: Any) -> Any:
    """Write the floats of rows, one behind another."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for row in range(rows.count):
            place = builder.add(args[1], ir.Constant(I64, row * 4 * LANES))
            save(builder, builder.extract_value(args[0], row), place)
        return context.get_dummy_value()

    return types.void(rows, types.int64), make


@intrinsic(prefer_literal=True)
def sum_own(typing: Any, words: Any, place: Any, record: Any, offset: Any) -> Any:
    """As sum_group, of one row of x, with ints that are computed from those of `bytes16`, in its order."""
    if not isinstance(place, types.IntegerLiteral) or not isinstance(words, types.containers.UniTuple):
        return None
    kind, begin = Rows(INTS, 1), place.literal_value

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        packed, _, record, offset = args
        if not PAIRS:
            own = [partial(builder.extract_value, packed, i) for i in range(words.count)]
            return _sums(builder, kind, own, record, ir.Constant(I64, 0), offset, begin)
        total = _sum_own_pairs(builder, [builder.extract_value(packed, i) for i in range(words.count)], record, begin)
        total = builder.add(total, _raised(builder, record, words.count, begin, offset))
        return builder.insert_value(ir.Constant(ir.ArrayType(INT_LANES, 1), ir.Undefined), total, 0)

    return kind(words, place, types.int64, types.int32), make


@intrinsic(prefer_literal=True)
def sum_group(
    typing: Any, rows: Any, count: Any, address: Any, place: Any, record: Any, stride: Any, offset: Any
) -> Any:
    """The sums of a group's products for as many rows as `rows` has: ints, exact.

    `count`: four (16 columns) or eight (32) ints that lie one behind another, each of four columns of 16 weight rows as
    unsigned bytes, which are `offset` above the weights. `record`: the address of the first row's record
    (quantised_rows.py), of which the group has the columns from 4 * `place` on; the rows' records are `stride` apart.
    """
    if not isinstance(place, types.IntegerLiteral) or not isinstance(count, types.IntegerLiteral):
        return None
    kind, begin = Rows(INTS, rows.count), place.literal_value

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, address, _, record, stride, offset = args
        # Loaded where they are used first: there are more than registers.
        own = [partial(load, builder, address, INT_LANES, 4 * LANES * i, 4) for i in range(count.literal_value)]
        return _sums(builder, kind, own, record, stride, offset, begin)

    return kind(rows, count, types.int64, place, types.int64, types.int64, types.int32), make


def _sum_own_pairs(builder: Any, words: list[Any], record: Any, begin: int) -> Any:
    sums = [ir.Constant(INT_LANES, [0] * LANES)] * 4
    low, eight = (ir.Constant(PAIR_LANES, [value] * 2 * LANES) for value in (255, 8))
    for part in range(len(words) // 4):
        xs = []
        for odd in range(2):
            x = load(builder, record, ir.VectorType(I32, 4), (part + begin // 4) * 32 + odd * 16, align=4)
            xs.append(builder.bitcast(shuffle(builder, x, x, list(range(4)) * 4), PAIR_LANES))
        for i in range(4):
            pairs = builder.bitcast(words[part * 4 + i], PAIR_LANES)
            sums[i] = dot(builder, sums[i], builder.and_(pairs, low), xs[0])
            sums[i] = dot(builder, sums[i], builder.lshr(pairs, eight), xs[1])
    return add_quarters(builder, sums)


def _raised(builder: Any, record: Any, words: int, begin: int, offset: Any) -> Any:
    """What the offset of a group's weights adds to its sums, negative."""
    total = load(builder, record, I32, SUMS + (8 if words == 8 else begin), align=4)
    return splat_value(builder, builder.mul(total, builder.neg(offset)))


def _sums(builder: Any, kind: Rows, words: Words, record: Any, stride: Any, offset: Any, begin: int) -> Any:
    places = [_row(builder, record, stride, row) for row in range(kind.count)]
    sums = [_raised(builder, each, len(words), begin, offset) for each in places]
    add = _sum_pairs if PAIRS else _sum_bytes
    add(builder, sums, words, places, begin)
    result = ir.Constant(ir.ArrayType(INT_LANES, kind.count), ir.Undefined)
    for row, value in enumerate(sums):
        result = builder.insert_value(result, value, row)
    return result


def _sum_pairs(builder: Any, sums: list[Any], words: Words, places: list[Any], begin: int) -> None:
    low, eight = (ir.Constant(PAIR_LANES, [value] * 2 * LANES) for value in (255, 8))
    for k, word in enumerate(words):
        pairs = builder.bitcast(word(), PAIR_LANES)
        for odd, weight in enumerate((builder.and_(pairs, low), builder.lshr(pairs, eight))):
            for row, at in enumerate(places):
                x = splat_value(builder, load(builder, at, I32, (begin + k) // 4 * 32 + odd * 16 + k % 4 * 4, align=4))
                sums[row] = dot(builder, sums[row], weight, builder.bitcast(x, PAIR_LANES))
                if len(sums) > 1:
                    sums[row] = keep_order(builder, sums[row])


def _sum_bytes(builder: Any, sums: list[Any], words: Words, places: list[Any], begin: int) -> None:
    finer = all_lanes(FINER)
    firsts = [ir.Constant(INT_LANES, [0] * LANES) for _ in places]
    for totals, part in ((firsts, 0), (sums, REST)):
        for k, word in enumerate(words):
            weight = builder.bitcast(word(), BYTE_LANES)
            for row, at in enumerate(places):
                x = splat_value(builder, load(builder, at, I32, part + (begin + k) * 4, align=4))
                totals[row] = dot(builder, totals[row], weight, builder.bitcast(x, BYTE_LANES))
        if part == 0:
            sums[:] = [builder.add(own, builder.mul(first, finer)) for own, first in zip(sums, firsts, strict=True)]


@intrinsic
def add_rows(typing: Any, totals: Any, sums: Any, scale: Any, address: Any, stride: Any) -> Any:
    """totals + sums * (scale * the float at `address` of a row)."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals, sums, scale, address, stride = args
        for row in range(totals.type.count):
            x = splat_value(builder, load(builder, _row(builder, address, stride, row), F32, align=4))
            value = builder.sitofp(builder.extract_value(sums, row), FLOAT_LANES)
            total = fused(builder, value, builder.fmul(scale, x), builder.extract_value(totals, row))
            totals = builder.insert_value(totals, total, row)
        return totals

    return totals(totals, sums, FLOATS, types.int64, types.int64), make


@intrinsic
def add_scaled(typing: Any, totals: Any, vector: Any, address: Any, stride: Any) -> Any:
    """totals + vector * the float at `address` of a row."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals, vector, address, stride = args
        for row in range(totals.type.count):
            x = splat_value(builder, load(builder, _row(builder, address, stride, row), F32, align=4))
            totals = builder.insert_value(totals, fused(builder, vector, x, builder.extract_value(totals, row)), row)
        return totals

    return totals(totals, FLOATS, types.int64, types.int64), make


@intrinsic(prefer_literal=True)
def zero_rows(typing: Any, count: Any) -> Any:
    """Zeros for `count` rows."""
    if not isinstance(count, types.IntegerLiteral):
        return None
    kind = Rows(FLOATS, count.literal_value)

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.ArrayType(FLOAT_LANES, kind.count), [[0.0] * LANES] * kind.count)

    return kind(count), make


@intrinsic
def add_products(typing: Any, totals: Any, weight: Any, address: Any, stride: Any) -> Any:
    """totals + weight * the 16 floats at `address` of a row, lane by lane."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals, weight, address, stride = args
        for row in range(totals.type.count):
            x = load(builder, _row(builder, address, stride, row), FLOAT_LANES, align=4)
            totals = builder.insert_value(totals, fused(builder, weight, x, builder.extract_value(totals, row)), row)
        return totals

    return totals(totals, FLOATS, types.int64, types.int64), make


@intrinsic(prefer_literal=True)
def update_rows(typing: Any, count: Any, address: Any, stride: Any, factor: Any, vector: Any, scalars: Any) -> Any:
    """In memory, 16 floats of each of `count` rows, `stride` apart: factor * them + vector * the row's float of those
    at `scalars`, which lie one behind another."""
    if not isinstance(count, types.IntegerLiteral):
        return None

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, address, stride, factor, vector, scalars = args
        for row in range(count.literal_value):
            place = _row(builder, address, stride, row)
            scalar = splat_value(builder, load(builder, scalars, F32, row * 4, align=4))
            faded = builder.fmul(factor, load(builder, place, FLOAT_LANES, align=4))
            save(builder, fused(builder, vector, scalar, faded), place)
        return context.get_dummy_value()

    return types.void(count, types.int64, types.int64, FLOATS, FLOATS, types.int64), make


@intrinsic
def store_totals(typing: Any, totals: Any, address: Any, stride: Any) -> Any:
    """Write the sum of each row's lanes (as `total`) as a float; rows are `stride` apart."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals, address, stride = args
        for row in range(totals.type.count):
            save(builder, add_lanes(builder, builder.extract_value(totals, row)), _row(builder, address, stride, row))
        return context.get_dummy_value()

    return types.void(totals, types.int64, types.int64), make


def _row(builder: Any, address: Any, stride: Any, row: int) -> Any:
    return builder.add(address, builder.mul(stride, ir.Constant(I64, row))) if row else address
