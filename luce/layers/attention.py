"""Grouped-query attention over KV pages, with optional norms, rotation and output gate."""

from __future__ import annotations

from dataclasses import dataclass

from luce.layers.rotary import Rotary
from luce.layers.state import KVPool
from luce.models.spec import Attention
from luce.ops.attention import gate_heads, gated_attention
from luce.ops.attention_mma import AttentionInputs, Gate
from luce.ops.fp16 import GROUP, Halves
from luce.ops.half_products import halves, has_halves
from luce.ops.int8_rows import Int8Rows
from luce.ops.matmul import FEW_ROWS, Rows, fp16_top, matmul, sole_int8_group
from luce.ops.norm import head_rms_norm
from luce.ops.page_ranking import store_queries
from luce.ops.qkv import (
    Destination,
    HeadNorms,
    copy_rows,
    prepare_halves,
    prepare_heads,
    prepare_keys,
    prepare_queries,
    temper,
    write_kv,
)
from luce.ops.quantise import Quantised
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device
from luce.runtime.step import DeviceStep


@dataclass(frozen=True)
class AttentionWeights:
    """The weights of an attention layer."""

    #: attn_q, attn_k, attn_v and, with an output gate, attn_gate, stacked; with a donor without attn_k and attn_v
    inputs: Weight
    out: Weight
    #: of each head
    norms: HeadNorms
    #: of all query heads together, and of all key heads
    whole_norms: HeadNorms
    #: float32 [heads]
    sinks: Array | None = None


class AttentionLayer:
    """out(attention(rope(norm(q)), rope(norm(k)), v)), times a gate if the spec has one.

    `pool` is the donor's if the spec names one. `lends`: the layer's number if layers on other devices read its keys
    and values. `queries`: an array for the newest queries of each slot, if pages are ranked (luce.ops.page_ranking).
    """

    #: whether products with `input_weight` are all that reads the layer's input
    only_multiplies = True

    def __init__(
        self,
        device: Device,
        spec: Attention,
        weights: AttentionWeights,
        rotary: Rotary | None,
        pool: KVPool,
        *,
        group: int,
        lends: int | None = None,
        queries: Array | None = None,
    ) -> None:
        self._device = device
        self._spec = spec
        self.input_weight = weights.inputs
        self.out = weights.out
        self._norms, self._whole_norms = weights.norms, weights.whole_norms
        self._sinks = weights.sinks
        self.rotary = rotary
        assert pool.v is not None
        self.state, self._values = pool, pool.v
        self._group = group
        self._lends = lends
        self.queries = queries
        self.head_dim, self.scale = spec.head_dim, spec.scale

    def __call__(self, y: Rows, step: DeviceStep) -> Array:
        """y float32 [rows, hidden] -> float32 [rows, hidden]."""
        return matmul(self._device, self.mix(y, step), self.out)

    def mix(self, y: Rows, step: DeviceStep) -> Rows:
        """The rows that `out` multiplies."""
        device, spec, rows, d = self._device, self._spec, y.shape[0], self._spec.head_dim
        width = d * (2 if spec.query_gate else 1)
        split = spec.heads * width
        int8_group, top = sole_int8_group(device, rows, self.out), fp16_top(device, rows, self.out)
        fused, scales = self._project(y, step, top)
        q = fused[:, :split].reshape(rows, spec.heads, width)
        gate = None
        if spec.query_gate:
            q, values = q[..., :d], q[..., d:]
            gate = Gate(values if scales is None else Halves(values, scales), "sigmoid")
        elif spec.output_gate:
            values = fused[:, split + 2 * spec.kv_heads * d :].reshape(rows, spec.heads, spec.output_gate)
            gate = Gate(values, "softplus")
        view, rotation = step.views[self._group], None if self.rotary is None else self.rotary(step)
        self._norm_whole(q, self._whole_norms.query)
        if spec.donor is None:
            kv = spec.kv_heads * d
            k = fused[:, split : split + kv].reshape(rows, spec.kv_heads, d)
            v = fused[:, split + kv : split + 2 * kv].reshape(rows, spec.kv_heads, d)
            self._norm_whole(k, self._whole_norms.key)
            to = Destination(self.state.k, self._values, view.dest)
            if scales is None:
                prepare_heads(device, q, k, v, self._norms, rotation, to, keep=self._lends is not None)
            else:
                q = prepare_halves(device, q, k, v, scales, self._norms, rotation, to)
            copy_rows(device, to, view.copies)
            if self._lends is not None:
                step.lent[self._lends] = fused[:, split : split + 2 * kv]
        else:
            prepare_queries(device, q, self._norms, rotation)
        if spec.temperature is not None:
            temper(device, q, step.position_ids, scale=spec.temperature.scale, length=spec.temperature.length)
        if self.queries is not None:
            store_queries(device, q, step.spans, self.queries, self.state.k)
        inputs = AttentionInputs(
            q,
            self.state.k,
            self._values,
            step.spans,
            view,
            step.positions,
            spec.scale,
            spec.window,
            spec.softcap,
            self._sinks,
        )
        if step.sparse is not None and spec.window is None and not spec.softcap and spec.donor is None:
            return gate_heads(device, step.sparse(inputs), gate)
        return gated_attention(device, inputs, gate, int8_group=int8_group, top=top)

    @property
    def reads_products(self) -> bool:
        """Whether products with `input_weight` may be halves."""
        spec, norms = self._spec, self._whole_norms
        alone = spec.donor is None and self._lends is None and norms.query is None and norms.key is None
        return alone and not spec.output_gate and spec.head_dim % GROUP == 0

    def _project(self, y: Rows, step: DeviceStep, top: int | None) -> tuple[Array, Array | None]:
        """The product of `input_weight`: float32, or fp16 and the scales of its rows, where all behind it reads these.

        `top`: of the rows that `out` multiplies.
        """
        device = self._device
        long = top is not None and step.spans.longest > FEW_ROWS
        if long and self.reads_products and has_halves(device, y, self.input_weight):
            assert not isinstance(y, Quantised | Int8Rows)
            made = halves(device, y, self.input_weight)
            return made.values, made.rows
        return matmul(device, y, self.input_weight), None

    def write_context(self, y: Rows, step: DeviceStep, rotary: Rotary | None = None) -> None:
        """Write the keys and values of rows that do not attend themselves: y float32 [rows, hidden].

        `rotary` rotates the keys instead of the layer's own.
        """
        device, spec = self._device, self._spec
        queries = spec.heads * spec.head_dim * (2 if spec.query_gate else 1)
        fused = matmul(device, y, self.input_weight.cut(range(queries, queries + 2 * spec.kv_heads * spec.head_dim)))
        k, v = fused.reshape(len(fused), 2, spec.kv_heads, spec.head_dim).swapaxes(0, 1)
        self._norm_whole(k, self._whole_norms.key)
        to = Destination(self.state.k, self._values, step.views[self._group].dest)
        turn = rotary or self.rotary
        prepare_keys(device, k, v, self._norms, None if turn is None else turn(step), to)

    def _norm_whole(self, heads: Array, weight: Array | None) -> None:
        """The norm of all heads of a row together, in place: float32 [rows, heads, head_dim]."""
        if weight is not None:
            whole = heads.reshape(len(heads), 1, heads.shape[1] * heads.shape[2])
            head_rms_norm(self._device, whole, weight, self._whole_norms.eps)


class Mirror:
    """The keys and values of layer `donor` on another device, for the layers of this device that borrow them.

    `spec` and `group` are the donor's. The pages of the pool have the numbers of the donor's pages.
    """

    def __init__(self, device: Device, donor: int, spec: Attention, *, pool: KVPool, group: int) -> None:
        self._device = device
        self._donor = donor
        self._spec = spec
        self.state = pool
        self._group = group

    def __call__(self, step: DeviceStep) -> None:
        """Write the donor's keys and values of a step's rows."""
        rows = step.lent[self._donor]
        k, v = rows.reshape(len(rows), 2, self._spec.kv_heads, self._spec.head_dim).swapaxes(0, 1)
        view = step.views[self._group]
        to = Destination(self.state.k, self.state.v, view.dest)
        write_kv(self._device, k, v, to)
        copy_rows(self._device, to, view.copies)
