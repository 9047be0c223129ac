"""All compiled kernels of the CPU, with what their callers need to know of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from luce.cpu_kernels.thread_pool import Job

_log = logging.getLogger(__name__)
_lock = threading.Lock()


class ProductWords(NamedTuple):
    """The layout of a weight in the plan of products (luce/cpu_kernels/product.py)."""

    #: int64 of a weight
    weight: int
    #: where it has its number of rows of x, the first of them, and the bytes in front of its results
    rows: int
    first: int
    place: int


@dataclass(frozen=True)
class Kernels:
    """Compiled kernels, and the facts that their callers need."""

    multiply: Job
    attention: Job
    gated_delta_net: Job
    rms_norm: Job
    gated_activation: Job
    #: bytes of memory that a thread of the pool needs
    scratch: int
    product_words: ProductWords
    #: of heads: norms and rotation, writing keys and values, and both
    prepare: Callable[..., None]
    write: Callable[..., None]
    prepare_and_write: Callable[..., None]
    #: by quant type (luce/cpu_kernels/unpack.py)
    offsets: Mapping[int, int]
    groups16: frozenset[int]
    with_minimums: frozenset[int]
    #: the instructions that multiply bytes
    instructions: str
    #: the C functions of the jobs' kernels, which must outlive them
    functions: tuple[object, ...]


def kernels() -> Kernels:
    """The kernels, compiled or read from the cache at the first call. Any thread may call it."""
    with _lock:
        return _kernels()


@cache
def _kernels() -> Kernels:
    from luce.cpu_kernels.jit import FOLDER, pool_kernel

    fresh, begun = not any(FOLDER.rglob("*.nbc")), time.monotonic()
    if fresh:
        _log.info("compiling the kernels of the CPU, once for this machine")
    from luce.cpu_kernels import attention, deltanet, elementwise, heads, lowering, product, quantised_rows, unpack
    from luce.cpu_kernels.thread_pool import Job

    functions: list[Any] = []

    def job(function: Callable[..., None], *kernels: Any) -> Job:
        own = [pool_kernel(kernel) for kernel in kernels]
        functions.extend(own)
        return Job(function, tuple(each.address for each in own))

    made = Kernels(
        multiply=job(product.multiply, product.product, quantised_rows.quantise_part),
        attention=job(attention.attention, attention.attend),
        gated_delta_net=job(deltanet.gated_delta_net, deltanet.accept, deltanet.advance),
        rms_norm=job(elementwise.rms_norm, elementwise.rms_norm_rows),
        gated_activation=job(elementwise.gated_activation, elementwise.gated_activation_rows),
        scratch=-(-max(product.SCRATCH, attention.SCRATCH, deltanet.SCRATCH) // 64) * 64,
        product_words=ProductWords(product.WEIGHT_WORDS, product.COUNT, product.FIRST, product.PLACE),
        prepare=heads.prepare,
        write=heads.write,
        prepare_and_write=heads.prepare_and_write,
        offsets=unpack.OFFSETS,
        groups16=unpack.GROUPS16,
        with_minimums=unpack.WITH_MINIMUMS,
        instructions=lowering.INSTRUCTIONS,
        functions=tuple(functions),
    )
    if fresh:
        _log.info("compiled the kernels of the CPU in %.1f s", time.monotonic() - begun)
    return made
