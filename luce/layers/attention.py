"""Grouped-query attention over KV pages, with optional head norms and output gate."""

from __future__ import annotations

from luce.layers.rotary import Rotary
from luce.layers.state import KVPool
from luce.models.spec import Attention
from luce.ops.activation import sigmoid_gate
from luce.ops.attention import attention, write_kv
from luce.ops.matmul import matmul
from luce.ops.norm import head_rms_norm
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device
from luce.runtime.step import DeviceStep


class AttentionLayer:
    """out(attention(rope(norm(q)), rope(norm(k)), v)), times sigmoid(gate) where the spec says so.

    `qkv` stacks attn_q, attn_k, attn_v; `norms` are the query and key head norms, or None.
    """

    def __init__(
        self,
        device: Device,
        spec: Attention,
        *,
        qkv: Weight,
        out: Weight,
        norms: tuple[Array, Array] | None,
        eps: float,
        rotary: Rotary,
        pool: KVPool,
        group: int,
    ) -> None:
        self._device = device
        self._spec = spec
        self._qkv = qkv
        self._out = out
        self._norms = norms
        self._eps = eps
        self._rotary = rotary
        self.state = pool
        self._group = group

    def __call__(self, y: Array, step: DeviceStep) -> Array:
        """y float32 [rows, hidden] -> float32 [rows, hidden]."""
        device, spec, rows, d = self._device, self._spec, y.shape[0], self._spec.head_dim
        width = d * (2 if spec.gated else 1)
        split = spec.heads * width
        fused = matmul(device, y, self._qkv)
        q = fused[:, :split].reshape(rows, spec.heads, width)
        k = fused[:, split : split + spec.kv_heads * d].reshape(rows, spec.kv_heads, d)
        v = fused[:, split + spec.kv_heads * d :].reshape(rows, spec.kv_heads, d)
        q, gate = q[..., :d], q[..., d:]
        if self._norms is not None:
            head_rms_norm(device, q, self._norms[0], self._eps)
            head_rms_norm(device, k, self._norms[1], self._eps)
        self._rotary(step, q, k)
        view = step.views[self._group]
        write_kv(device, k, v, self.state.k, self.state.v, view.dest)
        mixed = attention(
            device,
            q,
            self.state.k,
            self.state.v,
            step.spans,
            view,
            step.positions,
            scale=spec.scale,
            window=spec.window,
        )
        mixed = sigmoid_gate(device, mixed, gate) if spec.gated else mixed.reshape(rows, spec.heads * d)
        return matmul(device, mixed, self._out)
