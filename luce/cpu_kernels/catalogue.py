"""All compiled kernels of the CPU, with what their callers need to know of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from luce.cpu_kernels.dimensions import DELTA_SCRATCH

if TYPE_CHECKING:
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
    #: the C functions, which must outlive all products
    functions: tuple[object, ...]


@dataclass(frozen=True)
class Kernels:
    """Compiled kernels, and the facts that their callers need."""

    multiply: Job
    attention: Job
    rms_norm: Job
    gated_activation: Job
    #: bytes of memory that a thread of the pool needs
    scratch: int
    product_words: ProductWords
    #: of heads: norms and rotation, writing keys and values, and both
    prepare: Callable[..., None]
    write: Callable[..., None]
    prepare_and_write: Callable[..., None]
    #: the instructions that multiply bytes
    instructions: str
    #: the C functions of the jobs' kernels, which must outlive them
    functions: tuple[object, ...]

    @property
    def gated_delta_net(self) -> Job:
        """Compiled or read from the cache at the first call: few families have it, and it takes as long as the rest."""
        with _lock:
            return _gated_delta_net()[0]


def kernels() -> Kernels:
    """The kernels, compiled or read from the cache at the first call. Any thread may call it."""
    with _lock:
        return _kernels()


@cache
def _kernels() -> Kernels:
    from luce.cpu_kernels.jit import FOLDER, c_function

    fresh, begun = not any(FOLDER.rglob("*.nbc")), time.monotonic()
    if fresh:
        _log.info("compiling the kernels of the CPU, once for this machine")
    from luce.cpu_kernels import attention, elementwise, heads, lowering, product, quantised_rows
    from luce.cpu_kernels.thread_pool import Job

    functions: list[Any] = []

    def job(function: Callable[..., None], *kernels: Any) -> Job:
        own = [c_function(kernel) for kernel in kernels]
        functions.extend(own)
        return Job(function, tuple(each.address for each in own))

    made = Kernels(
        multiply=job(product.multiply, product.product, quantised_rows.quantise_part),
        attention=job(attention.attention, attention.attend),
        rms_norm=job(elementwise.rms_norm, elementwise.rms_norm_rows),
        gated_activation=job(elementwise.gated_activation, elementwise.gated_activation_rows),
        scratch=-(-max(product.SCRATCH, attention.SCRATCH, DELTA_SCRATCH) // 64) * 64,
        product_words=ProductWords(
            product.WEIGHT_WORDS, product.COUNT, product.FIRST, product.PLACE, product.FUNCTIONS
        ),
        prepare=heads.prepare,
        write=heads.write,
        prepare_and_write=heads.prepare_and_write,
        instructions=lowering.INSTRUCTIONS,
        functions=tuple(functions),
    )
    if fresh:
        _log.info("compiled the kernels of the CPU in %.1f s", time.monotonic() - begun)
    return made


def format_kernels(kind: int) -> FormatKernels:
    """Those of a quant type in blocks, compiled or read from the cache at the first call. Any thread may call it."""
    with _lock:
        return _format_kernels(kind)


@cache
def _format_kernels(kind: int) -> FormatKernels:
    from gguf import GGMLQuantizationType

    from luce.cpu_kernels import unpack
    from luce.cpu_kernels.jit import FOLDER, c_function
    from luce.cpu_kernels.one_row import ONE_ROW

    offset, groups16, function = unpack.OFFSETS.get(kind, 0), kind in unpack.GROUPS16, unpack.UNPACK.get(kind)
    if function is None:
        # Its tables take a while.
        from luce.cpu_kernels import unpack_grid as grid

        offset, groups16, function = grid.GRID_OFFSETS[kind], kind in grid.GRID_GROUPS16, grid.UNPACK_GRID[kind]
    name = GGMLQuantizationType(kind).name
    fresh, begun = not any(FOLDER.rglob(f"*.{function.__name__}-*.nbc")), time.monotonic()
    if fresh:
        _log.info("compiling the kernels of the CPU for %s, once for this machine", name)
    functions = [c_function(function, 4)]
    if kind in ONE_ROW:
        functions.append(c_function(ONE_ROW[kind], 5))
    if fresh:
        _log.info("compiled the kernels of the CPU for %s in %.1f s", name, time.monotonic() - begun)
    return FormatKernels(
        offset=offset,
        groups16=groups16,
        minimums=kind in unpack.WITH_MINIMUMS,
        unpack=functions[0].address,
        one_row=functions[1].address if len(functions) > 1 else 0,
        functions=tuple(functions),
    )


@cache
def _gated_delta_net() -> tuple[Job, tuple[object, ...]]:
    """The job, and the C functions that must outlive it."""
    from luce.cpu_kernels.jit import FOLDER, c_function

    fresh = not any(FOLDER.rglob("deltanet.*.nbc"))
    if fresh:
        _log.info("compiling the kernels of the CPU for gated DeltaNet, once for this machine")
    from luce.cpu_kernels import deltanet
    from luce.cpu_kernels.thread_pool import Job

    functions = c_function(deltanet.accept), c_function(deltanet.advance)
    return Job(deltanet.gated_delta_net, tuple(each.address for each in functions)), functions
