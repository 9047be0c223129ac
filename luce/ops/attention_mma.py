"""Attention over KV pages by products of 16-bit tiles: the launches of kernels/attention_mma.cu.

Queries and softmax weights are rounded to fp16 (to bfloat16 if K or V have that type), sums are float32. Spans of at
most FEW_ROWS rows are split over blocks, and `attention_fold` adds the blocks' sums; longer spans read their pages in
sequence. A row's bits depend on which of the two its span is, and on nothing else in its step.

Launch shapes depend on the number of rows and spans, on `longest`, on SpanArrays.pages and on head sizes. Lengths,
positions below those pages, page tables and the places of spans may change between replays of a captured graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from luce.ops.fp16 import Halves
from luce.ops.kvtype import kernel_type
from luce.ops.matmul import FEW_ROWS
from luce.ops.quantise import Quantised, as_arguments
from luce.runtime.device import Array, Device, TensorMap
from luce.runtime.step import PAGE, PageView, SpanArrays

# As in kernels/attention_mma.cu.
_HEADS = (64, 128, 256, 512)
_SPLITS = 64
_FOLD_THREADS = 256
# As in kernels/attention_wgmma.h, and the threads that bring pages.
_UNIT = 16384
_FETCHING = 128
# More than any position, and small enough to be added to one without overflow.
_NO_WINDOW = 2**30
# Most float32 values of splits in memory at a time: 128 MiB.
_BUFFER = 1 << 25


@dataclass(frozen=True)
class Gate:
    """A factor of each result of attention."""

    #: float32 [n, heads, d] or [n, heads, 1] (any row and head strides); or halves [n, heads, d], where
    #: `gated_attention` makes fp16 rows and a span is long
    values: Array | Halves
    #: the function of the values that multiplies the results
    kind: Literal["sigmoid", "softplus"]


@dataclass(frozen=True)
class AttentionInputs:
    """Queries, and the keys and values that they attend to."""

    #: float32 [n, heads, d] (any row and head strides); query head h reads KV head h // (heads / kv_heads)
    q: Array
    #: as luce.ops.attention lays pools out; the K of the step's own rows is in it already
    k_pool: Array
    #: likewise for V
    v_pool: Array
    spans: SpanArrays
    view: PageView
    #: int32 [n]: the position of each row
    positions: Array
    #: factor of the products of queries and keys
    scale: float
    #: positions back that a row sees, its own included; None: all
    window: int | None
    #: c > 0 turns a score s, after the scale, into c tanh(s / c)
    softcap: float = 0.0
    #: float32 [heads]: e^sink joins the sum of the weights of each row of a head
    sinks: Array | None = None

    @property
    def types(self) -> dict[str, int | str]:
        """The defines of every attention kernel."""
        d = self.q.shape[2]
        types: dict[str, int | str] = {"KTYPE": kernel_type(self.k_pool, d), "VTYPE": kernel_type(self.v_pool, d)}
        seen: dict[str, int | str] = {} if self.view.seen is None else {"SEEN": 1}
        return types | seen | ({"SOFTCAP": 1} if self.softcap else {})

    @property
    def read(self) -> tuple[object, ...]:
        """The first input arguments of every attention kernel."""
        q, view = self.q, self.view
        strides = np.int64(q.strides[0] // 4), np.int64(q.strides[1] // 4)
        pages = view.table, view.first, view.count, np.int32(view.table.shape[1])
        return q, *strides, self.k_pool, self.v_pool, self.spans.table, np.int32(self.spans.count), *pages

    @property
    def sizes(self) -> tuple[object, ...]:
        """Query heads, KV heads, values of a head and scale, as kernel arguments."""
        _, heads, d = self.q.shape
        return np.int32(heads), np.int32(self.k_pool.shape[1]), np.int32(d), np.float32(self.scale)

    @property
    def cap(self) -> tuple[np.float32, ...]:
        """The last argument of kernels that bend scores."""
        return (np.float32(self.softcap),) if self.softcap else ()

    @property
    def limit(self) -> np.int32:
        """The window as a kernel argument."""
        return np.int32(_NO_WINDOW if self.window is None else self.window)


@dataclass(frozen=True)
class Tile:
    """The queries of a thread block."""

    #: most values of a head
    head: int
    queries: int
    #: whether four waves multiply together (wgmma)
    grouped: bool

    @property
    def threads(self) -> int:
        """Threads of the block."""
        if self.grouped:
            return 2 * self.queries + _FETCHING
        return 256 if self.queries * self.head > 64 * 256 else 128

    @property
    def shared(self) -> int:
        """Bytes of its shared memory: `Shared` in attention_wgmma.h and in attention_sync.h."""
        if self.grouped:
            slots, gate = 10 if self.head == 256 else 12, 8
            size, unit = 2 * self.head * self.queries + slots * (_UNIT + 2 * gate) + gate, 1024
        else:
            size, unit = 2 * (self.head * (self.queries + 2 * PAGE) + self.queries * PAGE) + 16 * self.queries, 128
        return -(-size // unit) * unit


def tiles(device: Device, inputs: AttentionInputs) -> list[Tile]:
    """The device's tiles for these inputs, small ones first; none if the portable path has to serve."""
    _, heads, d = inputs.q.shape
    pools = inputs.k_pool, inputs.v_pool
    products = {"BF16" if kernel_type(pool, d) == "BF16" else "F16" for pool in pools}
    head = next((size for size in _HEADS if size >= d), 0)
    if head == 0 or d % 8 or heads % inputs.k_pool.shape[1] or not products <= device.products:
        return []
    grouped = "WGMMA" in device.products and head <= 256
    sizes = (16, 128) if grouped else (16, 32, 64, 128) if head == 256 else (16, 64)
    found = (Tile(head, size, grouped and size == 128) for size in sizes)
    return [tile for tile in found if tile.shared <= device.shared_limit]


def launch(
    device: Device, out: Array | Quantised, inputs: AttentionInputs, tiles: list[Tile], gate: Gate | None = None
) -> None:
    """luce.ops.attention.attention into `out`, by one of the device's `tiles`.

    If no span has more than FEW_ROWS rows, it can multiply by a gate, and write quantised rows for at most 16 rows.
    """
    spans, view, limit, types = inputs.spans, inputs.view, inputs.limit, inputs.types
    (n, heads, d), kv_heads = inputs.q.shape, inputs.k_pool.shape[1]
    group = heads // kv_heads
    seen = () if view.seen is None else (inputs.positions, view.seen)
    common = (*inputs.read, *inputs.sizes, limit, np.int32(FEW_ROWS), *seen, *inputs.cap)

    def run(tile: Tile, kernel: str, blocks: tuple[int, ...], *args: object) -> None:
        size = {"HEAD": tile.head, "QUERIES": tile.queries}
        if kernel != "attention_fold":
            args = *args, *_maps(tile, inputs)
        block, shared = ((_FOLD_THREADS,), 0) if kernel == "attention_fold" else ((tile.threads,), tile.shared)
        device.launch("attention_mma", kernel, blocks, block, args, defines=types | size, shared=shared)

    if spans.longest > FEW_ROWS:
        tile = tiles[-1]
        # An upper bound that holds wherever spans begin.
        run(tile, "attention_many", (n * group // tile.queries + spans.count, kv_heads), out, inputs.sinks, *common)
        if spans.count == 1 or spans.shortest > FEW_ROWS:
            return
    rows = min(spans.longest, FEW_ROWS)
    tile = next((tile for tile in tiles if tile.queries >= rows * group), tiles[-1])
    per_span = -(-rows * group // tile.queries)
    splits = min(spans.pages or _SPLITS, _SPLITS)
    batch = min(spans.count, max(1, _BUFFER // (rows * heads * splits * d)))
    values = device.empty((batch * rows, heads, splits, d))
    state = device.empty((batch * rows, heads, splits, 2))
    gating = (*_gating(gate), np.int32(n), *as_arguments(out if isinstance(out, Quantised) else None))
    for base in range(0, spans.count, batch):
        count = min(batch, spans.count - base)
        place = np.int32(base), np.int32(rows)
        run(tile, "attention_few", (count * per_span, kv_heads, splits), values, state, *place, *common)
        result = (None if isinstance(out, Quantised) else out, values, state, *place, spans.table)
        sizes = (np.int32(splits), np.int32(d), limit, np.int32(FEW_ROWS))
        run(tile, "attention_fold", (count * rows, heads), *result, *sizes, *gating, inputs.sinks)


def _maps(tile: Tile, inputs: AttentionInputs) -> tuple[TensorMap, ...]:
    """The last arguments of kernels to whose tiles the copy engine brings pages."""
    if not tile.grouped or not {"F16", "BF16"}.issuperset(map(str, (inputs.types["KTYPE"], inputs.types["VTYPE"]))):
        return ()
    # Values come in units of 16 KiB.
    return TensorMap(inputs.k_pool, PAGE), TensorMap(inputs.v_pool, min(PAGE, _UNIT // (2 * tile.head)))


def _gating(gate: Gate | None) -> tuple[object, ...]:
    if gate is None:
        return None, np.int64(0), np.int64(0), np.int32(0), np.int32(0)
    assert not isinstance(gate.values, Halves)
    row, head, _ = gate.values.strides
    kind = np.int32(1 if gate.kind == "sigmoid" else 2)
    return gate.values, np.int64(row // 4), np.int64(head // 4), kind, np.int32(gate.values.shape[2])
