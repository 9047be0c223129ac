"""Query, key and value heads between their product and attention: norms, rotary embedding, and writing keys and values
to the page pools (luce.ops.attention).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from gguf import GGMLQuantizationType

from luce.ops.kvtype import kernel_type, pool_type, quantise
from luce.ops.norm import head_rms_norm
from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Array, Device
from luce.runtime.host import HostDevice

# As in kernels/qkv.cu.
_WAVES, _MOST = 4, 512
# Sizes of heads that are known when the kernel is compiled: half the instructions and registers of any size's.
_HEADS = frozenset({128, 256})
# Bytes of a row that a thread copies: the first that divides the row.
_COPY_UNITS, _COPY_THREADS = (16, 4, 2), 256
_TEMPER_THREADS = 256


@dataclass(frozen=True)
class HeadNorms:
    """Weights float32 [d] of the norms of query, key and value heads; None without such a norm."""

    query: Array | None = None
    key: Array | None = None
    value: Array | None = None
    eps: float = 0.0


@dataclass(frozen=True)
class Rotation:
    """Rotary embedding (Su et al., arXiv 2104.09864) of a head's first 2 * half elements.

    Pair i is (x[i], x[i + half]), or (x[2i], x[2i + 1]) if adjacent.
    """

    #: float32 [n, half, 2] of luce.ops.rope.rope_table
    table: Array
    adjacent: bool


@dataclass(frozen=True)
class Destination:
    """The places in the pools for new keys and values."""

    k_pool: Array
    #: None: values are not stored
    v_pool: Array | None
    #: int32 [n]: row r's keys and values go to row dest[r] of the pools
    dest: Array

    @property
    def pools(self) -> tuple[Array, ...]:
        """The pools that there are."""
        return (self.k_pool,) if self.v_pool is None else (self.k_pool, self.v_pool)


_NO_NORMS = HeadNorms()
# Types of pools that compiled code of the CPU writes.
_COMPILED = frozenset({GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0})
_NO_WEIGHT = np.empty(0, np.float32)


def prepare_queries(device: Device, q: Array, norms: HeadNorms, rotation: Rotation | None) -> None:
    """q <- rotated(rms(q) * norms.query) in place, rms as in luce.ops.norm: float32 [n, heads, d] (any row and head
    strides). Without a rotation, heads are not rotated. Raises ValueError for heads of more than 512 elements."""
    if isinstance(device, HostDevice):
        _host(device, q, norms.query, norms.eps, rotation)
    else:
        _launch(device, q, None, norms, rotation, None, keep=False)


def prepare_heads(
    device: Device,
    q: Array,
    k: Array,
    v: Array,
    norms: HeadNorms,
    rotation: Rotation | None,
    to: Destination,
    *,
    keep: bool,
) -> None:
    """prepare_queries, likewise for k, and for v without rotation; then write k and v to the pools.

    k, v float32 [n, kv_heads, d] (any row and head strides). With `keep` they hold the results afterwards; otherwise
    their content is undefined.
    """
    if isinstance(device, CpuDevice) and (pools := _bytes(to, q.shape[2])):
        weights = (_NO_WEIGHT if weight is None else weight for weight in (norms.query, norms.key, norms.value))
        angles = _angles(len(q), rotation)
        device.call(
            device.kernels.prepare_and_write, q, k, v, *weights, np.float32(norms.eps), *angles, *pools, to.dest
        )
    elif isinstance(device, HostDevice):
        _host(device, q, norms.query, norms.eps, rotation)
        prepare_keys(device, k, v, norms, rotation, to)
    else:
        _launch(device, q, (k, v), norms, rotation, to, keep=keep)


def prepare_halves(
    device: Device,
    q: Array,
    k: Array,
    v: Array,
    scales: Array,
    norms: HeadNorms,
    rotation: Rotation | None,
    to: Destination,
) -> Array:
    """prepare_heads of float16 q, k and v of a product on a GPU, n > 0, times their rows' scales, float32 [n]: returns
    the queries, float32 [n, heads, d], and leaves q, k and v as they are."""
    made = device.empty(q.shape)
    _launch(device, q, (k, v), norms, rotation, to, keep=False, halves=(scales, made))
    return made


def prepare_keys(
    device: Device, k: Array, v: Array, norms: HeadNorms, rotation: Rotation | None, to: Destination
) -> None:
    """prepare_heads for rows without queries. Afterwards the content of k and v is undefined."""
    if isinstance(device, HostDevice):
        _host(device, k, norms.key, norms.eps, rotation)
        _host(device, v, norms.value, norms.eps, None)
        write_kv(device, k, v, to)
    else:
        _launch(device, None, (k, v), replace(norms, query=None), rotation, to, keep=False)


def temper(device: Device, q: Array, positions: Array, *, scale: float, length: int) -> None:
    """q[row] *= 1 + scale ln(1 + floor(position / length)) in place: q float32 [n, heads, d] (any row and head
    strides), positions int32 [n], or [n, 4], of which the first counts."""
    if isinstance(device, HostDevice):
        device.call_host(partial(_temper, scale, length), q, positions)
        return
    n, heads, d = q.shape
    if not n:
        return
    strides = np.int64(q.strides[0] // 4), np.int64(q.strides[1] // 4)
    each = np.int32(1 if positions.ndim == 1 else positions.shape[1])
    args = (q, *strides, np.int32(heads), np.int32(d), positions, each, np.float32(scale), np.int32(length))
    device.launch("rope", "temper", (n, -(-heads * d // _TEMPER_THREADS)), (_TEMPER_THREADS,), args)


def write_kv(device: Device, k: Array, v: Array | None, to: Destination) -> None:
    """Write rows to the pools: k, v float32 [n, kv_heads, d] (any row and head strides); no v where there is no pool.

    Values are finite; they are rounded to the pools' types as by the gguf package. Raises ValueError for several heads
    of more than 512 elements.
    """
    if isinstance(device, CpuDevice) and v is not None and (own := _bytes(to, k.shape[2])):
        device.call(device.kernels.write, k, v, *own, to.dest)
    elif isinstance(device, HostDevice):
        device.call_host(_write, k, to.k_pool, to.dest)
        if v is not None and to.v_pool is not None:
            device.call_host(_write, v, to.v_pool, to.dest)
    elif k.shape[1] == 1 and k.shape[2] > _MOST:
        # A wide head is written as several.
        count = next(count for count in range(2, k.shape[2]) if _divides(count, k, to))
        parts = [None if rows is None else rows.reshape(len(rows), count, -1) for rows in (k, v)]
        pools = [None if pool is None else pool.reshape(len(pool), count, -1) for pool in (to.k_pool, to.v_pool)]
        assert parts[0] is not None and pools[0] is not None
        _launch(
            device, None, (parts[0], parts[1]), _NO_NORMS, None, Destination(pools[0], pools[1], to.dest), keep=False
        )
    else:
        _launch(device, None, (k, v), _NO_NORMS, None, to, keep=False)


def copy_rows(device: Device, to: Destination, copies: Array | None) -> None:
    """Copy rows of the pools: copies int32 [m, 2] of (source, target), -1 for none. No source is a target."""
    if copies is None:
        return
    if isinstance(device, HostDevice):
        for pool in to.pools:
            device.call_host(_copy_rows, pool, copies)
        return
    for pool in to.pools:
        size = pool[:1].nbytes
        unit = next(unit for unit in _COPY_UNITS if size % unit == 0)
        grid = (len(copies), -(-size // unit // _COPY_THREADS))
        args = (pool, copies, np.int32(size // unit))
        device.launch("kv_copy", "kv_copy", grid, (_COPY_THREADS,), args, defines={"UNIT": unit})


def _bytes(to: Destination, d: int) -> list[Array]:
    """The bytes of the pools if there are two, and compiled code writes their types; else none."""
    compiled = len(to.pools) == 2 and all(pool_type(pool, d) in _COMPILED for pool in to.pools)
    return [pool.view(np.uint8) for pool in to.pools] if compiled else []


def _divides(count: int, k: Array, to: Destination) -> bool:
    """Whether heads can be cut into so many, of at most _MOST elements: also their quant blocks."""
    d = k.shape[2]
    return d % count == 0 and d // count <= _MOST and all(pool.shape[2] % count == 0 for pool in to.pools)


def _launch(
    device: Device,
    q: Array | None,
    kv: tuple[Array, Array | None] | None,
    norms: HeadNorms,
    rotation: Rotation | None,
    to: Destination | None,
    *,
    keep: bool,
    halves: tuple[Array, Array] | None = None,
) -> None:
    some = kv[0] if q is None and kv is not None else q
    assert some is not None
    n, _, d = some.shape
    if d > _MOST:
        raise ValueError(f"heads of {d} elements: at most {_MOST}")
    if not n:
        return
    args: list[object] = []
    bits = 0
    for i, (x, weight) in enumerate(
        zip((q, *(kv or (None, None))), (norms.query, norms.key, norms.value), strict=True)
    ):
        strides = (0, 0) if x is None else (x.strides[0] // x.itemsize, x.strides[1] // x.itemsize)
        args += [x, *map(np.int64, strides), weight]
        bits |= (weight is not None) << i
    half = 0 if rotation is None else rotation.table.shape[1]
    step, gap = (2, 1) if rotation is not None and rotation.adjacent else (1, half)
    table = None if rotation is None else rotation.table
    args += [np.int32(bits), table, np.int32(half), np.int32(step), np.int32(gap)]
    args += [None, None, None] if to is None else [to.k_pool, to.v_pool, to.dest]
    types = ["F16", "F16"] if to is None else [kernel_type(pool, d) for pool in to.pools]
    heads, kv_heads = 0 if q is None else q.shape[1], 0 if kv is None else kv[0].shape[1]
    args += [np.int32(keep), np.int32(heads), np.int32(kv_heads), np.int32(d), np.float32(norms.eps)]
    grid = (n, -(-(heads + 2 * kv_heads) // _WAVES))
    defines = {"KTYPE": types[0], "VTYPE": types[-1], "HEAD": d if d in _HEADS else 0}
    kernel = "prepare_heads" if halves is None else "prepare_halves"
    device.launch("qkv", kernel, grid, (_WAVES * device.lanes,), [*args, *(halves or ())], defines=defines)


def _host(device: Device, x: Array, weight: Array | None, eps: float, rotation: Rotation | None) -> None:
    if isinstance(device, CpuDevice):
        own = _NO_WEIGHT if weight is None else weight
        device.call(device.kernels.prepare, x, own, np.float32(eps), *_angles(len(x), rotation))
        return
    if weight is not None:
        head_rms_norm(device, x, weight, eps)
    if rotation is None:
        return
    half = rotation.table.shape[1]
    cos, sin = rotation.table[:, None, :, 0], rotation.table[:, None, :, 1]
    if rotation.adjacent:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        a, b = x[..., :half], x[..., half : 2 * half]
    turned = a * cos - b * sin
    b[...] = b * cos + a * sin
    a[...] = turned


def _write(rows: Array, pool: Array, dest: Array) -> None:
    pool[dest] = quantise(rows, pool)


def _copy_rows(pool: Array, copies: Array) -> None:
    source, target = copies[copies[:, 0] >= 0].T
    pool[target] = pool[source]


def _temper(scale: float, length: int, q: Array, positions: Array) -> None:
    first = positions if positions.ndim == 1 else positions[:, 0]
    q *= (1 + scale * np.log1p(np.floor(first / length))).astype(np.float32)[:, None, None]


def _angles(n: int, rotation: Rotation | None) -> tuple[Array, bool]:
    """The table and the order of pairs for compiled code: no columns for n rows without rotation."""
    return (np.empty((n, 0, 2), np.float32), False) if rotation is None else (rotation.table, rotation.adjacent)
