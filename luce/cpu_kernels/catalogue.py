"""All compiled kernels of the CPU, with what their callers need to know of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

_log = logging.getLogger(__name__)
_lock = threading.Lock()


class ProductWords(NamedTuple):
    """The layout of a product's arguments (luce/cpu_kernels/product.py)."""

    #: int64 in front of the weights' own, of a weight, and in front of its rows of x
    head: int
    weight: int
    x: int


@dataclass(frozen=True)
class Kernels:
    """Compiled kernels, and the facts that their callers need."""

    #: addresses for luce.cpu_kernels.thread_pool.Pool
    product: int
    attention: int
    #: bytes of memory that a thread of the pool needs
    scratch: int
    product_words: ProductWords
    quantise_rows: Callable[..., None]
    rms_norm: Callable[..., None]
    gated_activation: Callable[..., None]
    #: of heads: norms and rotation; writing keys and values
    prepare: Callable[..., None]
    write: Callable[..., None]
    #: by quant type (luce/cpu_kernels/unpack.py)
    offsets: Mapping[int, int]
    groups16: frozenset[int]
    with_minimums: frozenset[int]
    #: the instructions that multiply bytes
    instructions: str
    #: the C functions of the addresses, which must outlive them
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
    from luce.cpu_kernels import attention, elementwise, heads, lowering, product, quantised_rows, unpack

    functions = pool_kernel(product.product), pool_kernel(attention.attention)
    if fresh:
        _log.info("compiled the kernels of the CPU in %.1f s", time.monotonic() - begun)
    return Kernels(
        product=functions[0].address,
        attention=functions[1].address,
        scratch=-(-max(product.SCRATCH, attention.SCRATCH) // 64) * 64,
        product_words=ProductWords(product.HEAD_WORDS, product.WEIGHT_WORDS, product.ROWS_OF_X),
        quantise_rows=quantised_rows.quantise_rows,
        rms_norm=elementwise.rms_norm,
        gated_activation=elementwise.gated_activation,
        prepare=heads.prepare,
        write=heads.write,
        offsets=unpack.OFFSETS,
        groups16=unpack.GROUPS16,
        with_minimums=unpack.WITH_MINIMUMS,
        instructions=lowering.INSTRUCTIONS,
        functions=functions,
    )
