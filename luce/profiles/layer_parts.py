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
from luce.ops.matmul import matmul
from luce.ops.moe import RoutingOptions, combine, route
from luce.ops.norm import rms_norm
from luce.ops.weight import Weight
from luce.runtime.device import Device
from luce.runtime.step import PAGE, PageView, SpanArrays

#: heads of queries, heads of keys and values, and values of a head in attention
_HEADS, _KV_HEADS, _HEAD = 32, 8, 128
#: most heads of keys, and taps of the convolution in gated DeltaNet
_DELTA_KEY_HEADS, _TAPS = 16, 4
#: heads of values where one row is measured, of a model that a CPU decodes
ROW_HEADS = 16
#: features of an activation
_WIDTH = 8192
#: features of a product that a layer's row has, and such products in a layer
_FEATURES, _PRODUCTS = 128, 4


@dataclass(frozen=True)
class Part:
    """A piece of work."""

    run: Callable[[], object]
    #: what it reads or computes: bytes or operations
    amount: float = 0.0
    #: whether what it reads has just been written, and may be in a cache
    again: bool = False


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


def recurrence_part(device: Device, rows: int, heads: int, layers: int = 1) -> Part:
    """Gated DeltaNet over `rows` rows in so many layers, each with a state and weights of its own. The amount is the
    bytes of the states that the rows read and write.

    `heads`: of values.
    """
    rng, d = np.random.default_rng(6), _HEAD
    keys = min(_DELTA_KEY_HEADS, heads)
    channels = (2 * keys + heads) * d
    x = device.upload(rng.standard_normal((rows, channels + heads * (d + 2)), np.float32))
    spans = _one_span(device, rows, 0)
    owned = []
    for _ in range(layers):
        gates = device.upload(np.full(heads, -1.0, np.float32))
        conv, norm = device.upload(rng.standard_normal((channels, _TAPS), np.float32)), device.zeros(d)
        weights = DeltaWeights(conv, gates, device.zeros(heads), norm, 1e-6, keys)
        memory, past = device.zeros((1, heads, d, d)), device.zeros((1, heads, _TAPS - 1, 3, d))
        state = RecurrentState(memory, past, device.zeros((1, heads, 1, 5, d)), device.zeros((1, heads, 1)))
        owned.append((weights, state))

    def run() -> None:
        for weights, state in owned:
            gated_delta_net(device, x, weights, state, spans)

    return Part(run, 2 * rows * sum(state.memory.nbytes + state.past.nbytes for _, state in owned))


def elementwise_part(device: Device, rows: int) -> Part:
    """The activation between the products of an MLP, over `rows` rows. The amount is the bytes that it reads and
    writes."""
    x = device.upload(np.random.default_rng(7).standard_normal((rows, 2 * _WIDTH), np.float32))
    gate, up = x[:, :_WIDTH], x[:, _WIDTH:]
    return Part(lambda: gated_activation(device, gate, up, "silu"), 3 * rows * _WIDTH * 4, again=True)


def layers_part(device: Device, weight: Weight) -> tuple[Part, int]:
    """What one row passes in layers beside attention: norms, products, whose weights are cut from one matrix, and
    activations. The amount is the bytes of the weights; the number is that of the layers."""
    features = max(min(_FEATURES, weight.rows // _PRODUCTS), 1)
    layers = max(weight.rows // (_PRODUCTS * features), 1)
    products = [weight.cut(range(at * features, (at + 1) * features)) for at in range(layers * _PRODUCTS)]
    x = device.upload(np.random.default_rng(8).standard_normal((1, 3 * weight.cols), np.float32))
    row, gate, up = (x[:, first : first + weight.cols] for first in range(0, x.shape[1], weight.cols))
    row, scale = device.upload(np.ascontiguousarray(row)), device.zeros(weight.cols)

    def run() -> None:
        for layer in range(layers):
            mixer, output, first, last = products[layer * _PRODUCTS : (layer + 1) * _PRODUCTS]
            normed = rms_norm(device, row, scale, 1e-6)
            matmul(device, normed, mixer)
            matmul(device, row, output)
            normed = rms_norm(device, row, scale, 1e-6)
            matmul(device, normed, first)
            matmul(device, gated_activation(device, gate, up, "silu"), last)

    return Part(run, sum(product.nbytes for product in products)), layers


def routing_part(device: Device, experts: int, used: int) -> Part:
    """The choice of a row's experts, and the sum of their results."""
    logits = device.upload(np.random.default_rng(5).standard_normal((1, experts), np.float32))
    results = device.zeros((1, used, 64))

    def run() -> None:
        routing = route(device, logits, RoutingOptions(used, "softmax"))
        combine(device, results, routing.weights)

    return Part(run)


def _one_span(device: Device, rows: int, start: int) -> SpanArrays:
    table = device.upload(np.array([[0, 0, rows, start]], np.int32))
    return SpanArrays(table, device.upload(np.zeros(rows, np.int32)), count=1, longest=rows)
