"""Memory of compiled code, which has none of numba's: Python's arrays, words on the stack, and the C library's."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

_I64 = ir.IntType(64)


def array_value(context: Any, builder: Any, kind: Any, data: Any, shape: list[Any], strides: list[Any]) -> Any:
    """An array of compiled code at an address: `shape` and `strides` are int64, one for each axis."""
    array = make_array(kind)(context, builder)
    place = builder.inttoptr(data, context.get_data_type(kind.dtype).as_pointer())
    size = ir.Constant(_I64, kind.dtype.bitwidth // 8)
    populate_array(array, data=place, shape=shape, strides=strides, itemsize=size, meminfo=None)
    return array._getvalue()


@intrinsic(prefer_literal=True)
def stack_words(typing: Any, count: Any) -> Any:
    """An array of `count` int64, a constant, that lives until the function returns which calls this. Not zeroed."""
    if not isinstance(count, types.IntegerLiteral):
        return None
    kind, number = types.Array(types.int64, 1, "C"), ir.Constant(_I64, count.literal_value)

    def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.ptrtoint(cgutils.alloca_once(builder, _I64, size=number), _I64)
        return array_value(context, builder, kind, place, [number], [ir.Constant(_I64, 8)])

    return kind(count), make


def c_library(name: str, count: int) -> Any:
    """A function of the C library: int64 or int32 of a tuple of `count` int64."""

    @intrinsic
    def call(typing: Any, arguments: Any) -> Any:
        def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(_I64, [_I64] * count)
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.call(function, [builder.extract_value(args[0], i) for i in range(count)])

        return types.int64(arguments), make

    return call


#: the address of so many bytes, or 0; and to give them back
allocate, release = c_library("malloc", 1), c_library("free", 1)
