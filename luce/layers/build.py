"""Spec to layers: names the tensors, checks their shapes, allocates the states. The only switch over spec parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from luce.errors import UnsupportedError
from luce.gguf.quants import dequantize
from luce.gguf.reader import GGUFFile
from luce.layers.attention import AttentionLayer
from luce.layers.block import Embedding, Head, PreNormBlock
from luce.layers.deltanet import DeltaNetLayer
from luce.layers.mlp import GatedMLPLayer
from luce.layers.rotary import Rotary
from luce.layers.state import DeltaState, KVPool
from luce.layers.weights import WeightLoader
from luce.models.spec import Attention, GatedDeltaNet, GatedMLP, ModelSpec, Rope
from luce.ops.weight import Weight
from luce.runtime.device import Device

EMBEDDING = "token_embd.weight"


class LayerBuilder:
    """Builds the layers of one shard. `pages` per page group and `slots` size the states."""

    def __init__(self, file: GGUFFile, spec: ModelSpec, device: Device, *, pages: Sequence[int], slots: int) -> None:
        self._file = file
        self._spec = spec
        self._device = device
        self._pages = pages
        self._slots = slots
        self._rotaries: dict[Rope, Rotary] = {}
        self.weights = WeightLoader(file, device)

    def embedding(self) -> Embedding:
        """The entry of the first shard."""
        return Embedding(self._device, self._table(EMBEDDING))

    def head(self) -> Head:
        """The exit of the last shard; a tied head shares the embedding's weight if both are on this device."""
        norm = self.weights.vector("output_norm.weight", self._spec.hidden)
        table = self._table(EMBEDDING if self._spec.tied_head else "output.weight")
        return Head(self._device, norm, table, self._spec.norm_eps)

    def block(self, index: int) -> PreNormBlock:
        """Block `index` of the spec. Raises UnsupportedError if the file holds tensors of it that the family lacks."""
        spec = self._spec.blocks[index]
        mixer: AttentionLayer | DeltaNetLayer
        if isinstance(spec.mixer, Attention):
            mixer = self._attention(index, spec.mixer)
        else:
            mixer = self._delta_net(index, spec.mixer)
        block = PreNormBlock(
            mixer_norm=self.weights.vector(_name(index, spec.mixer_norm), self._spec.hidden),
            mixer=mixer,
            ffn_norm=self.weights.vector(_name(index, spec.ffn_norm), self._spec.hidden),
            ffn=self._mlp(index, spec.ffn),
            eps=self._spec.norm_eps,
        )
        prefix = f"blk.{index}."
        for name in self._file.tensors:
            if name.startswith(prefix) and name not in self.weights.used:
                raise UnsupportedError(f"{self._file.paths[0]}: tensor {name} is unknown to family {self._spec.family}")
        return block

    def _table(self, name: str) -> Weight:
        return self.weights.matrix([name], self._spec.hidden, [self._spec.vocab])

    def _attention(self, index: int, spec: Attention) -> AttentionLayer:
        hidden, kv = self._spec.hidden, spec.kv_heads * spec.head_dim
        queries = spec.heads * spec.head_dim
        names = [_name(index, f"attn_{part}") for part in "qkv"]
        norms = None
        if spec.qk_norm:
            norms = (
                self.weights.vector(_name(index, "attn_q_norm"), spec.head_dim),
                self.weights.vector(_name(index, "attn_k_norm"), spec.head_dim),
            )
        group = self._spec.group_of(index)
        assert group is not None
        return AttentionLayer(
            self._device,
            spec,
            qkv=self.weights.matrix(names, hidden, [queries * (2 if spec.gated else 1), kv, kv]),
            out=self.weights.matrix([_name(index, "attn_output")], queries, [hidden]),
            norms=norms,
            eps=self._spec.norm_eps,
            rotary=self._rotary(spec.rope),
            pool=KVPool.allocate(self._device, spec, self._pages[group]),
            group=group,
        )

    def _delta_net(self, index: int, spec: GatedDeltaNet) -> DeltaNetLayer:
        hidden, inner, heads = self._spec.hidden, spec.value_heads * spec.head_dim, spec.value_heads
        names = [_name(index, part) for part in ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta")]
        return DeltaNetLayer(
            self._device,
            spec,
            inputs=self.weights.matrix(names, hidden, [spec.channels, inner, heads, heads]),
            out=self.weights.matrix([_name(index, "ssm_out")], inner, [hidden]),
            conv=self.weights.filters(_name(index, "ssm_conv1d"), spec.conv_kernel, spec.channels),
            decay=self.weights.vector(f"blk.{index}.ssm_a", heads),
            dt_bias=self.weights.vector(f"blk.{index}.ssm_dt.bias", heads),
            norm=self.weights.vector(_name(index, "ssm_norm"), spec.head_dim),
            eps=self._spec.norm_eps,
            state=DeltaState.allocate(self._device, spec, self._slots),
        )

    def _mlp(self, index: int, spec: GatedMLP) -> GatedMLPLayer:
        hidden = self._spec.hidden
        names = [_name(index, "ffn_gate"), _name(index, "ffn_up")]
        return GatedMLPLayer(
            self._device,
            spec,
            gate_up=self.weights.matrix(names, hidden, [spec.hidden, spec.hidden]),
            down=self.weights.matrix([_name(index, "ffn_down")], spec.hidden, [hidden]),
        )

    def _rotary(self, spec: Rope) -> Rotary:
        if spec not in self._rotaries:
            factors = None
            if spec.factors is not None:
                info = self._file.tensors[spec.factors]
                factors = dequantize(self._file.raw(spec.factors), info.type).reshape(-1).astype(np.float32)
                if factors.size != spec.dims // 2:
                    path = self._file.paths[0]
                    raise UnsupportedError(
                        f"{path}: tensor {spec.factors} has {factors.size} values, expected {spec.dims // 2}"
                    )
            self._rotaries[spec] = Rotary(self._device, spec, factors)
        return self._rotaries[spec]


def _name(block: int, part: str) -> str:
    return f"blk.{block}.{part}.weight"


def tensor_bytes(file: GGUFFile, spec: ModelSpec, layers: range, device: Device) -> int:
    """Bytes that the tensors of a shard take on a device: as stored on a GPU, as float32 on the host."""
    wanted = {f"blk.{layer}." for layer in layers}
    names = {name for name in file.tensors if name[: name.find(".", 4) + 1] in wanted}
    if layers.start == 0 or (layers.stop == len(spec.blocks) and spec.tied_head):
        names.add(EMBEDDING)
    if layers.stop == len(spec.blocks):
        names.update(name for name in ("output.weight", "output_norm.weight") if name in file.tensors)
    tensors = [file.tensors[name] for name in names if name in file.tensors]
    if device.host:
        return sum(4 * t.rows * t.cols for t in tensors)
    return sum(t.nbytes for t in tensors)
