"""Inputs of attention ops, their results by a device and by a plain computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from luce.ops import attention as op
from luce.ops.attention_mma import AttentionInputs
from luce.ops.kvtype import AUTO, KVTypes
from luce.ops.qkv import Destination, write_kv
from luce.runtime.device import Array, Device
from luce.runtime.step import PAGE, PageView, SpanArrays

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class History:
    """One sequence, with keys and values that are exact in fp16."""

    #: [length, heads, d]
    q: F32
    #: [length, kv_heads, d]
    k: F32
    #: [length, kv_heads, d]
    v: F32

    @classmethod
    def random(cls, length: int, heads: int, kv_heads: int, d: int, seed: int, spread: float = 1.0) -> History:
        """`spread` scales the keys: large ones make the softmax pick single keys, and its maximum jump."""
        rng = np.random.default_rng(seed)
        q = rng.standard_normal((length, heads, d)).astype(np.float32)
        k = (spread * rng.standard_normal((length, kv_heads, d))).astype(np.float16).astype(np.float32)
        v = rng.standard_normal((length, kv_heads, d)).astype(np.float16).astype(np.float32)
        return cls(q, k, v)

    def rounded(self, kv: KVTypes) -> History:
        """Keys and values as pools of these types hold them."""
        return History(self.q, loaded(stored(self.k, kv.k), kv.k), loaded(stored(self.v, kv.v), kv.v))


def stored(rows: NDArray[Any], type: str) -> NDArray[Any]:
    """Rows float32 [n, kv_heads, d] as a pool of a type (not auto) holds them, by the gguf package."""
    if type == "f16":
        return rows.astype(np.float16)
    blocks = gguf.quants.quantize(np.ascontiguousarray(rows, np.float32), GGMLQuantizationType[type.upper()])
    result: NDArray[Any] = blocks.view(np.uint16) if type == "bf16" else blocks
    return result


def loaded(rows: NDArray[Any], type: str) -> F32:
    """The reverse of `stored`."""
    if type == "f16":
        return rows.astype(np.float32)
    floats: F32 = gguf.quants.dequantize(rows.view(np.uint8), GGMLQuantizationType[type.upper()])
    return floats


def fill(shape: tuple[int, ...], value: float, dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array of `value`. Integer types support NaN alone: all bits set is NaN, as a float and as a block's scale."""
    if np.isnan(value) or dtype.kind == "u":
        return np.full(math.prod(shape) * dtype.itemsize, 255, np.uint8).view(dtype).reshape(shape)
    return np.full(shape, value, dtype)


@dataclass(frozen=True)
class Chunk:
    """Rows [position, position + rows) of a sequence, to be computed."""

    history: History
    position: int
    rows: int
    #: pages, by number, that are not resident
    missing: frozenset[int] = frozenset()
    #: of a draft tree: row i sees itself and the keys that row parents[i] < i sees, or all before the chunk if that is
    #: -1; its position follows that row's
    parents: tuple[int, ...] = ()
    #: rows see each other if their distance is less than this
    both: int = 0

    @property
    def seen(self) -> NDArray[np.bool_]:
        """[rows, rows]: whether a row sees another one."""
        at = np.arange(self.rows)
        if self.both:
            return np.abs(at[:, None] - at) < self.both
        if not self.parents:
            return at[:, None] >= at
        result = np.eye(self.rows, dtype=np.bool_)
        for row, parent in enumerate(self.parents):
            if parent >= 0:
                result[row] |= result[parent]
        return result

    @property
    def positions(self) -> NDArray[np.int32]:
        """The positions of the rows."""
        if not self.parents:
            return np.arange(self.position, self.position + self.rows, dtype=np.int32)
        return (self.position + self.seen.sum(axis=1) - 1).astype(np.int32)


@dataclass
class Pages:
    """K and V of the chunks in scattered pages, on the host: Pages.scatter makes them."""

    #: K and V
    pools: list[NDArray[Any]]
    #: of each chunk, its pages in order: number in the pools, number in the sequence
    tables: list[list[tuple[int, int]]]
    #: the row of the pools that each row of the step writes
    dest: list[int]

    @classmethod
    def scatter(
        cls, chunks: Sequence[Chunk], device: Device, kv: KVTypes, *, window: int | None, stale: float, seed: int
    ) -> Pages:
        """Rows before each chunk are written; pages that no chunk sees hold NaN, rows behind a sequence's end `stale`.

        With a window, the pages before the window of a chunk's first row are left out.
        """
        _, kv_heads, d = chunks[0].history.k.shape
        resident: list[list[int]] = []
        for chunk in chunks:
            last = (chunk.position + chunk.rows - 1) // PAGE
            low = 0 if window is None else max(0, chunk.position - window + 1) // PAGE
            resident.append([page for page in range(low, last + 1) if page not in chunk.missing])
        total = sum(map(len, resident))
        numbers = np.random.default_rng(seed).permutation(total + 3).tolist()
        pools = [fill(((total + 3) * PAGE, kv_heads, n), np.nan, dtype) for dtype, n in kv.layout(device, d)]
        pages = cls(pools, [], [])
        for chunk, seen in zip(chunks, resident, strict=True):
            own = [(numbers.pop(), page) for page in seen]
            pages.tables.append(own)
            for number, page in own:
                for pool, type, rows in zip(pools, (kv.k, kv.v), (chunk.history.k, chunk.history.v), strict=True):
                    past = rows[page * PAGE : min(chunk.position, (page + 1) * PAGE)]
                    own_rows = pool[number * PAGE : (number + 1) * PAGE]
                    own_rows[len(past) :] = fill(own_rows[len(past) :].shape, stale, pool.dtype)
                    if len(past):
                        own_rows[: len(past)] = past if type == "auto" else stored(past, type)
            place = {page: number for number, page in own}
            positions = range(chunk.position, chunk.position + chunk.rows)
            pages.dest += [place[p // PAGE] * PAGE + p % PAGE for p in positions]
        return pages

    def view(self, device: Device, padding: int, seen: Array | None) -> PageView:
        """The page table, `padding` pages wider than needed."""
        width = max(map(len, self.tables)) + padding
        shape = (len(self.tables), width)
        table, first = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
        for i, own in enumerate(self.tables):
            table[i, : len(own)] = [number for number, _ in own]
            first[i, : len(own)] = [page * PAGE for _, page in own]
        counts = np.array([len(own) for own in self.tables], np.int32)
        arrays = table, first, counts, np.array(self.dest, np.int32)
        return PageView(*map(device.upload, arrays), seen)


def run(
    device: Device,
    chunks: Sequence[Chunk],
    *,
    scale: float,
    window: int | None,
    drop: bool = False,
    stale: float = 1000.0,
    padding: int = 0,
    seed: int = 0,
    kv: KVTypes = AUTO,
    attend: Callable[[Device, AttentionInputs], Array] = op.attention,
    softcap: float = 0.0,
    sinks: F32 | None = None,
    below: int = 0,
) -> F32:
    """The step of all chunks: writes their rows into scattered pages, then attends. float32 [rows, heads, d].

    Pages that no chunk sees hold NaN; rows behind a sequence's end hold `stale`, or NaN in pools of integers. `drop`
    leaves out the pages that lie before the window of the chunk's first row, `padding` widens the page table.
    `below`: SpanArrays.pages.
    """
    pages = Pages.scatter(chunks, device, kv, window=window if drop else None, stale=stale, seed=seed)
    starts = np.cumsum([0, *(chunk.rows for chunk in chunks)])
    spans = np.array([(9 - i, starts[i], c.rows, c.position) for i, c in enumerate(chunks)], np.int32)
    positions = np.concatenate([chunk.positions for chunk in chunks])
    seen = None
    if any(chunk.parents or chunk.both for chunk in chunks):
        bits = [(c.seen * (np.uint64(1) << np.arange(c.rows, dtype=np.uint64))).sum(axis=1) for c in chunks]
        seen = up_bits(device, np.concatenate(bits))

    def fresh(part: str) -> F32:
        return np.concatenate([getattr(c.history, part)[c.position : c.position + c.rows] for c in chunks])

    up = device.upload
    k_pool, v_pool = map(up, pages.pools)
    q, k, v = spread_out(device, fresh("q"), fresh("k"), fresh("v"))
    view = pages.view(device, padding, seen)
    write_kv(device, k, v, Destination(k_pool, v_pool, view.dest))
    row_span = up(np.repeat(np.arange(len(chunks), dtype=np.int32), spans[:, 2]))
    longest = max(chunk.rows for chunk in chunks)
    arrays = SpanArrays(table=up(spans), row_span=row_span, count=len(chunks), longest=longest, pages=below)
    result: F32 = device.download(
        attend(
            device,
            AttentionInputs(
                q,
                k_pool,
                v_pool,
                arrays,
                view,
                up(positions),
                scale,
                window,
                softcap,
                None if sinks is None else up(sinks),
            ),
        )
    )
    assert result.dtype == np.float32
    return result


def up_bits(device: Device, bits: NDArray[np.uint64]) -> Array:
    """Bits of rows as PageView.seen."""
    return device.upload(np.ascontiguousarray(bits).view(np.int32).reshape(-1, 2))


def spread_out(device: Device, *parts: F32) -> list[Array]:
    """The parts as views of one fused matrix, heads apart, as the layers pass them."""
    n = len(parts[0])
    gaps = [np.concatenate((x, np.full_like(x[..., :3], np.nan)), axis=-1).reshape(n, -1) for x in parts]
    fused = device.upload(np.concatenate(gaps, axis=1))
    views = []
    at = 0
    for x, gap in zip(parts, gaps, strict=True):
        width = gap.shape[1]
        views.append(fused[:, at : at + width].reshape(n, x.shape[1], -1)[..., : x.shape[2]])
        at += width
    return views


def expected(
    chunks: Sequence[Chunk],
    *,
    scale: float,
    window: int | None,
    softcap: float = 0.0,
    sinks: F32 | None = None,
) -> NDArray[np.float64]:
    """softmax(scale q k^T) v over the keys that a row sees and whose page is resident, in float64; a sink is one more
    score, whose value is 0.

    Of those before the chunk these are the last ones, window - 1 for the first row.
    """
    rows = []
    for chunk in chunks:
        q, k, v = (x.astype(np.float64) for x in (chunk.history.q, chunk.history.k, chunk.history.v))
        group = q.shape[1] // k.shape[1]
        special = chunk.parents or chunk.both
        for row in range(chunk.rows):
            p, at = chunk.position + row, int(chunk.positions[row])
            past = [j for j in range(chunk.position) if window is None or j > at - window]
            own = [chunk.position + int(j) for j in np.flatnonzero(chunk.seen[row])]
            if window is not None and not special:
                own = [j for j in own if j > p - window]
            seen = [j for j in (*past, *own) if j // PAGE not in chunk.missing]
            heads = []
            for h in range(q.shape[1]):
                scores = scale * (k[seen, h // group] @ q[p, h])
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                more = [] if sinks is None else [float(sinks[h])]
                weights = np.exp(np.array([*scores, *more]) - max([scores.max(), *more]))
                heads.append(weights[: len(seen)] @ v[seen, h // group] / weights.sum())
            rows.append(np.stack(heads))
    return np.stack(rows)


def product(device: Device, kv: KVTypes, part: str) -> str:
    """The 16-bit type in which the device multiplies K (`k`) or V (`v`) of a type; empty for float32."""
    return "" if not device.products else "BF16" if getattr(kv, part) == "bf16" else "F16"


def rounded_queries(device: Device, chunks: Sequence[Chunk], scale: float, kv: KVTypes = AUTO) -> list[Chunk]:
    """The chunks with queries as the device rounds them: times scale and log2(e), in the type of the product."""
    type = product(device, kv, "k")
    if not type:
        return list(chunks)
    factor = np.float32(np.float32(scale) * np.float32(np.log2(np.e)))

    def of(chunk: Chunk) -> Chunk:
        q = loaded(stored(chunk.history.q * factor, type.lower()), type.lower()) / factor
        return replace(chunk, history=replace(chunk.history, q=q))

    return [of(chunk) for chunk in chunks]
