"""All compiled kernels of the CPU, with what their callers need to know of them.

They are in groups that are compiled, stored and loaded together (machine_code.py). Only the compilation of a group
imports the modules of its kernels, and numba with them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

from luce.cpu_kernels.dimensions import DELTA_SCRATCH
from luce.cpu_kernels.machine_code import Group, LoadedGroup, PythonFunction, load
from luce.cpu_kernels.thread_pool import Job

_log = logging.getLogger(__name__)
_lock = threading.Lock()


class ProductWords(NamedTuple):
    """The layout of a weight in the plan of products (luce/cpu_kernels/product.py)."""

    #: int64 of a weight
    weight: int
    #: where it has its number of rows of x, the first of them, the bytes in front of its results, and the addresses of
    #: its type's functions
    rows: int
    first: int
    place: int
    functions: int


@dataclass(frozen=True)
class FormatKernels:
    """The compiled functions of a quant type, and the facts that go with them (luce/cpu_kernels/unpack.py)."""

    offset: int
    groups16: bool
    minimums: bool
    #: addresses: of the function that unpacks, and of the product of one row, 0 if there is none
    unpack: int
    one_row: int


@dataclass(frozen=True)
class Kernels:
    """Compiled kernels, and the facts that their callers need."""

    multiply: Job
    attention: Job
    rms_norm: Job
    gated_activation: Job
    #: bytes of memory that a thread of the pool needs, and the addresses of the pool's functions
    scratch: int
    work: int
    replay: int
    product_words: ProductWords
    #: of heads: norms and rotation, writing keys and values, and both
    prepare: PythonFunction
    write: PythonFunction
    prepare_and_write: PythonFunction
    #: the instructions that multiply bytes
    instructions: str

    @property
    def gated_delta_net(self) -> Job:
        """Compiled or read from the cache at the first call: few families have it, and it takes as long as the rest."""
        with _lock:
            return _gated_delta_net()


def kernels() -> Kernels:
    """The kernels, compiled or read from the cache at the first call. Any thread may call it."""
    with _lock:
        return _kernels()


def _load(name: str, what: str, members: Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]]) -> LoadedGroup:
    """A group; `members`: its functions and facts, from the modules that numba compiles. `what`: it is of, for the
    log."""

    def compile_group() -> Group:
        of, begun = f" for {what}" if what else "", time.monotonic()
        _log.info("compiling the kernels of the CPU%s, once for this machine", of)
        from luce.cpu_kernels.jit import compile_all

        functions, facts = members()
        group = Group(compile_all(functions), dict(facts))
        _log.info("compiled the kernels of the CPU%s in %.1f s", of, time.monotonic() - begun)
        return group

    return load(name, compile_group)


def _base_members() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    from luce.cpu_kernels import attention, elementwise, heads, jobs, lowering, product, quantised_rows

    functions = {
        "multiply": product.multiply,
        "product": product.product,
        "quantise_part": quantised_rows.quantise_part,
        "attention": attention.attention,
        "attend": attention.attend,
        "attend_run": attention.attend_run,
        "fold_runs": attention.fold_runs,
        "rms_norm": elementwise.rms_norm,
        "rms_norm_rows": elementwise.rms_norm_rows,
        "gated_activation": elementwise.gated_activation,
        "gated_activation_rows": elementwise.gated_activation_rows,
        "prepare": heads.prepare,
        "write": heads.write,
        "prepare_and_write": heads.prepare_and_write,
        "work": jobs.work,
        "replay": jobs.replay,
    }
    words = ProductWords(product.WEIGHT_WORDS, product.COUNT, product.FIRST, product.PLACE, product.FUNCTIONS)
    scratch = -(-max(product.SCRATCH, attention.SCRATCH, DELTA_SCRATCH) // 64) * 64
    return functions, {"instructions": lowering.INSTRUCTIONS, "scratch": scratch, **words._asdict()}


@cache
def _kernels() -> Kernels:
    group = _load("base", "", _base_members)

    def job(function: str, *kernels: str) -> Job:
        return Job(group.function(function), tuple(group.address(name) for name in kernels))

    return Kernels(
        multiply=job("multiply", "product", "quantise_part"),
        attention=job("attention", "attend", "attend_run", "fold_runs"),
        rms_norm=job("rms_norm", "rms_norm_rows"),
        gated_activation=job("gated_activation", "gated_activation_rows"),
        scratch=int(group.facts["scratch"]),
        work=group.address("work"),
        replay=group.address("replay"),
        product_words=ProductWords(*(int(group.facts[name]) for name in ProductWords._fields)),
        prepare=group.function("prepare"),
        write=group.function("write"),
        prepare_and_write=group.function("prepare_and_write"),
        instructions=str(group.facts["instructions"]),
    )


def format_kernels(kind: int) -> FormatKernels:
    """Those of a quant type in blocks, compiled or read from the cache at the first call. Any thread may call it."""
    with _lock:
        return _format_kernels(kind)


def _format_members(kind: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    from luce.cpu_kernels import unpack
    from luce.cpu_kernels.one_row import ONE_ROW

    offset, groups16, function = unpack.OFFSETS.get(kind, 0), kind in unpack.GROUPS16, unpack.UNPACK.get(kind)
    if function is None:
        # Its tables take a while.
        from luce.cpu_kernels import unpack_grid as grid

        offset, groups16, function = grid.GRID_OFFSETS[kind], kind in grid.GRID_GROUPS16, grid.UNPACK_GRID[kind]
    functions = {"unpack": function} | ({"one_row": ONE_ROW[kind]} if kind in ONE_ROW else {})
    facts = {"offset": offset, "groups16": groups16, "minimums": kind in unpack.WITH_MINIMUMS}
    return functions, {**facts, "one_row": kind in ONE_ROW}


@cache
def _format_kernels(kind: int) -> FormatKernels:
    from gguf import GGMLQuantizationType

    name = GGMLQuantizationType(kind).name
    group = _load(name, name, partial(_format_members, kind))
    return FormatKernels(
        offset=int(group.facts["offset"]),
        groups16=bool(group.facts["groups16"]),
        minimums=bool(group.facts["minimums"]),
        unpack=group.address("unpack"),
        one_row=group.address("one_row") if group.facts["one_row"] else 0,
    )


def _delta_members() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    from luce.cpu_kernels import deltanet

    functions = {
        "gated_delta_net": deltanet.gated_delta_net,
        "accept": deltanet.accept,
        "advance": deltanet.advance,
    }
    return functions, {}


@cache
def _gated_delta_net() -> Job:
    group = _load("gated_delta_net", "gated DeltaNet", _delta_members)
    return Job(group.function("gated_delta_net"), (group.address("accept"), group.address("advance")))
