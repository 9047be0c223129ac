"""Numbers of 8 and 16 bits in memory, to and from vectors of 16 lanes and single floats."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from luce.cpu_kernels.dimensions import LANES
from luce.cpu_kernels.lowering import F32, FLOAT_LANES, I8, I16, INT_LANES, all_lanes, load, save, splat_value
from luce.cpu_kernels.vectors import FLOATS, INTS


@intrinsic
def load_halves(typing: Any, address: Any) -> Any:
    """16 float16 as floats."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(load(builder, args[0], ir.VectorType(ir.HalfType(), LANES), align=2), FLOAT_LANES)

    return FLOATS(types.int64), make


@intrinsic
def load_bfloats(typing: Any, address: Any) -> Any:
    """16 bfloat16 as floats."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.zext(load(builder, args[0], ir.VectorType(I16, LANES), align=2), INT_LANES)
        return builder.bitcast(builder.shl(bits, all_lanes(16)), FLOAT_LANES)

    return FLOATS(types.int64), make


@intrinsic
def load_bytes(typing: Any, address: Any) -> Any:
    """16 unsigned bytes as ints."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(load(builder, args[0], ir.VectorType(I8, LANES)), INT_LANES)

    return INTS(types.int64), make


@intrinsic
def splat_half(typing: Any, address: Any) -> Any:
    """The float16 at an address, as a float in all lanes."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return splat_value(builder, builder.fpext(load(builder, args[0], ir.HalfType()), F32))

    return FLOATS(types.int64), make


@intrinsic
def put_half(typing: Any, address: Any, value: Any) -> Any:
    """Write a float32 as float16."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        save(builder, builder.fptrunc(args[1], ir.HalfType()), args[0], align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), make


@intrinsic
def put_byte(typing: Any, address: Any, value: Any) -> Any:
    """Write the lowest byte of an int32."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        save(builder, builder.trunc(args[1], I8), args[0], align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int32), make
