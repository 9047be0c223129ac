"""Checks of luce.ops.qkv on any device, against formulas in float64 and the writing of rows on their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luce.ops.kvtype import AUTO, KVTypes
from luce.ops.qkv import Destination, HeadNorms, Rotation, copy_rows, prepare_halves, prepare_heads, write_kv
from luce.runtime.device import Array, Device
from luce.runtime.step import PAGE
from tests.support.attention_inputs import spread_out

EPS = 1e-5
F32 = NDArray[np.float32]


def _normed(x: F32, weight: F32 | None) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    return wide if weight is None else wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + EPS) * weight


def _turned(x: NDArray[np.float64], angles: NDArray[np.float64], adjacent: bool) -> NDArray[np.float64]:
    half = angles.shape[1]
    first = np.arange(half) * 2 if adjacent else np.arange(half)
    second = first + 1 if adjacent else first + half
    pairs = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)[:, None]
    result = x.copy()
    result[..., first], result[..., second] = pairs.real, pairs.imag
    return result


def _run(
    device: Device,
    parts: Sequence[F32],
    weights: Sequence[F32 | None],
    angles: NDArray[np.float64],
    adjacent: bool,
    types: KVTypes,
    dest: NDArray[np.int32],
    keep: bool,
) -> list[NDArray[Any]]:
    """q, k and v in place, and both pools afterwards."""
    kv_heads, d = parts[1].shape[1:]
    table = np.stack((np.cos(angles), np.sin(angles)), axis=-1).astype(np.float32)
    query, key, value = (None if w is None else device.upload(w) for w in weights)
    pools = [device.upload(np.zeros((2 * PAGE, kv_heads, n), type)) for type, n in types.layout(device, d)]
    views: list[Array] = spread_out(device, *parts)
    to = Destination(pools[0], pools[1], device.upload(dest))
    norms = HeadNorms(query, key, value, EPS)
    rotation = Rotation(device.upload(table), adjacent) if angles.shape[1] else None
    prepare_heads(device, views[0], views[1], views[2], norms, rotation, to, keep=keep)
    return [device.download(array) for array in (*views, *pools)]


def check_prepared(
    device: Device, n: int, heads: int, kv_heads: int, d: int, half: int, *, normed: str, adjacent: bool = False
) -> None:
    """Queries against the formula; pools hold what write_kv writes of the formula's keys and values, a bit apart.

    `normed` names the parts with a norm, of `qkv`. Without pairs, `half` 0, there is no rotation.
    """
    rng = np.random.default_rng(n + d + half)
    parts = tuple(rng.standard_normal((n, h, d)).astype(np.float32) for h in (heads, kv_heads, kv_heads))
    weights = [rng.standard_normal(d).astype(np.float32) if part in normed else None for part in "qkv"]
    angles = rng.uniform(-np.pi, np.pi, (n, half))
    dest = rng.permutation(2 * PAGE)[:n].astype(np.int32)
    q, k, v, k_pool, v_pool = _run(device, parts, weights, angles, adjacent, AUTO, dest, True)
    wide = [_normed(x, w) for x, w in zip(parts, weights, strict=True)]
    wide[:2] = [_turned(x, angles, adjacent) for x in wide[:2]]
    for actual, expected in zip((q, k, v), wide, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=4e-6)
    for pool, rows in ((k_pool, k), (v_pool, v)):
        np.testing.assert_array_equal(pool[dest], rows.astype(pool.dtype))
        pool[dest] = 0
        assert not pool.any()
    not_kept = _run(device, parts, weights, angles, adjacent, AUTO, dest, False)
    np.testing.assert_array_equal(not_kept[0], q)
    np.testing.assert_array_equal(not_kept[3][dest], k.astype(device.kv_dtype))


def check_halves(device: Device, n: int, heads: int, kv_heads: int, d: int, half: int, *, normed: str) -> None:
    """Halves whose rows have scales: queries against the formula, and queries and pools of the floats that they are."""
    rng = np.random.default_rng(n + d + half)
    values = rng.standard_normal((n, (2 * heads + 2 * kv_heads) * d)).astype(np.float16)
    scales = (2.0 ** (np.arange(n) % 3 - 1)).astype(np.float32)
    fused, ends = device.upload(values), np.cumsum([2 * heads * d, kv_heads * d])
    # Beside each query head is its gate.
    q = fused[:, : ends[0]].reshape(n, heads, 2 * d)[..., :d]
    k, v = (fused[:, end : end + kv_heads * d].reshape(n, kv_heads, d) for end in ends)
    parts = [device.download(x) * scales[:, None, None] for x in (q, k, v)]
    weights = [rng.standard_normal(d).astype(np.float32) if part in normed else None for part in "qkv"]
    angles, dest = rng.uniform(0, 6, (n, half)), rng.permutation(2 * PAGE)[:n].astype(np.int32)
    floats = _run(device, parts, weights, angles, False, AUTO, dest, True)
    pools = [device.upload(np.zeros_like(pool)) for pool in floats[3:]]
    norms = HeadNorms(*(None if w is None else device.upload(w) for w in weights), EPS)
    table = np.stack((np.cos(angles), np.sin(angles)), axis=-1).astype(np.float32)
    rotation = Rotation(device.upload(table), False) if half else None
    to = Destination(pools[0], pools[1], device.upload(dest))
    made = device.download(prepare_halves(device, q, k, v, device.upload(scales), norms, rotation, to))
    np.testing.assert_allclose(made, _turned(_normed(parts[0], weights[0]), angles, False), rtol=0, atol=1e-5)
    for own, expected in zip((made, *map(device.download, pools)), (floats[0], *floats[3:]), strict=True):
        np.testing.assert_array_equal(own, expected)
    np.testing.assert_array_equal(device.download(fused), values)


def check_quantised_pools(device: Device, k: str, v: str, d: int) -> None:
    """Pools of quant blocks hold the bytes that write_kv makes of the same rows."""
    rng = np.random.default_rng(8)
    parts = tuple(rng.standard_normal((3, h, d)).astype(np.float32) for h in (4, 2, 2))
    angles, dest = rng.uniform(0, 6, (3, 16)), np.array([70, 3, 9], np.int32)
    weight = rng.standard_normal(d).astype(np.float32)
    _, keys, values, *pools = _run(device, parts, [weight] * 3, angles, False, KVTypes(k, v), dest, True)
    again = [device.upload(np.zeros_like(pool)) for pool in pools]
    write_kv(device, device.upload(keys), device.upload(values), Destination(again[0], again[1], device.upload(dest)))
    for pool, expected in zip(pools, again, strict=True):
        np.testing.assert_array_equal(pool, device.download(expected))


def check_rows_alone(device: Device, heads: int, d: int) -> None:
    """A row's bits are the same alone and at any place of 16 rows."""
    rng = np.random.default_rng(0)
    parts = tuple(rng.standard_normal((16, h, d)).astype(np.float32) for h in (heads, 2, 2))
    weights: list[F32 | None] = [rng.standard_normal(d).astype(np.float32) for _ in range(3)]
    angles, dest = rng.uniform(0, 6, (16, d // 4)), np.arange(16, dtype=np.int32)
    whole = _run(device, parts, weights, angles, False, AUTO, dest, True)
    for start, stop in ((0, 1), (15, 16), (3, 5), (1, 8), (2, 15)):
        own = tuple(part[start:stop].copy() for part in parts)
        alone = _run(device, own, weights, angles[start:stop], False, AUTO, dest[start:stop], True)
        for i, (a, b) in enumerate(zip(alone, whole, strict=True)):
            a, b = (a, b[start:stop]) if i < 3 else (a[start:stop], b[start:stop])
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def check_copies(device: Device, kv_heads: int, d: int, types: KVTypes) -> None:
    """Rows of both pools where they are copied to, and nothing else changes."""
    rng = np.random.default_rng(d)
    pools = []
    for dtype, n in types.layout(device, d):
        words = rng.integers(0, 256, (3 * PAGE, kv_heads, n * dtype.itemsize)).astype(np.uint8)
        pools.append(words.view(dtype))
    places = rng.permutation(3 * PAGE).astype(np.int32)
    copies = np.full((64, 2), -1, np.int32)
    copies[:40] = places[:80].reshape(2, 40).T
    copies[7, 0] = copies[3, 0]
    copies[20] = -1
    to = Destination(*map(device.upload, (*pools, places[:1])))
    copy_rows(device, to, device.upload(copies))
    copy_rows(device, to, None)
    source, target = copies[copies[:, 0] >= 0].T
    for pool, found in zip(pools, (to.k_pool, to.v_pool), strict=True):
        expected = pool.copy()
        expected[target] = pool[source]
        assert device.download(found).tobytes() == expected.tobytes()


def check_keys_alone(device: Device, d: int, types: KVTypes) -> None:
    """Without a pool of values, keys are written and copied as beside one."""
    rng = np.random.default_rng(d)
    keys, dest = rng.standard_normal((5, 2, d)).astype(np.float32), rng.permutation(PAGE)[:5].astype(np.int32)
    pools = [np.zeros((PAGE, 2, n), dtype) for dtype, n in types.layout(device, d)]
    both, alone = [device.upload(pool.copy()) for pool in pools], device.upload(pools[0].copy())
    k, copies = device.upload(keys), device.upload(np.array([[dest[0], dest[1]], [-1, 0]], np.int32))
    for v, to in (
        (k, Destination(both[0], both[1], device.upload(dest))),
        (None, Destination(alone, None, device.upload(dest))),
    ):
        write_kv(device, k, v, to)
        copy_rows(device, to, copies)
    assert device.download(alone).tobytes() == device.download(both[0]).tobytes()
    assert device.download(alone).any()
