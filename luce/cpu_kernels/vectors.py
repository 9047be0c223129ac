"""Vectors of 16 lanes in compiled code: their types for numba, and the operations on them.

Addresses are int64. A vector lives in registers: it can be a local variable or an argument, not an element of an array.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, overload, register_model

from luce.cpu_kernels.dimensions import LANES
from luce.cpu_kernels.lowering import (
    BYTE_LANES,
    F32,
    FEATURES,
    FLOAT_LANES,
    I8,
    I16,
    I32,
    I64,
    INT_LANES,
    PAIRS,
    add_lanes,
    all_lanes,
    call,
    fused,
    join,
    load,
    save,
    shuffle,
    splat_value,
)


class Vector(types.Type):
    """16 int32 (each also four bytes) or 16 float32."""

    def __init__(self, name: str, lowered: ir.VectorType) -> None:
        self.lowered = lowered
        super().__init__(name=name)


INTS, FLOATS = Vector("ints", INT_LANES), Vector("floats", FLOAT_LANES)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, kind.lowered)


@intrinsic
def column(typing: Any, address: Any, stride: Any) -> Any:
    """The four bytes at `address` of 16 weight rows, `stride` apart, as ints."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, stride = args
        found = ir.Constant(INT_LANES, ir.Undefined)
        for row in range(LANES):
            value = load(builder, builder.add(address, builder.mul(stride, ir.Constant(I64, row))), I32)
            found = builder.insert_element(found, value, ir.Constant(I32, row))
        return found

    return INTS(types.int64, types.int64), make


@intrinsic
def columns16(typing: Any, address: Any, stride: Any) -> Any:
    """The 16 bytes at `address` of 16 weight rows, `stride` apart: four ints, one for each four bytes."""
    kind = types.containers.UniTuple(INTS, 4)

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.make_tuple(builder, kind, _transposed(builder, _rows16(builder, *args)))

    return kind(types.int64, types.int64), make


@intrinsic
def bytes16(typing: Any, address: Any, stride: Any) -> Any:
    """As columns16, but where products take pairs (lowering.PAIRS), quarter q of int i is row 4 q + i. What is computed
    from each byte by itself is for sum_own."""
    kind = types.containers.UniTuple(INTS, 4)

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = _rows16(builder, *args)
        return context.make_tuple(builder, kind, _joined(builder, rows) if PAIRS else _transposed(builder, rows))

    return kind(types.int64, types.int64), make


@intrinsic
def forget_loads(typing: Any) -> Any:
    """Behind it, memory is read again: what stays in registers until its second use pushes out what is used more often.
    16 rows are more than the registers of AVX2 hold."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if PAIRS:
            builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)
        return context.get_dummy_value()

    return types.void(), make


def _rows16(builder: Any, address: Any, stride: Any) -> list[Any]:
    four = ir.VectorType(I32, 4)
    return [
        load(builder, builder.add(address, builder.mul(stride, ir.Constant(I64, row))), four) for row in range(LANES)
    ]


def _joined(builder: Any, rows: list[Any]) -> list[Any]:
    """Four vectors: quarter q of vector i is row 4 q + i."""
    joined = []
    for row in range(4):
        low = shuffle(builder, rows[row], rows[row + 4], list(range(8)))
        high = shuffle(builder, rows[row + 8], rows[row + 12], list(range(8)))
        joined.append(shuffle(builder, low, high, list(range(16))))
    return joined


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """16 rows of four words to four vectors, each of a word of all rows."""
    joined = _joined(builder, rows)

    def mix(a: Any, b: Any, quarter: list[int]) -> Any:
        return shuffle(builder, a, b, [place + 4 * q for q in range(4) for place in quarter])

    pairs = [[mix(joined[i], joined[i + 1], [k, 16 + k, k + 1, 17 + k]) for i in (0, 2)] for k in (0, 2)]
    return [mix(a, b, places) for a, b in pairs for places in ([0, 1, 16, 17], [2, 3, 18, 19])]


def _elementwise(name: str) -> Any:
    @intrinsic
    def apply(typing: Any, a: Any, b: Any) -> Any:
        def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, name)(*args)

        return a(a, a), make

    return apply


def _overload(operation: Any, on_ints: str, on_floats: str = "") -> None:
    ints, floats = _elementwise(on_ints), _elementwise(on_floats)

    @overload(operation)
    def choose(a, b):
        # numba compares the names and annotations of the arguments here and below.
        if a == INTS and b == INTS:
            return lambda a, b: ints(a, b)
        if a == INTS and isinstance(b, types.Integer):
            return lambda a, b: ints(a, splat(b))
        if a == FLOATS and b == FLOATS and on_floats:
            return lambda a, b: floats(a, b)
        return None


_overload(operator.and_, "and_")
_overload(operator.or_, "or_")
_overload(operator.xor, "xor")
_overload(operator.lshift, "shl")
_overload(operator.rshift, "lshr")
_overload(operator.add, "add", "fadd")
_overload(operator.sub, "sub", "fsub")
_overload(operator.mul, "mul", "fmul")
_overload(operator.truediv, "sdiv", "fdiv")


@intrinsic
def splat(typing: Any, value: Any) -> Any:
    """An integer in all lanes."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = context.cast(builder, args[0], signature.args[0], types.int32)
        return splat_value(builder, value)

    return INTS(value if isinstance(value, types.Integer) else types.int64), make


@intrinsic
def to_floats(typing: Any, ints: Any) -> Any:
    """Signed ints as floats."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sitofp(args[0], FLOAT_LANES)

    return FLOATS(INTS), make


@intrinsic
def as_floats(typing: Any, ints: Any) -> Any:
    """The floats with the bits of ints."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], FLOAT_LANES)

    return FLOATS(INTS), make


@intrinsic
def halves(typing: Any, ints: Any) -> Any:
    """The float16 in the lower 16 bits of each int, as floats."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.trunc(args[0], ir.VectorType(I16, LANES))
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), FLOAT_LANES)

    return FLOATS(INTS), make


@intrinsic
def signed_byte(typing: Any, ints: Any, number: Any) -> Any:
    """Byte `number` of each int, signed, as floats."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ints, number = args
        number = context.cast(builder, number, signature.args[1], types.int32)
        left = builder.sub(ir.Constant(I32, 24), builder.mul(number, ir.Constant(I32, 8)))
        return builder.sitofp(builder.ashr(builder.shl(ints, splat_value(builder, left)), all_lanes(24)), FLOAT_LANES)

    return FLOATS(INTS, number), make


@intrinsic
def look_up(typing: Any, nibbles: Any, low: Any, high: Any) -> Any:
    """Each byte of the ints (0 to 15) replaced by that entry of a table of 16 bytes, given as two int64."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        nibbles, low, high = args
        two = ir.Constant(ir.VectorType(I64, 2), ir.Undefined)
        for i, part in enumerate((low, high)):
            two = builder.insert_element(two, part, ir.Constant(I32, i))
        table = builder.bitcast(two, ir.VectorType(I8, 16))
        found = builder.bitcast(nibbles, BYTE_LANES)
        if "ssse3" not in FEATURES and "neon" not in FEATURES:
            result = ir.Constant(BYTE_LANES, ir.Undefined)
            for i in range(4 * LANES):
                place = ir.Constant(I32, i)
                result = builder.insert_element(
                    result, builder.extract_element(table, builder.extract_element(found, place)), place
                )
            return builder.bitcast(result, INT_LANES)
        name = "llvm.x86.ssse3.pshuf.b.128" if "ssse3" in FEATURES else "llvm.aarch64.neon.tbl1.v16i8"
        parts = []
        for first in range(0, 4 * LANES, 16):
            own = shuffle(builder, found, found, list(range(first, first + 16)))
            parts.append(call(builder, name, table.type, table, own))
        low, high = (join(builder, parts[i], parts[i + 1]) for i in (0, 2))
        return builder.bitcast(join(builder, low, high), INT_LANES)

    return INTS(INTS, types.int64, types.int64), make


@intrinsic
def load_ints(typing: Any, address: Any) -> Any:
    """16 int32 from an address that 64 divides."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load(builder, args[0], INT_LANES, align=64)

    return INTS(types.int64), make


@intrinsic
def load_floats(typing: Any, address: Any) -> Any:
    """16 float32."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load(builder, args[0], FLOAT_LANES, align=4)

    return FLOATS(types.int64), make


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Ask for the cache line at an address, which need not be readable."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # For reading, into the second-level cache, of data.
        builder.call(ask, [pointer, *(ir.Constant(I32, value) for value in (0, 2, 1))])
        return context.get_dummy_value()

    return types.void(types.int64), make


@intrinsic
def store(typing: Any, address: Any, vector: Any) -> Any:
    """Write 16 values."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        save(builder, args[1], args[0])
        return context.get_dummy_value()

    return types.void(types.int64, vector), make


@intrinsic
def move_float(typing: Any, target: Any, source: Any) -> Any:
    """Copy one float32."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        save(builder, load(builder, args[1], F32, align=4), args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), make


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """The pointer to an address, for numba.carray."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), make


@intrinsic
def as_float(typing: Any, bits: Any) -> Any:
    """The float32 with the bits of an int32."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], F32)

    return types.float32(types.int32), make


@intrinsic
def word(typing: Any, address: Any, number: Any) -> Any:
    """Element `number` of an array of int64."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = context.cast(builder, args[1], signature.args[1], types.int64)
        return load(builder, builder.add(args[0], builder.mul(number, ir.Constant(I64, 8))), I64, align=8)

    return types.int64(types.int64, number), make


@intrinsic
def element(typing: Any, arguments: Any, number: Any, place: Any) -> Any:
    """Element `place` of the array of int32 whose address is word `number` of the arguments, as int64."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number, place = (context.cast(builder, args[i], signature.args[i], types.int64) for i in (1, 2))
        array = load(builder, builder.add(args[0], builder.mul(number, ir.Constant(I64, 8))), I64, align=8)
        found = load(builder, builder.add(array, builder.mul(place, ir.Constant(I64, 4))), I32, align=4)
        return builder.sext(found, I64)

    return types.int64(types.int64, number, place), make


@intrinsic
def splat_float(typing: Any, value: Any) -> Any:
    """A float in all lanes."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return splat_value(builder, context.cast(builder, args[0], signature.args[0], types.float32))

    return FLOATS(value), make


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return fused(builder, *args)

    return FLOATS(FLOATS, FLOATS, FLOATS), make


@intrinsic
def exp(typing: Any, x: Any) -> Any:
    """e^x, to about one unit in the last place (the polynomial of Cephes' expf); 0 below -87.3, infinite above 88.7."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (x,) = args

        def constant(value: float) -> Any:
            return splat_value(builder, ir.Constant(F32, value))

        def clamped(value: Any) -> Any:
            low = call(builder, "llvm.maxnum.v16f32", FLOAT_LANES, value, constant(-87.33654))
            return call(builder, "llvm.minnum.v16f32", FLOAT_LANES, low, constant(88.37626))

        near = clamped(x)
        power = call(
            builder, "llvm.floor.v16f32", FLOAT_LANES, fused(builder, near, constant(1.4426950409), constant(0.5))
        )
        rest = fused(builder, power, constant(-0.693359375), near)
        rest = fused(builder, power, constant(2.12194440e-4), rest)
        value = constant(1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            value = fused(builder, value, rest, constant(factor))
        value = builder.fadd(fused(builder, value, builder.fmul(rest, rest), rest), constant(1.0))
        bits = builder.shl(builder.add(builder.fptosi(power, INT_LANES), all_lanes(127)), all_lanes(23))
        value = builder.fmul(value, builder.bitcast(bits, FLOAT_LANES))
        value = builder.select(builder.fcmp_ordered("<", x, constant(-87.33654)), constant(0.0), value)
        value = builder.select(builder.fcmp_ordered(">", x, constant(88.37626)), constant(float("inf")), value)
        # NaN stays NaN.
        return builder.select(builder.fcmp_unordered("uno", x, x), x, value)

    return FLOATS(FLOATS), make


@intrinsic
def total(typing: Any, floats: Any) -> Any:
    """The sum of the lanes: halves are added, then halves of that, and so on."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return add_lanes(builder, args[0])

    return types.float32(FLOATS), make


@intrinsic
def totals(typing: Any, address: Any) -> Any:
    """The `total` of each of 16 vectors at an address, one behind another."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = [load(builder, args[0], FLOAT_LANES, i * 4 * LANES, align=4) for i in range(LANES)]
        width = LANES
        while width > 1:
            # Each group of `width` lanes is what is left of one vector.
            width //= 2
            lower = [place for place in range(2 * LANES) if place // width % 2 == 0]
            upper = [place + width for place in lower]
            vectors = [
                builder.fadd(shuffle(builder, a, b, lower), shuffle(builder, a, b, upper))
                for a, b in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        return vectors[0]

    return FLOATS(types.int64), make


@intrinsic
def first_lane(typing: Any, floats: Any) -> Any:
    """Lane 0."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(args[0], ir.Constant(I32, 0))

    return types.float32(FLOATS), make


@intrinsic
def square_root(typing: Any, value: Any) -> Any:
    """The square root of a float32."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return call(builder, "llvm.sqrt.f32", F32, context.cast(builder, args[0], signature.args[0], types.float32))

    return types.float32(value), make


@intrinsic
def read_float(typing: Any, address: Any) -> Any:
    """A float32."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load(builder, args[0], F32, align=4)

    return types.float32(types.int64), make


@intrinsic
def read_int(typing: Any, address: Any) -> Any:
    """An int32, as int64."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(load(builder, args[0], I32, align=4), I64)

    return types.int64(types.int64), make


@intrinsic
def put_float(typing: Any, address: Any, value: Any) -> Any:
    """Write a float32."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        save(builder, args[1], args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), make
