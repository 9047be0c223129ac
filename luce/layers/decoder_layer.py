"""Pre-norm and sandwich-norm layers, the token embedding and the head."""

from __future__ import annotations

from dataclasses import dataclass

from luce.layers.attention import AttentionLayer
from luce.layers.deltanet import DeltaNetLayer
from luce.layers.mlp import GatedMLPLayer
from luce.layers.moe import MoELayer
from luce.models.spec import Activation
from luce.ops.activation import add, gated_activation, scale, softcap
from luce.ops.embedding import embed, take_rows
from luce.ops.matmul import int8_group, matmul
from luce.ops.norm import add_rms_norm, quantised_rms_norm, rms_norm
from luce.ops.quantise import Quantised
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device
from luce.runtime.step import DeviceStep


@dataclass
class Residual:
    """The residual stream."""

    device: Device
    #: float32 [rows, hidden]
    x: Array
    #: float32 [rows, hidden], still to be added to x, so that the addition can be fused with the next norm
    delta: Array | None = None
    #: float32 [rows, layers, per_layer] in models with per-layer embeddings
    inputs: Array | None = None

    def norm(self, weight: Array, eps: float, next_weight: Weight) -> Array | Quantised:
        """rms(x + delta) * weight, which leaves the sum in x; quantised if products with `next_weight` read int8."""
        y: Array | Quantised
        if group := int8_group(self.device, self.x.shape[0], next_weight):
            y = quantised_rms_norm(self.device, self.x, self.delta, weight, eps, group)
        elif self.delta is None:
            y = rms_norm(self.device, self.x, weight, eps)
        else:
            y = add_rms_norm(self.device, self.x, self.delta, weight, eps)
        self.delta = None
        return y

    def settle(self) -> Array:
        """x, after the pending addition."""
        if self.delta is not None:
            add(self.device, self.x, self.delta)
            self.delta = None
        return self.x


@dataclass(frozen=True)
class PreNormDecoderLayer:
    """x += mixer(norm(x)); x += ffn(norm(x))."""

    mixer_norm: Array
    mixer: AttentionLayer | DeltaNetLayer
    ffn_norm: Array
    ffn: GatedMLPLayer | MoELayer
    eps: float

    def __call__(self, stream: Residual, step: DeviceStep) -> None:
        """Advance the stream by this layer."""
        stream.delta = self.mixer(stream.norm(self.mixer_norm, self.eps, self.mixer.input_weight), step)
        stream.delta = self.ffn(stream.norm(self.ffn_norm, self.eps, self.ffn.input_weight))


@dataclass(frozen=True)
class Experts:
    """Experts beside a dense MLP; a norm is applied to both results before they are added."""

    #: the router's norm of the stream, with its factor 1/sqrt(hidden) in the weight
    router_norm: Array
    norm: Array
    moe: MoELayer
    dense_post_norm: Array
    post_norm: Array


@dataclass(frozen=True)
class PerLayerMix:
    """x += norm(out(act(gate x) * this layer's input))."""

    index: int
    gate: Weight
    out: Weight
    post_norm: Array
    activation: Activation


@dataclass(frozen=True)
class SandwichDecoderLayer:
    """x += norm(mixer(norm(x))); x += norm(ffn(norm(x))), with experts beside the MLP and per-layer inputs after it
    if the model has them; x *= scale."""

    mixer_norm: Array
    mixer: AttentionLayer
    mixer_post_norm: Array
    ffn_norm: Array
    ffn: GatedMLPLayer
    experts: Experts | None
    ffn_post_norm: Array
    per_layer: PerLayerMix | None
    scale: float
    eps: float

    def __call__(self, stream: Residual, step: DeviceStep) -> None:
        """Advance the stream by this layer."""
        device, eps = stream.device, self.eps
        mixed = self.mixer(stream.norm(self.mixer_norm, eps, self.mixer.input_weight), step)
        stream.delta = rms_norm(device, mixed, self.mixer_post_norm, eps)
        dense = self.ffn(stream.norm(self.ffn_norm, eps, self.ffn.input_weight))
        if self.experts is not None:
            dense = self._beside(device, self.experts, stream.x, dense)
        stream.delta = rms_norm(device, dense, self.ffn_post_norm, eps)
        if self.per_layer is not None:
            mix = self.per_layer
            assert stream.inputs is not None
            gate = matmul(device, stream.settle(), mix.gate)
            inner = gated_activation(device, gate, stream.inputs[:, mix.index], mix.activation)
            stream.delta = rms_norm(device, matmul(device, inner, mix.out), mix.post_norm, eps)
        scale(device, stream.settle(), self.scale)

    def _beside(self, device: Device, experts: Experts, x: Array, dense: Array) -> Array:
        eps = self.eps
        chosen = experts.moe(
            rms_norm(device, x, experts.norm, eps), routed_by=rms_norm(device, x, experts.router_norm, eps)
        )
        both = rms_norm(device, dense, experts.dense_post_norm, eps)
        add(device, both, rms_norm(device, chosen, experts.post_norm, eps))
        return both


@dataclass(frozen=True)
class Embedding:
    """Token ids to rows, in the first shard."""

    device: Device
    table: Weight
    scale: float

    def __call__(self, step: DeviceStep) -> Array:
        """The rows before layer 0: float32 [rows, hidden]."""
        x = self.rows(step.tokens)
        if self.scale != 1:
            scale(self.device, x, self.scale)
        return x

    def rows(self, tokens: Array) -> Array:
        """Rows of the table, without the model's scale: int32 [n] -> float32 [n, hidden]."""
        return embed(self.device, self.table, tokens)


@dataclass(frozen=True)
class Head:
    """Norm and logits of the output rows, in the last shard."""

    device: Device
    norm: Array
    weight: Weight
    eps: float
    softcap: float

    def __call__(self, stream: Residual, step: DeviceStep) -> Array:
        """float32 [wanted, vocab]."""
        if step.shape.output_rows < step.shape.rows:
            stream = Residual(self.device, take_rows(self.device, stream.settle(), step.output_rows))
        logits = self.project(stream.norm(self.norm, self.eps, self.weight))
        if self.softcap:
            softcap(self.device, logits, self.softcap)
        return logits

    def project(self, rows: Array | Quantised) -> Array:
        """The product alone, without the model's norm and softcap: float32 [n, hidden] -> [n, vocab]."""
        return matmul(self.device, rows, self.weight)
