"""Multi-head latent attention over pages of latents, absorbed: one KV head that all query heads share."""

from __future__ import annotations

from dataclasses import dataclass

from luce.layers.rotary import Rotary
from luce.layers.state import KVPool
from luce.models.spec import Attention
from luce.ops.activation import add
from luce.ops.attention import attention
from luce.ops.attention_mma import AttentionInputs
from luce.ops.matmul import matmul
from luce.ops.moe import Routing, expert_matmul, group
from luce.ops.norm import head_rms_norm, rms_norm
from luce.ops.page_ranking import store_queries
from luce.ops.qkv import Destination, HeadNorms, copy_rows, prepare_queries, temper, write_kv
from luce.ops.quantise import Quantised
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device
from luce.runtime.step import DeviceStep

_NO_NORMS = HeadNorms()


@dataclass(frozen=True)
class LatentWeights:
    """The weights of a latent attention layer."""

    #: attn_q_a if queries are compressed, and the rows of attn_kv_a_mqa, those of the rotated key first
    inputs: Weight
    #: attn_q_b, or attn_q
    queries: Weight
    #: of the compressed queries; None: they are not compressed
    query_norm: Array | None
    latent_norm: Array
    #: attn_k_b: of each head [rank, plain]
    to_latent: Weight
    #: attn_v_b: of each head [value, rank]
    from_latent: Weight
    out: Weight
    eps: float


class LatentAttentionLayer:
    """The layer; `heads` int32 [rows, heads] numbers the heads 0, 1, ... in each of as many rows as a step has at most.

    `queries`: an array for the newest queries of each slot, if pages are ranked (luce.ops.page_ranking).
    """

    #: whether products with `input_weight` are all that reads the layer's input
    only_multiplies = False

    def __init__(
        self,
        device: Device,
        spec: Attention,
        weights: LatentWeights,
        rotary: Rotary,
        pool: KVPool,
        *,
        group: int,
        heads: Array,
        queries: Array | None = None,
    ) -> None:
        assert spec.latent is not None and spec.rope is not None
        self._device = device
        self._spec, self._latent, self._turned = spec, spec.latent, spec.rope.dims
        self._weights = weights
        self.input_weight = weights.inputs
        self.rotary = rotary
        self.state = pool
        self._group = group
        self._heads = heads
        self.queries = queries
        self.head_dim, self.scale = spec.head_dim, spec.scale

    def __call__(self, y: Array | Quantised, step: DeviceStep) -> Array:
        """y float32 [rows, hidden] -> float32 [rows, hidden]."""
        device, spec, weights, rows = self._device, self._spec, self._weights, y.shape[0]
        rotation, view = self.rotary(step), step.views[self._group]
        fused = matmul(device, y, self.input_weight)
        split = self._latent.query_rank
        self._cache(fused[:, split:], step)
        read: Array | Quantised = y
        if weights.query_norm is not None:
            read = rms_norm(device, fused[:, :split], weights.query_norm, weights.eps)
        q = matmul(device, read, weights.queries).reshape(rows, spec.heads, self._latent.plain + self._turned)
        prepare_queries(device, q[..., self._latent.plain :], _NO_NORMS, rotation)
        if spec.temperature is not None:
            temper(device, q, step.position_ids, scale=spec.temperature.scale, length=spec.temperature.length)
        ids = self._heads[:rows]
        routing = Routing(ids, q, group(device, ids, spec.heads))
        absorbed = self._absorb(q, routing)
        if self.queries is not None:
            store_queries(device, absorbed, step.spans, self.queries, self.state.k)
        keys = self.state.k
        inputs = AttentionInputs(absorbed, keys, keys, step.spans, view, step.positions, spec.scale, spec.window)
        mixed = attention(device, inputs)[..., self._turned :]
        values = expert_matmul(device, mixed, weights.from_latent, spec.heads, routing)
        return matmul(device, values.reshape(rows, spec.heads * self._latent.value), weights.out)

    def _cache(self, fused: Array, step: DeviceStep) -> None:
        """Norm, rotate and write a step's rows: float32 [rows, turned + rank], overwritten."""
        device, rows, d = self._device, len(fused), self._spec.head_dim
        row = fused.reshape(rows, 1, d)
        head_rms_norm(device, row[..., self._turned :], self._weights.latent_norm, self._weights.eps)
        prepare_queries(device, row[..., : self._turned], _NO_NORMS, self.rotary(step))
        view, keys = step.views[self._group], self.state.k
        to = Destination(keys, None, view.dest)
        write_kv(device, row, None, to)
        copy_rows(device, to, view.copies)

    def _absorb(self, q: Array, routing: Routing) -> Array:
        """Heads in the latents' space: float32 [rows, heads, plain + turned] -> [rows, heads, turned + rank]."""
        device, spec, plain = self._device, self._spec, self._latent.plain
        latent = expert_matmul(device, q[..., :plain], self._weights.to_latent, spec.heads, routing)
        rows = len(q) * spec.heads
        both = device.zeros((rows, spec.head_dim))
        add(device, both[:, : self._turned], q.reshape(rows, plain + self._turned)[:, plain:])
        add(device, both[:, self._turned :], latent.reshape(rows, self._latent.rank))
        return both.reshape(len(q), spec.heads, spec.head_dim)
