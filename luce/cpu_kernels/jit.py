"""Decorators of compiled functions, and their machine code.

Functions allocate nothing by numba and raise no exceptions, so that their machine code needs the C library alone, and
is loaded without numba (machine_code.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import compiler, sigutils
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numba.np.numpy_support import as_dtype

from luce.cpu_kernels.machine_code import CompiledFunction, symbol
from luce.cpu_kernels.memory import array_value

# Arithmetic as NumPy's: no exception for a division by zero. No fast-math: bits do not depend on the compiler's choice.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
# What compiled code may call.
_C_LIBRARY = frozenset(
    {"exp", "free", "log1p", "malloc", "memcpy", "memmove", "memset", "read", "sched_yield", "write"}
)
_I32, _I64 = ir.IntType(32), ir.IntType(64)
# Where an object of NumPy's C interface has its fields, behind what all objects have: data, axes, lengths, strides,
# dtype and flags of an array; the number of a dtype.
_OBJECT = object.__basicsize__
_TYPE, _DATA, _AXES, _LENGTHS, _STRIDES, _DTYPE, _FLAGS = (_OBJECT + at for at in (-8, 0, 8, 16, 24, 40, 48))
_NUMBER = _OBJECT + 12
_CONTIGUOUS, _ALIGNED, _WRITEABLE = 0x1, 0x100, 0x400


def compiled(function: Callable[..., Any]) -> Any:
    """A function that compiled functions call, or a kernel of int64; compiled for the types of each call."""
    return numba.njit(**_OPTIONS)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """A function whose calls are replaced by its body, so that numbers in a call stay constants."""
    return numba.njit(inline="always", **_OPTIONS)(function)


@dataclass(frozen=True)
class CalledFromPython:
    """A function that Python calls with arrays and numbers, without the interpreter's lock."""

    #: compiled
    body: Any
    #: numba's types of its arguments
    kinds: tuple[Any, ...]


def compiled_as(signature: str) -> Callable[[Callable[..., Any]], CalledFromPython]:
    """A function of this signature, which returns nothing, that Python calls."""
    kinds, _ = sigutils.normalize_signature(signature)
    return lambda function: CalledFromPython(compiled(function), kinds)


def compile_all(functions: Mapping[str, Any]) -> dict[str, CompiledFunction]:
    """The machine code of kernels, which are C functions of int64, and of functions that Python calls; by name."""
    return {name: _compile(name, function) for name, function in functions.items()}


def _compile(name: str, function: Any) -> CompiledFunction:
    if isinstance(function, CalledFromPython):
        code = _machine_code(name, _with_words(function), (types.int64,), types.int64)
        return CompiledFunction(code, "".join(_letter(kind) for kind in _flat(function.kinds)))
    arguments = (types.int64,) * len(inspect.signature(function.py_func).parameters)
    return CompiledFunction(_machine_code(name, function.py_func, arguments, types.none), None)


def _machine_code(name: str, function: Any, arguments: tuple[Any, ...], result: Any) -> bytes:
    """The object file that defines a C function, with all that it calls."""
    flags = compiler.Flags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model, flags.nrt = "numpy", True
    with global_compiler_lock:
        typing, context = cpu_target.typing_context, cpu_target.target_context
        typing.refresh()
        context.refresh()
        done = compiler.compile_extra(typing, context, function, arguments, result, flags, {})
        module = context.create_module(f"c_function.{name}")
        native = ir.Function(module, context.call_conv.get_function_type(result, arguments), done.fndesc.llvm_func_name)
        returned = ir.VoidType() if result == types.none else _I64
        own = ir.Function(module, ir.FunctionType(returned, [_I64] * len(arguments)), symbol(name))
        for count in ("NRT_incref", "NRT_decref"):
            # No array has memory of numba's, so there is nothing to count.
            counted = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()]), count)
            ir.IRBuilder(counted.append_basic_block()).ret_void()
        builder = ir.IRBuilder(own.append_basic_block())
        _, value = context.call_conv.call_function(builder, native, result, arguments, own.args)
        builder.ret_void() if result == types.none else builder.ret(value)
        done.library.add_ir_module(module)
        done.library.enable_object_caching()
        done.library.finalize()
        needed = {each.name for each in done.library._final_module.functions if each.is_declaration}
        foreign = {each for each in needed if not each.startswith("llvm.")} - _C_LIBRARY
        assert not foreign, f"{name} calls {', '.join(sorted(foreign))}"
        _, _, (code, _) = done.library.serialize_using_object_code()
    return bytes(code)


# --- functions that Python calls


def _flat(kinds: tuple[Any, ...]) -> list[Any]:
    """The types of words: an array or a number each."""
    return [each for kind in kinds for each in (kind if isinstance(kind, types.UniTuple) else (kind,))]


def _letter(kind: Any) -> str:
    """That of machine_code.PythonFunction."""
    if isinstance(kind, types.Array):
        return "a"
    return {types.int64: "q", types.float32: "f", types.boolean: "?"}[kind]


def _with_words(function: CalledFromPython) -> Callable[..., Any]:
    """The function of words: the address of NumPy's array type, then one for each argument, of an array the address of
    its object. Returns 0, or the number of the first argument, from 1 on, that is no array of its type."""
    body, first_wrong, arguments = function.body, _first_wrong(function.kinds), _arguments(function.kinds)

    def with_words(words):
        wrong = first_wrong(words)
        if wrong == 0:
            body(*arguments(words))
        return wrong

    return with_words


def _read(builder: Any, address: Any, offset: int, kind: Any = _I64) -> Any:
    place = builder.add(address, ir.Constant(_I64, offset))
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=kind.width // 8)


def _first_wrong(kinds: tuple[Any, ...]) -> Any:
    arrays = [(number, kind) for number, kind in enumerate(_flat(kinds), 1) if isinstance(kind, types.Array)]

    @intrinsic
    def first_wrong(typing: Any, words: Any) -> Any:
        def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            end = builder.append_basic_block("end")
            array_type, came = _read(builder, args[0], 0), []

            def expect(number: int, found: Any, value: Any) -> None:
                """Go on if they are equal."""
                following = builder.append_basic_block()
                came.append((number, builder.block))
                builder.cbranch(builder.icmp_signed("==", found, value), following, end)
                builder.position_at_end(following)

            for number, kind in arrays:
                array = _read(builder, args[0], 8 * number)
                expect(number, _read(builder, array, _TYPE), array_type)
                expect(number, _read(builder, array, _AXES, _I32), ir.Constant(_I32, kind.ndim))
                needed = ir.Constant(_I32, _ALIGNED | _WRITEABLE | (_CONTIGUOUS if kind.layout == "C" else 0))
                expect(number, builder.and_(_read(builder, array, _FLAGS, _I32), needed), needed)
                own = ir.Constant(_I32, np.dtype(as_dtype(kind.dtype)).num)
                expect(number, _read(builder, _read(builder, array, _DTYPE), _NUMBER, _I32), own)
            came.append((0, builder.block))
            builder.branch(end)
            builder.position_at_end(end)
            wrong = builder.phi(_I64)
            for number, block in came:
                wrong.add_incoming(ir.Constant(_I64, number), block)
            return wrong

        return types.int64(types.int64), make

    return first_wrong


def _arguments(kinds: tuple[Any, ...]) -> Any:
    made = types.Tuple(kinds)

    def value(context: Any, builder: Any, words: Any, number: int, kind: Any) -> Any:
        if isinstance(kind, types.Array):
            array, eight = _read(builder, words, 8 * number), range(0, 8 * kind.ndim, 8)
            lengths, strides = (_read(builder, array, at) for at in (_LENGTHS, _STRIDES))
            sizes = ([_read(builder, of, i) for i in eight] for of in (lengths, strides))
            return array_value(context, builder, kind, _read(builder, array, _DATA), *sizes)
        if kind == types.float32:
            return builder.bitcast(_read(builder, words, 8 * number, _I32), ir.FloatType())
        found = _read(builder, words, 8 * number)
        return builder.trunc(found, ir.IntType(1)) if kind == types.boolean else found

    @intrinsic
    def arguments(typing: Any, words: Any) -> Any:
        def make(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            number, values = 1, []
            for kind in kinds:
                own = _flat((kind,))
                found = [value(context, builder, args[0], number + i, each) for i, each in enumerate(own)]
                values.append(context.make_tuple(builder, kind, found) if len(own) > 1 or own[0] != kind else found[0])
                number += len(own)
            return context.make_tuple(builder, made, values)

        return made(types.int64), make

    return arguments
