"""Vectors of the elements of a table, each lane's at a place of its own.

Load by load, which every CPU has: an instruction that gathers is one load on few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from luce.cpu_kernels.dimensions import LANES
from luce.cpu_kernels.lowering import I32, I64, load, shuffle
from luce.cpu_kernels.vectors import INTS

_TWO = types.containers.UniTuple(INTS, 2)


@intrinsic
def gather_pairs(typing: Any, table: Any, places: Any) -> Any:
    """The pairs of int32 at these places of a table at an address: the first of each, and the second."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def pair(lane: int) -> Any:
            return load(builder, _place(builder, args[0], args[1], lane, 8), I64, align=4)

        return context.make_tuple(builder, _TWO, _halves(builder, pair))

    return _TWO(types.int64, INTS), make


@intrinsic
def gather_two(typing: Any, table: Any, first: Any, second: Any) -> Any:
    """The int32 at the first places of a table at an address, and those at the second places."""

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def pair(lane: int) -> Any:
            words = [load(builder, _place(builder, args[0], each, lane, 4), I32, align=4) for each in args[1:]]
            low, high = (builder.zext(word, I64) for word in words)
            return builder.or_(low, builder.shl(high, ir.Constant(I64, 32)))

        return context.make_tuple(builder, _TWO, _halves(builder, pair))

    return _TWO(types.int64, INTS, INTS), make


def _place(builder: Any, table: Any, places: Any, lane: int, size: int) -> Any:
    """The address of an element of `size` bytes."""
    place = builder.zext(builder.extract_element(places, ir.Constant(I32, lane)), I64)
    return builder.add(table, builder.mul(place, ir.Constant(I64, size)))


def _halves(builder: Any, pair: Callable[[int], Any]) -> list[Any]:
    """Two vectors of an int64 for each lane: of their lower halves and of their upper ones. An insertion for each pair
    is half of one for each int32."""
    found = ir.Constant(ir.VectorType(I64, LANES), ir.Undefined)
    for lane in range(LANES):
        found = builder.insert_element(found, pair(lane), ir.Constant(I32, lane))
    words = builder.bitcast(found, ir.VectorType(I32, 2 * LANES))
    return [shuffle(builder, words, words, list(range(half, 2 * LANES, 2))) for half in (0, 1)]
