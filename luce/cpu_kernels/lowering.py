"""LLVM instructions on vectors of 16 lanes, as intrinsics of compiled code emit them.

LLVM splits a vector where the CPU's registers are shorter, so the code is the same for AVX2, AVX-512 and Arm. Only
products of weights' bytes with x differ: vpdpbusd (AVX-512 VNNI, AVX-VNNI) and usdot (Arm) add four products of bytes
to a lane, of each of the two int8 that a value of x has. AVX2 has no such instruction; there a value of x is one int16,
and vpmaddwd adds two products of 16 bits. All sums are exact, and the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

from luce.cpu_kernels.dimensions import LANES

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
INT_LANES = ir.VectorType(I32, LANES)
FLOAT_LANES = ir.VectorType(F32, LANES)
BYTE_LANES = ir.VectorType(I8, 4 * LANES)
PAIR_LANES = ir.VectorType(I16, 2 * LANES)
#: of this CPU
FEATURES: dict[str, bool] = llvm.get_host_cpu_features()


def splat_value(builder: Any, value: Any) -> Any:
    kind = ir.VectorType(value.type, LANES)
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    return shuffle(builder, first, undefined, [0] * LANES)


def shuffle(builder: Any, a: Any, b: Any, places: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(places)), places))


def join(builder: Any, low: Any, high: Any) -> Any:
    return shuffle(builder, low, high, list(range(2 * low.type.count)))


def all_lanes(value: int) -> ir.Constant:
    return ir.Constant(INT_LANES, [value] * LANES)


def load(builder: Any, address: Any, kind: Any, offset: int = 0, align: int = 1) -> Any:
    place = builder.add(address, ir.Constant(I64, offset)) if offset else address
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=align)


def save(builder: Any, value: Any, address: Any, align: int = 4) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call(builder, "llvm.fma.v16f32", FLOAT_LANES, a, b, c)


def add_lanes(builder: Any, value: Any) -> Any:
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        low, high = (shuffle(builder, value, value, list(range(at, at + lanes))) for at in (0, lanes))
        value = builder.fadd(low, high)
    return builder.extract_element(value, ir.Constant(I32, 0))


def add_quarters(builder: Any, vectors: list[Any]) -> Any:
    """Of four vectors of ints, the sums of four lanes at a time: lane 4 q + i is of quarter q of vector i."""
    pairs = [_add_neighbours(builder, vectors[i], vectors[i + 1]) for i in (0, 2)]
    return _add_neighbours(builder, *pairs)


def _add_neighbours(builder: Any, a: Any, b: Any) -> Any:
    places = [4 * quarter + place + side for quarter in range(4) for side in (0, LANES) for place in (0, 2)]
    return builder.add(shuffle(builder, a, b, places), shuffle(builder, a, b, [place + 1 for place in places]))


# --- the sum of four products


def _dot_avx512(builder: Any, total: Any, weight: Any, x: Any) -> Any:
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", INT_LANES, total, weight, x)


def _dot_parts(name: str, ints: int) -> Callable[..., Any]:
    """By an instruction for registers of `ints` lanes."""

    def dot(builder: Any, total: Any, weight: Any, x: Any) -> Any:
        parts = []
        for first in range(0, LANES, ints):
            places, bytes_of = (list(range(first * size, (first + ints) * size)) for size in (1, 4))
            own = shuffle(builder, total, total, places)
            a, b = (shuffle(builder, each, each, bytes_of) for each in (weight, x))
            parts.append(call(builder, name, own.type, own, a, b))
        while len(parts) > 1:
            parts = [join(builder, low, high) for low, high in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    return dot


def _dot_pairs(builder: Any, total: Any, weight: Any, x: Any) -> Any:
    """weight and x: two int16 a lane."""
    parts = []
    for first in range(0, 2 * LANES, 16):
        half = [shuffle(builder, each, each, list(range(first, first + 16))) for each in (weight, x)]
        parts.append(call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), *half))
    return builder.add(total, join(builder, *parts))


def _dot_plain(builder: Any, total: Any, weight: Any, x: Any) -> Any:
    wide = ir.VectorType(I32, 4 * LANES)
    products = builder.mul(builder.zext(weight, wide), builder.sext(x, wide))
    for first in range(4):
        places = list(range(first, 4 * LANES, 4))
        total = builder.add(total, shuffle(builder, products, products, places))
    return total


#: the ways to add products to a lane, by the instructions that do it: the CPU's feature (empty: none is needed) and the
#: function of (builder, total, weight, x): four unsigned and four signed bytes a lane, in PAIRED two int16
DOTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "AVX-512 VNNI": ("avx512vnni", _dot_avx512),
    "AVX-VNNI": ("avxvnni", _dot_parts("llvm.x86.avx512.vpdpbusd.256", 8)),
    "AVX2": ("avx2", _dot_pairs),
    "Arm i8mm": ("i8mm", _dot_parts("llvm.aarch64.neon.usdot.v4i32.v16i8", 4)),
    "no byte products": ("", _dot_plain),
}
PAIRED = frozenset({"AVX2"})

#: the instructions that add products here
INSTRUCTIONS = next(name for name, (feature, _) in DOTS.items() if not feature or FEATURES.get(feature))
dot = DOTS[INSTRUCTIONS][1]
#: whether x is in int16 (quantised_rows.py)
PAIRS = INSTRUCTIONS in PAIRED


def keep_order(builder: Any, sums: Any) -> Any:
    """The same sums, by an empty line of assembly, of which LLVM cannot tell what it does: so it computes them here.

    Where products are several instructions, it would first compute all that a group adds to one row, then to the next,
    with the group's weights in memory, as AVX2 has 16 registers (128 rows: 1.3 times as long).
    """
    if not PAIRS:
        return sums
    kind = ir.VectorType(I32, 8)
    fixed = ir.InlineAsm(ir.FunctionType(kind, [kind]), "", "=x,0", side_effect=True)
    halves = (shuffle(builder, sums, sums, list(range(first, first + 8))) for first in (0, 8))
    return join(builder, *(builder.call(fixed, [half]) for half in halves))


#: rows of x whose sums stay in registers beside a weight's
ROWS_AT_A_TIME = 8 if FEATURES.get("avx512f") else 4
