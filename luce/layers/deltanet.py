"""Gated DeltaNet: input projections, the gated delta rule (luce.ops.deltanet), output projection."""

from __future__ import annotations

from luce.layers.state import DeltaState
from luce.ops.deltanet import DeltaWeights, gated_delta_net, reads_products
from luce.ops.embedding import take_rows
from luce.ops.fp16 import Fp16Rows
from luce.ops.int8_rows import Int8Rows
from luce.ops.matmul import Rows, fp16_top, matmul, product, sole_int8_group
from luce.ops.norm import Unnormed
from luce.ops.quantise import Quantised
from luce.ops.scaled_products import Product
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device
from luce.runtime.step import DeviceStep, SpanArrays


class DeltaNetLayer:
    """The layer; `inputs` stacks attn_qkv, attn_gate, ssm_alpha and ssm_beta.

    `places`: where `out` has its heads in another order than the layer, int32 [rows, value_heads] for as many rows as a
    step has at most: row * value_heads + the layer's number of each head of `out`.
    """

    #: whether products with `input_weight` are all that reads the layer's input
    only_multiplies = True

    def __init__(
        self,
        device: Device,
        *,
        inputs: Weight,
        out: Weight,
        weights: DeltaWeights,
        state: DeltaState,
        places: Array | None = None,
    ) -> None:
        self._device = device
        self.input_weight = inputs
        self.out = out
        self._weights = weights
        self.state = state
        self._places = places

    def __call__(self, y: Rows, step: DeviceStep) -> Array:
        """y float32 [rows, hidden] -> float32 [rows, hidden]."""
        return matmul(self._device, self.mix(y, step), self.out)

    @property
    def reads_products(self) -> bool:
        """Whether products with `input_weight` may be sums or halves."""
        return self._places is None

    def mix(self, y: Rows, step: DeviceStep) -> Rows:
        """The rows that `out` multiplies."""
        device = self._device
        top = fp16_top(device, y.shape[0], self.out)
        if top is not None and self.reads_products and reads_products(step.spans):
            return self._mix(product(device, y, self.input_weight), step.spans, top=top)
        x = matmul(device, y, self.input_weight)
        if self._places is not None:
            mixed = self._mix(x, step.spans)
            assert not isinstance(mixed, Quantised | Fp16Rows | Int8Rows | Unnormed)
            rows, heads = len(x), self._places.shape[1]
            each = take_rows(device, mixed.reshape(rows * heads, -1), self._places[:rows].reshape(-1))
            return each.reshape(rows, -1)
        int8_group = sole_int8_group(device, y.shape[0], self.out)
        return self._mix(x, step.spans, int8_group=int8_group, top=top)

    def accept(self, spans: SpanArrays) -> None:
        """Apply the speculative rows that spans accept; the spans have no rows of their own."""
        self._mix(self._device.empty((0, self.input_weight.rows)), spans)

    def _mix(self, x: Product, spans: SpanArrays, *, int8_group: int = 0, top: int | None = None) -> Rows:
        return gated_delta_net(self._device, x, self._weights, self.state, spans, int8_group=int8_group, top=top)
