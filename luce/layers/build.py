"""Spec to layers: names the tensors, checks their shapes, allocates the states. Only this module switches over the
parts of a spec."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from luce.errors import UnsupportedError
from luce.gguf.quants import block_size
from luce.gguf.reader import GGUFFile, TensorInfo
from luce.layers.attention import AttentionLayer, AttentionWeights, Mirror
from luce.layers.decoder_layer import Embedding, Experts, Head, PerLayerMix, PreNormDecoderLayer, SandwichDecoderLayer
from luce.layers.deltanet import DeltaNetLayer
from luce.layers.mlp import GatedMLPLayer
from luce.layers.moe import MoELayer
from luce.layers.per_layer import PerLayerInputs
from luce.layers.rotary import Rotary
from luce.layers.state import DeltaState, KVPool, StateOptions
from luce.layers.weights import WeightLoader
from luce.models import spec as models
from luce.models.spec import Attention, GatedDeltaNet, GatedMLP, Layer, ModelSpec, MoE, Rope
from luce.ops.deltanet import DeltaWeights
from luce.ops.page_ranking import NEWEST_QUERIES
from luce.ops.qkv import HeadNorms
from luce.ops.weight import stored_bytes
from luce.runtime.device import Array, Device

EMBEDDING = "token_embd.weight"
#: the table of per-layer embeddings; files with the second name also have other names for the layers' parts of it
_PER_LAYER_TABLES = ("per_layer_token_embd.weight", "per_layer_tok_embd.weight")
_PER_LAYER_PARTS = {
    "inp_gate": "per_layer_inp_gate",
    "proj": "per_layer_proj",
    "post_norm": "per_layer_post_norm",
}


class LayerBuilder:
    """Builds the layers `layers` of one shard."""

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        layers: range,
        device: Device,
        states: StateOptions,
    ) -> None:
        self._file = file
        self._spec = spec
        self._layers = layers
        self._lent = spec.lent(layers.stop)
        self._device = device
        self._states = states
        self._rotaries: dict[Rope, Rotary] = {}
        self._pools: dict[int, KVPool] = {}
        self.weights = WeightLoader(file, device)

    def embedding(self) -> Embedding:
        """The token embedding, in the first shard."""
        table = self.weights.table(EMBEDDING, self._spec.hidden, self._spec.vocab)
        return Embedding(self._device, table, self._spec.embedding_scale)

    def head(self) -> Head:
        """The head, in the last shard; a tied head shares the embedding's weight if both are on this GPU."""
        norm = self.weights.vector("output_norm.weight", self._spec.hidden)
        name = EMBEDDING if self._spec.tied_head else "output.weight"
        weight = self.weights.matrix([name], self._spec.hidden, [self._spec.vocab])
        return Head(self._device, norm, weight, self._spec.norm_eps, self._spec.logit_softcap)

    def per_layer(self) -> PerLayerInputs:
        """Computes the inputs of the shard's layers from tokens and their embeddings."""
        spec, layers = self._spec, len(self._spec.layers)
        width, name = layers * spec.per_layer, self._stored(*_PER_LAYER_TABLES)
        own = _table_layers(self._file, spec, self._layers, name)
        columns = range(own.start * spec.per_layer, own.stop * spec.per_layer)
        return PerLayerInputs(
            self._device,
            layers=layers,
            own=own,
            table=self.weights.table(name, width, spec.vocab, columns),
            projection=self.weights.matrix(["per_layer_model_proj.weight"], spec.hidden, [width]),
            norm=self.weights.vector("per_layer_proj_norm.weight", spec.per_layer),
            eps=spec.norm_eps,
        )

    def mirror(self, donor: int) -> Mirror:
        """The keys and values of a layer of another shard. To be built before the layers that borrow them."""
        spec, group = self._spec.layers[donor].mixer, self._spec.group_of(donor)
        assert isinstance(spec, Attention) and group is not None
        pool = self._pools[donor] = KVPool.allocate(self._device, spec, self._states.pages[group], self._states.kv)
        return Mirror(self._device, donor, spec, pool=pool, group=group)

    def layer(self, index: int) -> PreNormDecoderLayer | SandwichDecoderLayer:
        """Layer `index` of the spec. Raises UnsupportedError if the file holds tensors of it that the family lacks."""
        spec = self._spec.layers[index]
        built = self._pre_norm(index, spec) if isinstance(spec, Layer) else self._sandwich(index, spec)
        for name in sorted(shard_tensors(self._file, self._spec, range(index, index + 1), layers_only=True)):
            if name not in self.weights.used:
                raise UnsupportedError(f"{self._file.paths[0]}: tensor {name} is unknown to family {self._spec.family}")
        return built

    def _pre_norm(self, index: int, spec: Layer) -> PreNormDecoderLayer:
        mixer: AttentionLayer | DeltaNetLayer
        if isinstance(spec.mixer, Attention):
            mixer = self._attention(index, spec.mixer)
        else:
            mixer = self._delta_net(index, spec.mixer)
        ffn: GatedMLPLayer | MoELayer
        ffn = self._moe(index, spec.ffn) if isinstance(spec.ffn, MoE) else self._mlp(index, spec.ffn, "")
        return PreNormDecoderLayer(
            mixer_norm=self._hidden(index, spec.mixer_norm),
            mixer=mixer,
            ffn_norm=self._hidden(index, spec.ffn_norm),
            ffn=ffn,
            eps=self._spec.norm_eps,
        )

    def _sandwich(self, index: int, spec: models.SandwichLayer) -> SandwichDecoderLayer:
        device, width = self._device, self._spec.per_layer
        experts = per_layer = None
        if spec.experts is not None:
            scale = self._values(f"blk.{index}.ffn_gate_inp.scale", self._spec.hidden)
            experts = Experts(
                router_norm=device.upload(scale * np.float32(self._spec.hidden**-0.5)),
                norm=self._hidden(index, "pre_ffw_norm_2"),
                moe=self._moe(index, spec.experts),
                dense_post_norm=self._hidden(index, "post_ffw_norm_1"),
                post_norm=self._hidden(index, "post_ffw_norm_2"),
            )
        if width:
            per_layer = PerLayerMix(
                index=index,
                gate=self.weights.matrix([self._per_layer(index, "inp_gate")], self._spec.hidden, [width]),
                out=self.weights.matrix([self._per_layer(index, "proj")], width, [self._spec.hidden]),
                post_norm=self.weights.vector(self._per_layer(index, "post_norm"), self._spec.hidden),
                activation=spec.ffn.activation,
            )
        return SandwichDecoderLayer(
            mixer_norm=self._hidden(index, "attn_norm"),
            mixer=self._attention(index, spec.mixer),
            mixer_post_norm=self._hidden(index, "post_attention_norm"),
            ffn_norm=self._hidden(index, "ffn_norm"),
            ffn=self._mlp(index, spec.ffn, ""),
            experts=experts,
            ffn_post_norm=self._hidden(index, "post_ffw_norm"),
            per_layer=per_layer,
            scale=float(self._values(_name(index, "layer_output_scale"), 1)[0]),
            eps=self._spec.norm_eps,
        )

    def _per_layer(self, index: int, part: str) -> str:
        return self._stored(_name(index, part), _name(index, _PER_LAYER_PARTS[part]))

    def _stored(self, *names: str) -> str:
        """The first of these names that the file has; the first of all if it has none, for the message about it."""
        return next((name for name in names if name in self._file.tensors), names[0])

    def _hidden(self, index: int, part: str) -> Array:
        return self.weights.vector(_name(index, part), self._spec.hidden)

    def _values(self, name: str, size: int) -> NDArray[np.float32]:
        return self._device.download(self.weights.vector(name, size))

    def _attention(self, index: int, spec: Attention) -> AttentionLayer:
        hidden, kv = self._spec.hidden, spec.kv_heads * spec.head_dim
        queries = spec.heads * spec.head_dim
        names = [_name(index, "attn_q")]
        rows = [queries * (2 if spec.query_gate else 1)]
        if spec.donor is None:
            names += [_name(index, "attn_k"), _name(index, "attn_k" if spec.value_from_key else "attn_v")]
            rows += [kv, kv]
        if spec.output_gate:
            names.append(_name(index, "attn_gate"))
            rows.append(spec.heads * spec.output_gate)
        query = key = value = None
        if spec.qk_norm:
            query = self.weights.vector(_name(index, "attn_q_norm"), spec.head_dim)
            if spec.donor is None:
                key = self.weights.vector(_name(index, "attn_k_norm"), spec.head_dim)
        if spec.value_norm:
            value = self._device.upload(np.ones(spec.head_dim, np.float32))
        group = self._spec.group_of(index)
        assert group is not None
        if spec.donor is None:
            self._pools[index] = KVPool.allocate(self._device, spec, self._states.pages[group], self._states.kv)
        newest = None
        if self._states.rank_pages and self._spec.owns_full_pages(index):
            newest = self._device.zeros((self._states.slots, NEWEST_QUERIES, spec.heads, spec.head_dim))
        return AttentionLayer(
            self._device,
            spec,
            AttentionWeights(
                inputs=self.weights.matrix(names, hidden, rows),
                out=self.weights.matrix([_name(index, "attn_output")], queries, [hidden]),
                norms=HeadNorms(query, key, value, self._spec.norm_eps),
            ),
            self._rotary(spec.rope),
            self._pools[index if spec.donor is None else spec.donor],
            group=group,
            lends=index if index in self._lent else None,
            queries=newest,
        )

    def _delta_net(self, index: int, spec: GatedDeltaNet) -> DeltaNetLayer:
        hidden, inner, heads = self._spec.hidden, spec.value_heads * spec.head_dim, spec.value_heads
        names = [_name(index, part) for part in ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta")]
        return DeltaNetLayer(
            self._device,
            inputs=self.weights.matrix(names, hidden, [spec.channels, inner, heads, heads]),
            out=self.weights.matrix([_name(index, "ssm_out")], inner, [hidden]),
            weights=DeltaWeights(
                conv=self.weights.filters(_name(index, "ssm_conv1d"), spec.conv_kernel, spec.channels),
                decay=self.weights.vector(f"blk.{index}.ssm_a", heads),
                dt_bias=self.weights.vector(f"blk.{index}.ssm_dt.bias", heads),
                norm=self.weights.vector(_name(index, "ssm_norm"), spec.head_dim),
                eps=self._spec.norm_eps,
                key_heads=spec.key_heads,
            ),
            state=DeltaState.allocate(self._device, spec, self._states.slots, self._states.verify_rows),
        )

    def _mlp(self, index: int, spec: GatedMLP, suffix: str) -> GatedMLPLayer:
        hidden = self._spec.hidden
        names = [_name(index, "ffn_gate" + suffix), _name(index, "ffn_up" + suffix)]
        return GatedMLPLayer(
            self._device,
            spec,
            gate_up=self.weights.matrix(names, hidden, [spec.hidden, spec.hidden]),
            down=self.weights.matrix([_name(index, "ffn_down" + suffix)], spec.hidden, [hidden]),
        )

    def _moe(self, index: int, spec: MoE) -> MoELayer:
        hidden, experts = self._spec.hidden, spec.experts
        routers, outputs = [_name(index, "ffn_gate_inp")], [experts]
        if spec.shared_gate:
            routers.append(_name(index, "ffn_gate_inp_shexp"))
            outputs.append(1)
        # Some converters write gate and up as one tensor, gate rows first.
        names, rows = [_name(index, "ffn_gate_up_exps")], [2 * spec.hidden]
        if names[0] not in self._file.tensors:
            names = [_name(index, "ffn_gate_exps"), _name(index, "ffn_up_exps")]
            rows = [spec.hidden, spec.hidden]
        bias = self.weights.vector(f"blk.{index}.exp_probs_b.bias", experts) if spec.bias else None
        expert_scale = self.weights.vector(f"blk.{index}.ffn_down_exps.scale", experts) if spec.expert_scale else None
        return MoELayer(
            self._device,
            spec,
            bias=bias,
            expert_scale=expert_scale,
            router=self.weights.matrix(routers, hidden, outputs),
            gate_up=self.weights.experts(names, hidden, rows, experts),
            down=self.weights.experts([_name(index, "ffn_down_exps")], spec.hidden, [hidden], experts),
            shared=self._mlp(index, GatedMLP(spec.shared, spec.activation), "_shexp") if spec.shared else None,
        )

    def _rotary(self, spec: Rope) -> Rotary:
        if spec not in self._rotaries:
            factors = None
            if spec.factors is not None:
                factors = self._values(spec.factors, spec.dims // 2)
            self._rotaries[spec] = Rotary(self._device, spec, factors)
        return self._rotaries[spec]


def _name(layer: int, part: str) -> str:
    return f"blk.{layer}.{part}.weight"


def shard_tensors(file: GGUFFile, spec: ModelSpec, layers: range, *, layers_only: bool = False) -> set[str]:
    """Names of the tensors that a shard of these layers reads, as LayerBuilder does.

    Without `layers_only` also the tensors outside layers: the embedding before the first layer, the head behind the
    last, and in every shard the tables of per-layer embeddings and the divisors of rotary frequencies.
    """
    wanted = {f"blk.{layer}." for layer in layers}
    names = {name for name in file.tensors if name[: name.find(".", 4) + 1] in wanted}
    for layer in layers:
        names -= _unused(spec, layer)
    if not layers_only:
        named = {EMBEDDING} if layers.start == 0 else set()
        if layers.stop == len(spec.layers):
            named |= {"output_norm.weight", EMBEDDING if spec.tied_head else "output.weight"}
        if spec.per_layer:
            named |= {*_PER_LAYER_TABLES, "per_layer_model_proj.weight", "per_layer_proj_norm.weight"}
        mixers = (spec.layers[layer].mixer for layer in layers)
        named |= {m.rope.factors for m in mixers if isinstance(m, Attention) and m.rope.factors is not None}
        names |= named & file.tensors.keys()
    return names


def tensor_bytes(file: GGUFFile, spec: ModelSpec, layers: range, device: Device, *, layers_only: bool = False) -> int:
    """Bytes that the tensors of a shard take on a device: as stored on a GPU, as float32 on the host.

    On the host the embedding tables stay in quant blocks. `layers_only` as for shard_tensors, except that a layer's
    columns of the per-layer table count with the layer.
    """
    names = shard_tensors(file, spec, layers, layers_only=layers_only)
    table = 0
    if device.host:
        head = spec.tied_head and layers.stop == len(spec.layers)
        table = file.tensors[EMBEDDING].nbytes if EMBEDDING in names and layers.start == 0 else 0
        names -= set() if head else {EMBEDDING}
    infos = [file.tensors[name] for name in names - {*_PER_LAYER_TABLES}]
    # Keys that serve as values too are stored twice.
    mixers = ((layer, spec.layers[layer].mixer) for layer in layers)
    keys = {_name(layer, "attn_k") for layer, m in mixers if isinstance(m, Attention) and m.value_from_key}
    infos += [file.tensors[name] for name in keys & names]
    columns = sum(
        (file.tensors[name].nbytes if device.host else stored_bytes(file.tensors[name]))
        * len(_table_layers(file, spec, layers, name))
        // len(spec.layers)
        for name in _PER_LAYER_TABLES
        if spec.per_layer and name in file.tensors
    )
    return table + columns + placed_bytes(infos, device)


def placed_bytes(infos: Iterable[TensorInfo], device: Device) -> int:
    """Bytes that tensors take on a device: as stored on a GPU, as float32 on the host."""
    return sum(4 * info.rows * info.cols if device.host else stored_bytes(info) for info in infos)


def head_bytes(file: GGUFFile, spec: ModelSpec, device: Device) -> int:
    """Bytes of the embedding and the head on one device."""
    names = {"output_norm.weight", EMBEDDING if spec.tied_head else "output.weight"}
    return placed_bytes([file.tensors[name] for name in names | (set() if device.host else {EMBEDDING})], device)


def _table_layers(file: GGUFFile, spec: ModelSpec, layers: range, name: str) -> range:
    """The layers whose columns of the per-layer table `name` a shard has: its own, and layers that share quant blocks
    with them.

    All layers if the file lacks the table; building then reports that.
    """
    if name not in file.tensors:
        return range(len(spec.layers))
    elements, _ = block_size(file.tensors[name].type)
    step = elements // math.gcd(elements, spec.per_layer)
    return range(layers.start // step * step, min(-(-layers.stop // step) * step, len(spec.layers)))


def _unused(spec: ModelSpec, layer: int) -> set[str]:
    """Tensors of a layer that are not read: some files contain the projections with which a borrowing layer was
    trained."""
    return set() if spec.donor(layer) is None else {_name(layer, part) for part in ("attn_k", "attn_v", "attn_k_norm")}
