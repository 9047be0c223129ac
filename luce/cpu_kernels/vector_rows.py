"""A vector for each of several rows of x: what products keep in registers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, models, register_model

from luce.cpu_kernels.dimensions import LANES
from luce.cpu_kernels.lowering import (
    BYTE_LANES,
    F32,
    FLOAT_LANES,
    I32,
    I64,
    INT_LANES,
    add_lanes,
    dot,
    fused,
    load,
    save,
    splat_value,
)
from luce.cpu_kernels.vectors import FLOATS, INTS, Vector


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


@intrinsic
def zero_ints(typing: Any, rows: Any) -> Any:
    """Zeros, ints, for as many rows as `rows` has."""
    kind = Rows(INTS, rows.count)

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.ArrayType(INT_LANES, kind.count), [[0] * LANES] * kind.count)

    return kind(rows), make


@intrinsic
def raise_rows(typing: Any, sums: Any, multiple: Any, address: Any, stride: Any, factor: Any) -> Any:
    """sums * multiple + factor * the int32 at `address` of a row, in all lanes; rows are `stride` apart."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, multiple, address, stride, factor = args
        times = splat_value(builder, multiple)
        for row in range(sums.type.count):
            value = load(builder, _row(builder, address, stride, row), I32, align=4)
            more = splat_value(builder, builder.mul(value, factor))
            own = builder.add(builder.mul(builder.extract_value(sums, row), times), more)
            sums = builder.insert_value(sums, own, row)
        return sums

    return sums(sums, types.int32, types.int64, types.int64, types.int32), make


@intrinsic
def dot_rows(typing: Any, sums: Any, weight: Any, address: Any, stride: Any) -> Any:
    """sums + four products: of the unsigned bytes of each lane of `weight` and the four int8 at `address` of a row."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, weight, address, stride = args
        weight = builder.bitcast(weight, BYTE_LANES)
        for row in range(signature.args[0].count):
            x = splat_value(builder, load(builder, _row(builder, address, stride, row), I32, align=4))
            total = dot(builder, builder.extract_value(sums, row), weight, builder.bitcast(x, BYTE_LANES))
            sums = builder.insert_value(sums, total, row)
        return sums

    return sums(sums, INTS, types.int64, types.int64), make


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
