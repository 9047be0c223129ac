"""Layers of the residual stream, the token embedding and the head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from luce.layers.attention import AttentionLayer
from luce.layers.deltanet import DeltaNetLayer
from luce.layers.dynamic_conv import DynamicConvLayer
from luce.layers.latent_attention import LatentAttentionLayer
from luce.layers.mlp import GatedMLPLayer, PlainMLPLayer
from luce.layers.moe import MoELayer
from luce.layers.norm import Norm
from luce.layers.short_conv import ShortConvLayer
from luce.models.spec import Activation
from luce.ops.activation import add, gated_activation, scale, softcap
from luce.ops.embedding import embed, take_rows
from luce.ops.fp16 import Fp16Rows
from luce.ops.int8_rows import Int8Rows
from luce.ops.matmul import Rows, add_product, adds_row, int8_group, matmul, product
from luce.ops.norm import Unnormed
from luce.ops.quantise import quantise
from luce.ops.scaled_products import Product, to_floats
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device
from luce.runtime.step import DeviceStep

Mixer = AttentionLayer | LatentAttentionLayer | ShortConvLayer | DeltaNetLayer


@dataclass
class Residual:
    """The residual stream."""

    device: Device
    #: float32 [rows, hidden]
    x: Array
    #: [rows, hidden], still to be added to x, so that the addition can be fused with the next norm
    delta: Product | None = None
    #: float32 [rows, layers, per_layer] in models with per-layer embeddings
    inputs: Array | None = None
    #: float32 [rows, (copies - 1) hidden] in models that keep copies of the stream beside x
    beside: Array | None = None

    def norm(self, norm: Norm, reader: Weight, *, alone: bool = False, bare: bool = False) -> Rows:
        """The norm of x + delta, which leaves the sum in x, as Norm.of_sum makes it for `reader`."""
        y = norm.of_sum(self.device, self.x, self.delta, reader, alone=alone, bare=bare)
        self.delta = None
        return y

    def read(self, norm: Norm | None, reader: Weight, *, alone: bool = False, bare: bool = False) -> Rows:
        """`norm`, or without one x + delta itself."""
        if norm is not None:
            return self.norm(norm, reader, alone=alone, bare=bare)
        x = self.settle()
        group = int8_group(self.device, x.shape[0], reader)
        return quantise(self.device, x, group) if group else x

    def add_product(self, y: Rows, weight: Weight, *, early: bool = False) -> None:
        """x + y W^T: at once where the product does so, else `delta`. Nothing is pending. `early` as in
        luce.ops.matmul.add_product."""
        if adds_row(self.device, y.shape[0], weight):
            assert not isinstance(y, Fp16Rows | Int8Rows | Unnormed)
            add_product(self.device, y, weight, self.x, early=early)
        else:
            self.delta = product(self.device, y, weight)

    def settle(self) -> Array:
        """x, after the pending addition."""
        if (delta := self.pending()) is not None:
            add(self.device, self.x, delta)
            self.delta = None
        return self.x

    def pending(self) -> Array | None:
        """`delta` as floats."""
        if self.delta is None:
            return None
        self.delta = floats = to_floats(self.device, self.delta)
        return floats


@dataclass(frozen=True)
class DecoderLayer:
    """x += post(mixer(pre(x))); x += post(ffn(pre(x))); see luce.models.spec.Layer for its variants."""

    mixer_norm: Norm | None
    mixer: Mixer
    ffn_norm: Norm | None
    ffn: GatedMLPLayer | PlainMLPLayer | MoELayer
    mixer_post_norm: Norm | None = None
    ffn_post_norm: Norm | None = None
    residual_scale: float = 1.0
    parallel: bool = False
    #: around the mixer and around ffn
    convs: tuple[DynamicConvLayer, DynamicConvLayer] | None = None

    def __call__(self, stream: Residual, step: DeviceStep) -> None:
        """Advance the stream by this layer."""
        if self.convs is not None:
            mixed = self._convolved(self.convs[0], stream, self.mixer_norm, step, lambda x: self.mixer(x, step))
            stream.delta = self._behind(stream.device, mixed, self.mixer_post_norm)
            inner = self._convolved(self.convs[1], stream, self.ffn_norm, step, self.ffn)
            stream.delta = self._behind(stream.device, inner, self.ffn_post_norm)
            return
        alone = self.mixer.only_multiplies and not self.parallel
        y = stream.read(self.mixer_norm, self.mixer.input_weight, alone=alone)
        if self.parallel:
            mixed = self.mixer(y, step)
            add(stream.device, mixed, self.ffn(y))
            stream.delta = self._behind(stream.device, mixed, None)
            return
        bare = isinstance(self.ffn, MoELayer) and self.ffn.norms_row(stream.x.shape[0])
        if self._added_alone(self.mixer_post_norm) and isinstance(self.mixer, AttentionLayer | DeltaNetLayer):
            stream.add_product(self.mixer.mix(y, step), self.mixer.out, early=bare)
        else:
            stream.delta = self._behind(stream.device, self.mixer(y, step), self.mixer_post_norm)
        y = stream.read(self.ffn_norm, self.ffn.input_weight, alone=self.ffn.only_multiplies, bare=bare)
        if self._added_alone(self.ffn_post_norm) and isinstance(self.ffn, GatedMLPLayer):
            stream.add_product(self.ffn.inner(y), self.ffn.down)
        elif self._added_alone(self.ffn_post_norm) and isinstance(self.ffn, MoELayer) and self.ffn.adds(y.shape[0]):
            self.ffn(y, to=stream.x)
        else:
            stream.delta = self._behind(stream.device, self.ffn(y), self.ffn_post_norm)

    def half_weights(self) -> list[Weight]:
        """The weights whose products of many rows the layer reads as halves, where there are such."""
        kinds = AttentionLayer | DeltaNetLayer | GatedMLPLayer
        parts = [part for part in (self.mixer, self.ffn) if isinstance(part, kinds)]
        weights = [part.input_weight for part in parts if part.reads_products]
        if self.parallel or self.convs is not None:
            return weights
        if self._added_alone(self.mixer_post_norm) and isinstance(self.mixer, AttentionLayer | DeltaNetLayer):
            weights.append(self.mixer.out)
        if self._added_alone(self.ffn_post_norm) and isinstance(self.ffn, GatedMLPLayer):
            weights.append(self.ffn.down)
        return weights

    def _added_alone(self, norm: Norm | None) -> bool:
        """Whether a part's last product is added to the stream as it is."""
        return norm is None and self.residual_scale == 1

    def _convolved(
        self,
        conv: DynamicConvLayer,
        stream: Residual,
        norm: Norm | None,
        step: DeviceStep,
        part: Callable[[Array], Array],
    ) -> Array:
        """A part between its two convolutions, whose coefficients both come from the normed stream."""
        y = stream.read(norm, conv.input_weight)
        coefficients = conv.coefficients(y)
        return conv.finish(part(conv.prepare(y, coefficients, step)), coefficients, step)

    def _behind(self, device: Device, delta: Array, norm: Norm | None) -> Array:
        """What a part adds to the stream."""
        if norm is not None:
            delta = norm(device, delta)
        if self.residual_scale != 1:
            scale(device, delta, self.residual_scale)
        return delta


@dataclass(frozen=True)
class Experts:
    """Experts beside a dense MLP; a norm is applied to both results before they are added."""

    #: the router's norm of the stream, with its factor 1/sqrt(hidden) in the weight
    router_norm: Norm
    norm: Norm
    moe: MoELayer
    dense_post_norm: Norm
    post_norm: Norm


@dataclass(frozen=True)
class PerLayerMix:
    """x += norm(out(act(gate x) * this layer's input))."""

    index: int
    gate: Weight
    out: Weight
    post_norm: Norm
    activation: Activation


@dataclass(frozen=True)
class SandwichDecoderLayer:
    """x += norm(mixer(norm(x))); x += norm(ffn(norm(x))), with experts beside the MLP and per-layer inputs after it
    if the model has them; x *= scale."""

    mixer_norm: Norm
    mixer: AttentionLayer
    mixer_post_norm: Norm
    ffn_norm: Norm
    ffn: GatedMLPLayer
    experts: Experts | None
    ffn_post_norm: Norm
    per_layer: PerLayerMix | None
    scale: float

    def __call__(self, stream: Residual, step: DeviceStep) -> None:
        """Advance the stream by this layer."""
        device = stream.device
        mixed = self.mixer(stream.norm(self.mixer_norm, self.mixer.input_weight), step)
        stream.delta = self.mixer_post_norm(device, mixed)
        dense = self.ffn(stream.norm(self.ffn_norm, self.ffn.input_weight))
        if self.experts is not None:
            dense = self._beside(device, self.experts, stream.x, dense)
        stream.delta = self.ffn_post_norm(device, dense)
        if self.per_layer is not None:
            mix = self.per_layer
            assert stream.inputs is not None
            gate = matmul(device, stream.settle(), mix.gate)
            inner = gated_activation(device, gate, stream.inputs[:, mix.index], mix.activation)
            stream.delta = mix.post_norm(device, matmul(device, inner, mix.out))
        scale(device, stream.settle(), self.scale)

    def _beside(self, device: Device, experts: Experts, x: Array, dense: Array) -> Array:
        chosen = experts.moe(experts.norm(device, x), routed_by=experts.router_norm(device, x))
        both = experts.dense_post_norm(device, dense)
        add(device, both, experts.post_norm(device, chosen))
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

    def rows(self, tokens: Array, to: Array | None = None) -> Array:
        """Rows of the table, without the model's scale: int32 [n] -> float32 [n, hidden], in `to` if it is given."""
        return embed(self.device, self.table, tokens, to)


@dataclass(frozen=True)
class Head:
    """Norm and logits of the output rows, in the last shard."""

    device: Device
    norm: Norm
    weight: Weight
    scale: float
    softcap: float
    #: of copies of the stream, what it becomes before the norm
    join: Callable[[Residual], Array] | None = None

    def __call__(self, stream: Residual, step: DeviceStep) -> Array:
        """float32 [wanted, vocab]."""
        if step.shape.output_rows < step.shape.rows:
            x, beside = stream.settle(), stream.beside
            stream = Residual(
                self.device,
                take_rows(self.device, x, step.output_rows),
                beside=None if beside is None else take_rows(self.device, beside, step.output_rows),
            )
        if self.join is not None:
            self.join(stream)
        logits = self.project(stream.norm(self.norm, self.weight))
        if self.scale != 1:
            scale(self.device, logits, self.scale)
        if self.softcap:
            softcap(self.device, logits, self.softcap)
        return logits

    def project(self, rows: Rows) -> Array:
        """The product alone, without the model's norm, scale and softcap: float32 [n, hidden] -> [n, vocab]."""
        return matmul(self.device, rows, self.weight)
