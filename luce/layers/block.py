"""Pre-norm blocks and the model's two ends."""

from __future__ import annotations

from dataclasses import dataclass

from luce.layers.attention import AttentionLayer
from luce.layers.deltanet import DeltaNetLayer
from luce.layers.mlp import GatedMLPLayer
from luce.ops.activation import add
from luce.ops.embedding import embed, take_rows
from luce.ops.matmul import matmul
from luce.ops.norm import add_rms_norm, rms_norm
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device
from luce.runtime.step import DeviceStep


@dataclass
class Residual:
    """The residual stream: x float32 [rows, hidden], and a delta still to be added to it, so that the addition can be
    fused with the next norm."""

    device: Device
    x: Array
    delta: Array | None = None

    def norm(self, weight: Array, eps: float) -> Array:
        """rms(x + delta) * weight, leaving the sum in x."""
        if self.delta is None:
            return rms_norm(self.device, self.x, weight, eps)
        y = add_rms_norm(self.device, self.x, self.delta, weight, eps)
        self.delta = None
        return y

    def settle(self) -> Array:
        """x with nothing pending."""
        if self.delta is not None:
            add(self.device, self.x, self.delta)
            self.delta = None
        return self.x


@dataclass(frozen=True)
class PreNormBlock:
    """x += mixer(norm(x)); x += ffn(norm(x))."""

    mixer_norm: Array
    mixer: AttentionLayer | DeltaNetLayer
    ffn_norm: Array
    ffn: GatedMLPLayer
    eps: float

    def __call__(self, stream: Residual, step: DeviceStep) -> None:
        """Advance the stream by this block."""
        stream.delta = self.mixer(stream.norm(self.mixer_norm, self.eps), step)
        stream.delta = self.ffn(stream.norm(self.ffn_norm, self.eps))


@dataclass(frozen=True)
class Embedding:
    """The first shard's entry: token ids to rows."""

    device: Device
    table: Weight

    def __call__(self, step: DeviceStep) -> Residual:
        """The stream before block 0."""
        return Residual(self.device, embed(self.device, self.table, step.tokens))


@dataclass(frozen=True)
class Head:
    """The last shard's exit: norm and logits of the wanted rows only."""

    device: Device
    norm: Array
    weight: Weight
    eps: float

    def __call__(self, stream: Residual, step: DeviceStep) -> Array:
        """float32 [wanted, vocab]."""
        rows = take_rows(self.device, stream.settle(), step.wanted)
        return matmul(self.device, rms_norm(self.device, rows, self.norm, self.eps), self.weight)
