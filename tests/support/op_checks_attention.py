"""Checks of attention over pages and of the writing of K and V rows on any device, against softmax in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from luce.ops import attention as op
from luce.ops.activation import sigmoid_gate, softplus_gate
from luce.ops.attention_mma import AttentionInputs, Gate
from luce.ops.kvtype import AUTO, KVTypes
from luce.ops.qkv import Destination, write_kv
from luce.ops.quantise import Quantised, quantise
from luce.runtime.device import Array, Device
from luce.runtime.step import PAGE
from tests.support.attention_inputs import (
    F32,
    Chunk,
    History,
    expected,
    product,
    rounded_queries,
    run,
    spread_out,
    stored,
)
from tests.support.quantised import same_rows


def close(
    device: Device,
    chunks: Sequence[Chunk],
    actual: F32,
    *,
    scale: float,
    window: int | None = None,
    kv: KVTypes = AUTO,
    atol: float = 2e-5,
    softcap: float = 0.0,
    sinks: F32 | None = None,
) -> None:
    """The formula over rounded queries, and over keys and values rounded to the pools' types.

    Within `atol` (2e-5: float32 scores of up to about 50, values of size 1), or 1e-3 and a normalised mean squared
    error of 2e-7 where weights are halves, 8e-3 and 2e-5 where they are bfloat16 (measured 4e-4, 9e-8, 3e-3, 5e-6).
    """
    kept = [replace(chunk, history=chunk.history.rounded(kv)) if kv != AUTO else chunk for chunk in chunks]
    rounded = rounded_queries(device, kept, scale, kv)
    want = expected(rounded, scale=scale, window=window, softcap=softcap, sinks=sinks)
    weights = product(device, kv, "v")
    atol, limit = {"": (atol, 1e-10), "F16": (1e-3, 2e-7), "BF16": (8e-3, 2e-5)}[weights]
    np.testing.assert_allclose(actual, want, rtol=0, atol=atol)
    assert ((actual - want) ** 2).mean() <= limit * (want**2).mean()


def check(
    device: Device,
    chunks: Sequence[Chunk],
    *,
    scale: float = 0.125,
    window: int | None = None,
    drop: bool = False,
    stale: float = 1000.0,
) -> None:
    """The result is close to the formula."""
    actual = run(device, chunks, scale=scale, window=window, drop=drop, stale=stale)
    close(device, chunks, actual, scale=scale, window=window)


def check_stale(device: Device, heads: int, kv_heads: int, d: int, rows: int, stale: float) -> None:
    """Rows behind the end of a sequence hold `stale`: most of a page, and its last row alone."""
    lengths = (70, rows), (127 - rows, rows), (0, 1)
    chunks = [Chunk(History.random(p + n, heads, kv_heads, d, 1), p, n) for p, n in lengths]
    check(device, chunks, stale=stale)


def check_types(
    device: Device, k: str, v: str, heads: int, kv_heads: int, d: int, lengths: Sequence[tuple[int, int]]
) -> None:
    """Spans of (position, rows): the formula over keys and values rounded to the types."""
    kv = KVTypes(k, v)
    chunks = [
        Chunk(History.random(position + rows, heads, kv_heads, d, seed), position, rows)
        for seed, (position, rows) in enumerate(lengths)
    ]
    scale = d**-0.5
    actual = run(device, chunks, scale=scale, window=None, kv=kv)
    close(device, chunks, actual, scale=scale, kv=kv)


def check_shape(device: Device, heads: int, kv_heads: int, d: int, lengths: Sequence[tuple[int, int]]) -> None:
    """Spans of (position, rows) in one step."""
    chunks = [
        Chunk(History.random(position + rows, heads, kv_heads, d, seed), position, rows)
        for seed, (position, rows) in enumerate(lengths)
    ]
    check(device, chunks, scale=d**-0.5)


def check_gated(
    device: Device, heads: int, kv_heads: int, d: int, lengths: Sequence[tuple[int, int]], each: int
) -> None:
    """Times a gate, and as int8: the bits of attention, of the gate's own op and of quantise."""
    chunks = [
        Chunk(History.random(position + rows, heads, kv_heads, d, seed), position, rows)
        for seed, (position, rows) in enumerate(lengths)
    ]
    n = sum(rows for _, rows in lengths)
    wide = np.random.default_rng(d).standard_normal((n, heads, each + 3)).astype(np.float32)
    values = device.upload(wide)[..., :each]
    mixed = device.upload(run(device, chunks, scale=d**-0.5, window=None))
    made: list[Array | Quantised] = []
    kinds: list[Literal["sigmoid", "softplus"]] = ["softplus"] if each == 1 else ["sigmoid", "softplus"]
    for gate, int8_group in itertools.product((Gate(values, kind) for kind in kinds), (0, 32, 128)):

        def attend(device: Device, inputs: AttentionInputs, gate: Gate = gate, group: int = int8_group) -> Array:
            made[:] = [op.gated_attention(device, inputs, gate, int8_group=group)]
            return mixed

        run(device, chunks, scale=d**-0.5, window=None, attend=attend)
        expected = (sigmoid_gate if gate.kind == "sigmoid" else softplus_gate)(device, mixed, values)
        same_output(device, made[0], expected, int8_group if d % 128 == 0 and device.products else 0)


def same_output(device: Device, actual: Array | Quantised, expected: Array, group: int) -> None:
    """The bits of `expected`, float32 [n, cols], or with a `group` those of quantise of it."""
    assert isinstance(actual, Quantised) == bool(group)
    if isinstance(actual, Quantised):
        same_rows(device, actual, quantise(device, expected, group))
    else:
        same_bits(device.download(actual), device.download(expected))


def check_window(device: Device, window: int, position: int, rows: int) -> None:
    """With and without the pages before the window, the formula holds, and the bits are the same."""
    chunks = [Chunk(History.random(position + rows, 6, 2, 16, 5), position, rows)]
    check(device, chunks, window=window)
    check(device, chunks, window=window, drop=True)
    whole = run(device, chunks, scale=0.25, window=window)
    dropped = run(device, chunks, scale=0.25, window=window, drop=True)
    if not device.host:
        same_bits(whole, dropped)


#: trees of 1 to 64 rows: a chain, a bush, a comb
TREES = ((-1, 0, 1, 2), (-1, 0, 0, 0, 1, 1, 4, 3, 2, 7, 9), tuple(max(-1, i - 1 - i % 3) for i in range(64)))


def check_seen(device: Device, heads: int, kv_heads: int, d: int, position: int, window: int | None) -> None:
    """Rows that see each other both ways, and trees: far apart, at a page's edge, beside each other."""
    rng = np.random.default_rng(d)

    def chunk(position: int, rows: int, **options: Any) -> Chunk:
        history = History.random(position + rows, heads, kv_heads, d, int(rng.integers(99)))
        return Chunk(history, position, rows, **options)

    check(device, [chunk(position, 16, both=99)], window=window)
    check(device, [chunk(position, 7, both=3), chunk(0, 5, both=9), chunk(60, 9, both=9)], window=window, drop=True)
    for parents in TREES:
        check(device, [chunk(position, len(parents), parents=parents)], window=window)
    check(device, [chunk(position, 11, parents=TREES[1]), chunk(70, 4, parents=TREES[0])], window=window, drop=True)


def check_bent(
    device: Device,
    heads: int,
    kv_heads: int,
    d: int,
    lengths: Sequence[tuple[int, int]],
    *,
    softcap: float,
    sinks: bool,
    window: int | None,
) -> None:
    """Spans of (position, rows) with a softcap far below the largest scores, with sinks far below, among and far above
    them, or with both; rows alone have the same bits, as have splits in blocks of their own."""
    chunks = [
        Chunk(History.random(position + rows, heads, kv_heads, d, seed), position, rows)
        for seed, (position, rows) in enumerate(lengths)
    ]
    scale, most = 3 * d**-0.5, np.float32(softcap or 12)
    own = np.linspace(-2 * most, 2 * most, heads, dtype=np.float32) if sinks else None
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": own}
    whole = run(device, chunks, **options)
    close(device, chunks, whole, **options)
    if device.host:
        return
    if chunks[0].rows <= 16:
        same_bits(run(device, chunks[:1], **options), whole[: chunks[0].rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "ENOUGH_BLOCKS", 1 << 30)
        patch.setattr(op, "MIN_SPLITS", 0)
        same_bits(run(device, chunks, **options), whole)


def check_missing_pages(device: Device) -> None:
    """With pages missing in the middle, the resident keys count, at their positions."""
    history = History.random(800, 4, 2, 16, 6)
    chunks = [
        Chunk(history, 700, 3, frozenset({1, 2, 3, 7})),
        Chunk(history, 777, 1, frozenset({0, 5, 6, 10})),
        Chunk(history, 130, 2),
    ]
    check(device, chunks)
    check(device, chunks, window=300)


def check_sharp(device: Device) -> None:
    """Scores of hundreds: weights underflow, the maximum jumps from block to block, nothing overflows."""
    chunks = [Chunk(History.random(500, 2, 1, 32, 7, spread=30.0), 490, 10)]
    actual = run(device, chunks, scale=1.0, window=None)
    # Scores of up to 700 carry float32 errors of 1e-4.
    close(device, chunks, actual, scale=1.0, atol=2e-3)


def check_rows_alone(
    device: Device, heads: int, kv_heads: int, d: int, position: int, window: int | None, kv: KVTypes = AUTO
) -> None:
    """Bits of 16 rows: alone, in pieces, in a batch with a wider table; by one block and split over many, with as few
    places for splits as there are pages."""
    rows = 16
    history = History.random(position + rows, heads, kv_heads, d, 8, spread=3.0)
    other = History.random(300, heads, kv_heads, d, 9)
    scale = d**-0.5

    def bits(chunks: Sequence[Chunk], **options: Any) -> F32:
        return run(device, chunks, scale=scale, window=window, drop=True, kv=kv, **options)

    whole = bits([Chunk(history, position, rows)])
    for start, count in ((0, 1), (15, 1), (3, 2), (0, 5), (7, 9)):
        same_bits(bits([Chunk(history, position + start, count)], seed=start), whole[start : start + count])
    crowd = [
        Chunk(other, 10, 7),
        Chunk(history, position + 2, 3),
        Chunk(other, 299, 1),
        Chunk(history, position + 9, 1),
    ]
    mixed = bits(crowd, padding=9)
    same_bits(mixed[7:10], whole[2:5])
    same_bits(mixed[11:12], whole[9:10])
    pages = -(-(position + rows) // PAGE)
    if pages <= 64:
        same_bits(bits([Chunk(history, position, rows)], below=pages), whole)
        same_bits(bits(crowd, below=max(pages, 5))[7:10], whole[2:5])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "ENOUGH_BLOCKS", 0)
        same_bits(bits([Chunk(history, position, rows)]), whole)
        same_bits(bits([Chunk(history, position + 15, 1)]), whole[15:])
        patch.setattr(op, "ENOUGH_BLOCKS", 1 << 30)
        patch.setattr(op, "MIN_SPLITS", 0)
        same_bits(bits([Chunk(history, position, rows)]), whole)
        # Two splits of the one row at a time, then one of the many rows.
        patch.setattr(op, "BUFFER_VALUES", 2 * heads * d)
        same_bits(bits([Chunk(history, position + 15, 1)]), whole[15:])
        same_bits(bits([Chunk(history, position, rows)]), whole)


def check_rows_of_a_prompt(
    device: Device, heads: int, kv_heads: int, d: int, position: int, window: int | None
) -> None:
    """Bits of 75 rows: in pieces of any length, beside other spans, and of the last row alone."""
    rows = 75
    history, other = History.random(position + rows, heads, kv_heads, d, 8), History.random(90, heads, kv_heads, d, 9)

    def bits(*chunks: Chunk) -> F32:
        return run(device, chunks, scale=d**-0.5, window=window, drop=True)

    whole = bits(Chunk(history, position, rows))
    for start, count in ((0, 16), (0, 17), (3, 40), (16, 59), (74, 1)):
        same_bits(bits(Chunk(history, position + start, count)), whole[start : start + count])
    mixed = bits(Chunk(other, 5, 3), Chunk(history, position + 1, 70), Chunk(other, 0, 90))
    same_bits(mixed[3:73], whole[1:71])


def same_bits(a: F32, b: F32) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def check_write_kv(device: Device, n: int, kv_heads: int, d: int) -> None:
    """Rounded to the pool's dtype at the given rows, in any order; all other rows keep their bits."""
    rng = np.random.default_rng(n)
    k, v = (rng.standard_normal((n, kv_heads, d)).astype(np.float32) for _ in range(2))
    k[0, 0, :4] = [0.0, -0.0, 6e-8, 65504.0]
    dest = rng.permutation(3 * PAGE)[:n].astype(np.int32)
    pools = [device.upload(np.full((3 * PAGE, kv_heads, d), fill, device.kv_dtype)) for fill in (7, 8)]
    k_rows, v_rows = spread_out(device, k, v)
    write_kv(device, k_rows, v_rows, Destination(pools[0], pools[1], device.upload(dest)))
    for pool, rows, fill in zip(pools, (k, v), (7, 8), strict=True):
        want = np.full((3 * PAGE, kv_heads, d), fill, device.kv_dtype)
        want[dest] = rows.astype(device.kv_dtype)
        np.testing.assert_array_equal(device.download(pool).view(np.uint8), want.view(np.uint8))


def check_write_types(device: Device, k: str, v: str, n: int, kv_heads: int, d: int) -> None:
    """The bytes that the gguf package computes, at the given rows; all other rows keep theirs."""
    rng = np.random.default_rng(n + d)
    parts = [rng.standard_normal((n, kv_heads, d)).astype(np.float32) for _ in range(2)]
    for rows in parts:
        # Blocks of zeros, of one size with both signs first, of halves between two steps, large and tiny ones.
        rows[0, 0, :32] = 0
        rows[-1, -1, -32:] = np.where(np.arange(32) % 2, 2.5, -2.5)
        rows[-1, 0, :32] = np.where(np.arange(32) % 3, 1.25, -1.25)
        rows[0, -1, -32:] = np.arange(32) - 15.5
        rows[0, -1, -32] = 127
        rows[n // 2] *= rng.choice([1e-30, 1e-7, 1e-3, 1e3], (kv_heads, 1)).astype(np.float32)
    dest = rng.permutation(3 * PAGE)[:n].astype(np.int32)
    pools = [np.full((3 * PAGE, kv_heads, size), 7, dtype) for dtype, size in KVTypes(k, v).layout(device, d)]
    on_device = [device.upload(pool.copy()) for pool in pools]
    k_rows, v_rows = spread_out(device, *parts)
    write_kv(device, k_rows, v_rows, Destination(on_device[0], on_device[1], device.upload(dest)))
    for pool, rows, type, actual in zip(pools, parts, (k, v), on_device, strict=True):
        pool[dest] = stored(rows, type)
        np.testing.assert_array_equal(device.download(actual).view(np.uint8), pool.view(np.uint8))
