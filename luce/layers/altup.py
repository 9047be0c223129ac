"""Layers that keep four copies of the residual stream (AltUp), and what makes the copies and joins them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from luce.layers.attention import AttentionLayer
from luce.layers.decoder_layer import PerLayerMix, Residual
from luce.layers.mlp import GatedMLPLayer
from luce.layers.norm import Norm
from luce.ops.activation import add, gated_activation, scale
from luce.ops.altup import correct, match_magnitude, predict
from luce.ops.matmul import matmul
from luce.ops.moe import Routing, expert_matmul, group
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device
from luce.runtime.step import DeviceStep


@dataclass(frozen=True)
class StreamMaps:
    """A matrix for each copy of the stream but the first."""

    device: Device
    #: of each copy [hidden, hidden]
    weight: Weight
    #: int32 [rows, copies]: 0, 1, ... in each row, for at least as many rows as a step has
    numbers: Array

    def split(self, x: Array) -> Array:
        """The other copies of a stream's first rows: float32 [n, hidden] -> [n, copies hidden]."""
        return self._mapped(x, x).reshape(len(x), -1)

    def join(self, stream: Residual) -> Array:
        """The mean of the first copy and the mapped others: float32 [n, hidden], in the place of the first."""
        x, beside = stream.settle(), stream.beside
        assert beside is not None
        mapped = self._mapped(beside.reshape(len(x), -1, x.shape[1]), x)
        copies = mapped.shape[1]
        for copy in range(copies):
            add(self.device, x, mapped[:, copy])
        scale(self.device, x, 1 / (copies + 1))
        return x

    def _mapped(self, y: Array, x: Array) -> Array:
        """The maps of y, each result with the magnitude of x."""
        ids = self.numbers[: len(x)]
        copies = ids.shape[1]
        mapped = expert_matmul(self.device, y, self.weight, copies, Routing(ids, x, group(self.device, ids, copies)))
        match_magnitude(self.device, mapped, x)
        return mapped


@dataclass(frozen=True)
class AltUp:
    """Predicts the copies of the stream before a layer, and corrects them behind it."""

    #: the router's norm, with its factor 1/hidden in the weight
    router_norm: Norm
    router: Weight
    #: float32 [16, 4], [4, 4] and [hidden]
    predict: Array
    correct: Array
    scale: Array

    def route(self, device: Device, x: Array) -> Array:
        """float32 [n, hidden] -> [n, 4]."""
        return matmul(device, self.router_norm(device, x), self.router)


@dataclass(frozen=True)
class Laurel:
    """y + norm(right left y), a learned augmented residual."""

    left: Weight
    right: Weight
    post_norm: Norm

    def __call__(self, device: Device, y: Array) -> Array:
        """float32 [n, hidden] -> the same."""
        found = self.post_norm(device, matmul(device, matmul(device, y, self.left), self.right))
        add(device, found, y)
        return found


@dataclass(frozen=True)
class AltUpDecoderLayer:
    """See luce.models.spec.AltUpLayer."""

    altup: AltUp
    laurel: Laurel
    mixer_norm: Norm
    mixer: AttentionLayer
    mixer_post_norm: Norm
    ffn_norm: Norm
    ffn: GatedMLPLayer
    ffn_post_norm: Norm
    per_layer: PerLayerMix

    def __call__(self, stream: Residual, step: DeviceStep) -> None:
        """Advance the stream by this layer."""
        device, altup, mix = stream.device, self.altup, self.per_layer
        x, beside = stream.settle(), stream.beside
        assert beside is not None and stream.inputs is not None
        predict(device, x, beside, altup.route(device, x), altup.predict)
        y = self.mixer_norm(device, x)
        both = self.laurel(device, y)
        add(device, both, self.mixer_post_norm(device, self.mixer(y, step)))
        add(device, both, x)
        scale(device, both, math.sqrt(0.5))
        result = self.ffn_post_norm(device, self.ffn(self.ffn_norm(device, both)))
        add(device, result, both)
        first = correct(device, x, beside, result, altup.route(device, result), altup.correct, altup.scale)
        inner = gated_activation(device, matmul(device, first, mix.gate), stream.inputs[:, mix.index], mix.activation)
        more, hidden = mix.post_norm(device, matmul(device, inner, mix.out)), x.shape[1]
        for at in range(0, beside.shape[1], hidden):
            add(device, beside[:, at : at + hidden], more)
