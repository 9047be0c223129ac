"""The work of layers between products, in the sizes in which it is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from luce.ops.activation import gated_activation
from luce.ops.attention import attention
from luce.ops.attention_mma import AttentionInputs
from luce.ops.deltanet import DeltaWeights, RecurrentState, gated_delta_net
from luce.ops.kvtype import AUTO
from luce.ops.moe import combine, route
from luce.ops.norm import rms_norm
from luce.runtime.device import Device
from luce.runtime.step import PAGE, PageView, SpanArrays

#: heads of queries, heads of keys and values, and values of a head in attention
_HEADS, _KV_HEADS, _HEAD = 32, 8, 128
#: heads of keys, heads of values, and taps of the convolution in gated DeltaNet
_DELTA_KEY_HEADS, _DELTA_HEADS, _TAPS = 16, 32, 4


#: features of an activation
_WIDTH = 8192


@dataclass(frozen=True)
class Part:
    """A piece of work."""

    run: Callable[[], object]
    #: what it reads or computes: bytes or operations
    amount: float = 0.0


def small_kernel(device: Device) -> Part:
    """One of the smallest kernels of a layer."""
    x, scale = device.zeros((1, 64)), device.zeros(64)
    return Part(lambda: rms_norm(device, x, scale, 1e-6))


def attention_part(device: Device, rows: int, positions: int) -> Part:
    """Attention of the last `rows` of so many positions. The amount is the bytes of keys and values for one row, the
    operations for more: two products of a head's width for each position that a row sees."""
    layout, pages = AUTO.layout(device, _HEAD), np.arange(-(-positions // PAGE), dtype=np.int32)[None]
    k_pool, v_pool = (device.zeros((pages.size * PAGE, _KV_HEADS, n), dtype) for dtype, n in layout)
    q = device.upload(np.random.default_rng(4).standard_normal((rows, _HEADS, _HEAD), np.float32))
    start = positions - rows
    places = np.arange(start, positions, dtype=np.int32)
    view = PageView(*map(device.upload, (pages, pages * PAGE, np.array([pages.size], np.int32), places)))
    inputs = AttentionInputs(q, k_pool, v_pool, _one_span(device, rows, start), view, view.dest, _HEAD**-0.5, None)
    seen = rows * (start + (rows + 1) / 2)
    read = (k_pool[0].nbytes + v_pool[0].nbytes) * positions
    amount = read if rows == 1 else 2 * 2 * _HEADS * _HEAD * seen
    return Part(lambda: attention(device, inputs), amount)


def recurrence_part(device: Device, rows: int) -> Part:
    """Gated DeltaNet over `rows` rows. The amount is the bytes of its states that each row reads and writes."""
    rng, d = np.random.default_rng(6), _HEAD
    channels = (2 * _DELTA_KEY_HEADS + _DELTA_HEADS) * d
    x = device.upload(rng.standard_normal((rows, channels + _DELTA_HEADS * (d + 2)), np.float32))
    gates = device.upload(np.full(_DELTA_HEADS, -1.0, np.float32))
    conv, norm = device.upload(rng.standard_normal((channels, _TAPS), np.float32)), device.zeros(d)
    weights = DeltaWeights(conv, gates, device.zeros(_DELTA_HEADS), norm, 1e-6, _DELTA_KEY_HEADS)
    memory = device.zeros((1, _DELTA_HEADS, d, d))
    past = device.zeros((1, _DELTA_HEADS, _TAPS - 1, 3, d))
    state = RecurrentState(memory, past, device.zeros((1, _DELTA_HEADS, 1, 5, d)), device.zeros((1, _DELTA_HEADS, 1)))
    spans = _one_span(device, rows, 0)
    amount = 2 * rows * (memory.nbytes + past.nbytes)
    return Part(lambda: gated_delta_net(device, x, weights, state, spans), amount)


def elementwise_part(device: Device, rows: int) -> Part:
    """The activation between the products of an MLP, over `rows` rows. The amount is the bytes that it reads and
    writes."""
    x = device.upload(np.random.default_rng(7).standard_normal((rows, 2 * _WIDTH), np.float32))
    gate, up = x[:, :_WIDTH], x[:, _WIDTH:]
    return Part(lambda: gated_activation(device, gate, up, "silu"), 3 * rows * _WIDTH * 4)


def routing_part(device: Device, experts: int, used: int) -> Part:
    """The choice of a row's experts, and the sum of their results."""
    logits = device.upload(np.random.default_rng(5).standard_normal((1, experts), np.float32))
    results = device.zeros((1, used, 64))

    def run() -> None:
        routing = route(
            device, logits, top_k=used, gating="softmax", bias=None, normalise=True, scale=1.0, expert_scale=None
        )
        combine(device, results, routing.weights)

    return Part(run)


def _one_span(device: Device, rows: int, start: int) -> SpanArrays:
    table = device.upload(np.array([[0, 0, rows, start]], np.int32))
    return SpanArrays(table, device.upload(np.zeros(rows, np.int32)), count=1, longest=rows)
