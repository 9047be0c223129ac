"""Spec to layers: names the tensors, checks their shapes, allocates the states. Only this module switches over the
parts of a spec."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from luce.errors import UnsupportedError
from luce.gguf.reader import GGUFFile
from luce.layers.attention import AttentionLayer, AttentionWeights, Mirror
from luce.layers.decoder_layer import (
    DecoderLayer,
    Embedding,
    Experts,
    Head,
    Mixer,
    PerLayerMix,
    SandwichDecoderLayer,
)
from luce.layers.deltanet import DeltaNetLayer
from luce.layers.dynamic_conv import DynamicConvLayer
from luce.layers.latent_attention import LatentAttentionLayer, LatentWeights
from luce.layers.mlp import GatedMLPLayer, PlainMLPLayer
from luce.layers.moe import MoELayer
from luce.layers.norm import Norm
from luce.layers.per_layer import PerLayerInputs
from luce.layers.rotary import Rotary
from luce.layers.routed_experts import ExpertOffload, HostRows, OffloadedExperts, RoutedExperts, load_experts
from luce.layers.short_conv import ShortConvLayer
from luce.layers.state import DeltaState, KVPool, StateOptions
from luce.layers.tensors import (
    EMBEDDING,
    PER_LAYER_TABLES,
    head_name,
    shard_tensors,
    table_layers,
    tensor_name,
)
from luce.layers.weight_pool import WeightPool
from luce.layers.weights import WeightLoader
from luce.models import spec as models
from luce.models.shapes import fused_gate_up
from luce.models.spec import (
    Attention,
    DynamicConv,
    GatedDeltaNet,
    GatedMLP,
    Latent,
    Layer,
    ModelSpec,
    MoE,
    PlainMLP,
    Rope,
    ShortConv,
)
from luce.ops.deltanet import DeltaWeights
from luce.ops.page_ranking import NEWEST_QUERIES
from luce.ops.qkv import HeadNorms
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device

#: more than a prompt's chunk and the verified rows of all sequences together
_MOST_ROWS = 1 << 14
_PER_LAYER_PARTS = {
    "inp_gate": "per_layer_inp_gate",
    "proj": "per_layer_proj",
    "post_norm": "per_layer_post_norm",
}


class LayerBuilder:
    """Builds the layers `layers` of one shard. `pool`: as for WeightLoader."""

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        layers: range,
        device: Device,
        states: StateOptions,
        offload: ExpertOffload | None = None,
        pool: WeightPool | None = None,
    ) -> None:
        self._file = file
        self._spec = spec
        self._layers = layers
        self._lent = spec.lent(layers.stop)
        self._device = device
        self._states = states
        self._rotaries: dict[Rope, Rotary] = {}
        self._pools: dict[int, KVPool] = {}
        self._shared_pools: dict[object, KVPool] = {}
        self._numbers: dict[int, Array] = {}
        self.weights = WeightLoader(file, device, pool)
        self._offload = offload
        #: the experts on the CPU; None without
        self.offloaded = None if offload is None else WeightLoader(file, offload.device)
        self._host_rows = HostRows(device)

    def embedding(self) -> Embedding:
        """The token embedding, in the first shard."""
        table = self.weights.table(EMBEDDING, self._spec.hidden, self._spec.vocab)
        return Embedding(self._device, table, self._spec.embedding_scale)

    def head(self) -> Head:
        """The head, in the last shard; a tied head shares the embedding's weight if both are on this GPU."""
        spec, bias = self._spec, "output.bias"
        biases = [(bias, spec.vocab)] if bias in self._file.tensors else []
        weight = self.weights.matrix([head_name(spec)], spec.hidden, [spec.vocab], biases)
        return Head(self._device, self.norm(spec.final_norm), weight, spec.logit_scale, spec.logit_softcap)

    def norm(self, name: str) -> Norm:
        """A norm of rows: `name` is its tensors' without .weight or .bias."""
        spec = self._spec
        bias = self.weights.vector(f"{name}.bias", spec.hidden) if spec.norm_bias else None
        return Norm(self.weights.vector(f"{name}.weight", spec.hidden), spec.norm_eps, bias, spec.norm == "layer")

    def per_layer(self) -> PerLayerInputs:
        """Computes the inputs of the shard's layers from tokens and their embeddings."""
        spec, layers = self._spec, len(self._spec.layers)
        width, name = layers * spec.per_layer, self._stored(*PER_LAYER_TABLES)
        own = table_layers(self._file, spec, self._layers, name)
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

    def layer(self, index: int) -> DecoderLayer | SandwichDecoderLayer:
        """Layer `index` of the spec. Raises UnsupportedError if the file holds tensors of it that the family lacks."""
        spec = self._spec.layers[index]
        built = self._decoder_layer(index, spec) if isinstance(spec, Layer) else self._sandwich(index, spec)
        for name in sorted(shard_tensors(self._file, self._spec, range(index, index + 1), layers_only=True)):
            if name not in self.weights.used and (self.offloaded is None or name not in self.offloaded.used):
                raise UnsupportedError(f"{self._file.paths[0]}: tensor {name} is unknown to family {self._spec.family}")
        return built

    def _decoder_layer(self, index: int, spec: Layer) -> DecoderLayer:
        mixer: Mixer
        if isinstance(spec.mixer, Attention) and spec.mixer.latent is not None:
            mixer = self._latent_attention(index, spec.mixer, spec.mixer.latent)
        elif isinstance(spec.mixer, Attention):
            mixer = self._attention(index, spec.mixer)
        elif isinstance(spec.mixer, ShortConv):
            mixer = self._short_conv(index, spec.mixer)
        else:
            mixer = self._delta_net(index, spec.mixer)
        ffn: GatedMLPLayer | PlainMLPLayer | MoELayer
        if isinstance(spec.ffn, MoE):
            ffn = self._moe(index, spec.ffn)
        elif isinstance(spec.ffn, GatedMLP):
            ffn = self._mlp(index, spec.ffn, "")
        else:
            ffn = self._plain_mlp(index, spec.ffn)
        norms = (spec.mixer_norm, spec.ffn_norm, spec.mixer_post_norm, spec.ffn_post_norm)
        mixer_norm, ffn_norm, mixer_post_norm, ffn_post_norm = (
            None if part is None else self._norm(index, part) for part in norms
        )
        return DecoderLayer(
            mixer_norm,
            mixer,
            ffn_norm,
            ffn,
            mixer_post_norm,
            ffn_post_norm,
            spec.residual_scale,
            spec.parallel,
            None if spec.conv is None else self._dynamic_convs(index, spec.conv),
        )

    def _dynamic_convs(self, index: int, spec: DynamicConv) -> tuple[DynamicConvLayer, DynamicConvLayer]:
        hidden = self._spec.hidden

        def around(part: str) -> DynamicConvLayer:
            return DynamicConvLayer(
                self._device,
                base=self.weights.filters(f"blk.{index}.{part}_conv_base", hidden, spec.taps, 2),
                projection=self.weights.matrix(
                    [tensor_name(index, f"{part}_conv_proj")], hidden, [2 * spec.taps * (hidden // spec.group)]
                ),
            )

        return around("attn"), around("ffn")

    def _sandwich(self, index: int, spec: models.SandwichLayer) -> SandwichDecoderLayer:
        device, width = self._device, self._spec.per_layer
        experts = per_layer = None
        if spec.experts is not None:
            scale = self._values(f"blk.{index}.ffn_gate_inp.scale", self._spec.hidden)
            experts = Experts(
                router_norm=Norm(device.upload(scale * np.float32(self._spec.hidden**-0.5)), self._spec.norm_eps),
                norm=self._norm(index, "pre_ffw_norm_2"),
                moe=self._moe(index, spec.experts),
                dense_post_norm=self._norm(index, "post_ffw_norm_1"),
                post_norm=self._norm(index, "post_ffw_norm_2"),
            )
        if width:
            per_layer = PerLayerMix(
                index=index,
                gate=self.weights.matrix([self._per_layer(index, "inp_gate")], self._spec.hidden, [width]),
                out=self.weights.matrix([self._per_layer(index, "proj")], width, [self._spec.hidden]),
                post_norm=self.norm(self._per_layer(index, "post_norm").removesuffix(".weight")),
                activation=spec.ffn.activation,
            )
        return SandwichDecoderLayer(
            mixer_norm=self._norm(index, "attn_norm"),
            mixer=self._attention(index, spec.mixer),
            mixer_post_norm=self._norm(index, "post_attention_norm"),
            ffn_norm=self._norm(index, "ffn_norm"),
            ffn=self._mlp(index, spec.ffn, ""),
            experts=experts,
            ffn_post_norm=self._norm(index, "post_ffw_norm"),
            per_layer=per_layer,
            scale=float(self._values(tensor_name(index, "layer_output_scale"), 1)[0]),
        )

    def _per_layer(self, index: int, part: str) -> str:
        return self._stored(tensor_name(index, part), tensor_name(index, _PER_LAYER_PARTS[part]))

    def _stored(self, *names: str) -> str:
        """The first of these names that the file has; the first of all if it has none, for the message about it."""
        return next((name for name in names if name in self._file.tensors), names[0])

    def _norm(self, index: int, part: str) -> Norm:
        return self.norm(f"blk.{index}.{part}")

    def _values(self, name: str, size: int) -> NDArray[np.float32]:
        return self._device.download(self.weights.vector(name, size))

    def _attention(self, index: int, spec: Attention) -> AttentionLayer:
        group = self._spec.group_of(index)
        assert group is not None
        if spec.donor is None and index not in self._pools:
            self._pools[index] = self._pool(index, spec)
        return AttentionLayer(
            self._device,
            spec,
            self._attention_weights(index, spec),
            None if spec.rope is None else self._rotary(spec.rope),
            self._pools[index if spec.donor is None else spec.donor],
            group=group,
            lends=index if index in self._lent else None,
            queries=self._newest_queries(index, spec),
        )

    def _pool(self, index: int, spec: Attention | ShortConv) -> KVPool:
        group = self._spec.group_of(index)
        assert group is not None
        pages, kv, hidden = self._states.pages[group], self._states.kv, self._spec.hidden
        if not self._states.one_layer_at_a_time or self._donates(index):
            return KVPool.allocate(self._device, spec, pages, kv, hidden=hidden)
        form = KVPool.form(self._device, spec, kv, hidden=hidden)
        if form not in self._shared_pools:
            self._shared_pools[form] = KVPool.allocate(self._device, spec, pages, kv, hidden=hidden)
        return self._shared_pools[form]

    def _donates(self, index: int) -> bool:
        """Whether later layers read the keys and values of a layer."""
        return any(self._spec.donor(layer) == index for layer in range(len(self._spec.layers)))

    def _newest_queries(self, index: int, spec: Attention) -> Array | None:
        if not self._states.rank_pages or not self._spec.owns_full_pages(index):
            return None
        return self._device.zeros((self._states.slots, NEWEST_QUERIES, spec.heads, spec.head_dim))

    def _latent_attention(self, index: int, spec: Attention, latent: Latent) -> LatentAttentionLayer:
        assert spec.rope is not None
        hidden, turned, heads = self._spec.hidden, spec.rope.dims, spec.heads
        group = self._spec.group_of(index)
        assert group is not None
        width = heads * (latent.plain + turned)
        # A cached row begins with its rotated part, which the file has last.
        cached = (tensor_name(index, "attn_kv_a_mqa"), range(latent.rank, latent.rank + turned), range(latent.rank))
        compressed = [(tensor_name(index, "attn_q_a"), range(latent.query_rank))] if latent.query_rank else []
        query = ("attn_q_b", latent.query_rank) if latent.query_rank else ("attn_q", hidden)
        norm = self.weights.vector(tensor_name(index, "attn_q_a_norm"), latent.query_rank) if compressed else None
        return LatentAttentionLayer(
            self._device,
            spec,
            LatentWeights(
                inputs=self.weights.reordered([*compressed, cached], hidden),
                queries=self.weights.matrix([tensor_name(index, query[0])], query[1], [width]),
                query_norm=norm,
                latent_norm=self.weights.vector(tensor_name(index, "attn_kv_a_norm"), latent.rank),
                to_latent=self.weights.experts([tensor_name(index, "attn_k_b")], latent.plain, [latent.rank], heads),
                from_latent=self.weights.experts([tensor_name(index, "attn_v_b")], latent.rank, [latent.value], heads),
                out=self._projection(index, "attn_output", heads * latent.value, bias=spec.out_bias),
                eps=self._spec.norm_eps,
            ),
            self._rotary(spec.rope),
            self._pool(index, spec),
            group=group,
            heads=self._numbered(heads),
            queries=self._newest_queries(index, spec),
        )

    def _numbered(self, heads: int) -> Array:
        """0, 1, ... in each row, for as many rows as a step has at most."""
        if heads not in self._numbers:
            row = np.arange(heads, dtype=np.int32)
            wide = np.broadcast_to(row, (_MOST_ROWS, heads))
            self._numbers[heads] = wide if self._device.host else self._device.upload(np.ascontiguousarray(wide))
        return self._numbers[heads]

    def _short_conv(self, index: int, spec: ShortConv) -> ShortConvLayer:
        hidden, group = self._spec.hidden, self._spec.group_of(index)
        assert group is not None
        return ShortConvLayer(
            self._device,
            inputs=self.weights.matrix([tensor_name(index, "shortconv.in_proj")], hidden, [3 * hidden]),
            taps=self.weights.filters(tensor_name(index, "shortconv.conv"), spec.kernel, hidden),
            out=self.weights.matrix([tensor_name(index, "shortconv.out_proj")], hidden, [hidden]),
            pool=self._pool(index, spec),
            group=group,
        )

    def _attention_weights(self, index: int, spec: Attention) -> AttentionWeights:
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        parts = {"attn_q": queries * (2 if spec.query_gate else 1)}
        if spec.donor is None:
            parts |= {"attn_k": keys, "attn_k" if spec.value_from_key else "attn_v": keys}
        biased = {**parts} if spec.bias else {}
        fused = "attn_qkv"
        if tensor_name(index, fused) in self._file.tensors:
            # Some converters write queries, keys and values as one tensor, and their biases with it or apart.
            parts = {fused: sum(parts.values())}
            biased = parts if spec.bias and f"blk.{index}.{fused}.bias" in self._file.tensors else biased
        names, rows = [tensor_name(index, part) for part in parts], [*parts.values()]
        if spec.donor is None and spec.value_from_key:
            names.append(tensor_name(index, "attn_k"))
            rows.append(keys)
        if spec.output_gate:
            names.append(tensor_name(index, "attn_gate"))
            rows.append(spec.heads * spec.output_gate)
        eps, heads, whole = self._spec.norm_eps, HeadNorms(), HeadNorms()
        query = key = None
        if spec.qk_norm is not None:
            sizes = (queries, keys) if spec.qk_norm == "whole" else (spec.head_dim, spec.head_dim)
            query = self.weights.vector(tensor_name(index, "attn_q_norm"), sizes[0])
            if spec.donor is None:
                key = self.weights.vector(tensor_name(index, "attn_k_norm"), sizes[1])
        value = self._device.upload(np.ones(spec.head_dim, np.float32)) if spec.value_norm else None
        if spec.qk_norm == "whole":
            heads, whole = HeadNorms(value=value, eps=eps), HeadNorms(query, key, eps=eps)
        else:
            heads = HeadNorms(query, key, value, eps)
        return AttentionWeights(
            inputs=self.weights.matrix(names, self._spec.hidden, rows, _biases(index, biased)),
            out=self._projection(index, "attn_output", queries, bias=spec.out_bias),
            norms=heads,
            whole_norms=whole,
            sinks=self.weights.vector(tensor_name(index, "attn_sinks"), spec.heads) if spec.sinks else None,
        )

    def _projection(self, index: int, part: str, cols: int, *, bias: bool) -> Weight:
        """A matrix back to the residual stream's width."""
        hidden = self._spec.hidden
        biases = _biases(index, {part: hidden} if bias else {})
        return self.weights.matrix([tensor_name(index, part)], cols, [hidden], biases)

    def _grouped_delta_net(self, index: int, spec: GatedDeltaNet) -> DeltaNetLayer:
        """The layer of a file whose value heads are grouped by key head.

        The layer's head p is the file's head order[p], whose rows go there. The columns of ssm_out stay, as a quant
        block may hold those of several heads; results go to them.
        """
        hidden, inner, d, heads = self._spec.hidden, spec.value_heads * spec.head_dim, spec.head_dim, spec.value_heads
        readers = heads // spec.key_heads
        order = np.arange(heads).reshape(spec.key_heads, readers).T.ravel()
        keys, values = 2 * spec.key_heads * d, [range(head * d, (head + 1) * d) for head in order.tolist()]
        alphas, betas = (
            [range(at, at + 1) for at in (order // readers * 2 * readers + order % readers + first).tolist()]
            for first in (readers, 0)
        )
        inputs = self.weights.reordered(
            [
                (tensor_name(index, "attn_qkv"), range(keys), *(range(keys + v.start, keys + v.stop) for v in values)),
                (tensor_name(index, "attn_gate"), *values),
                (tensor_name(index, "ssm_ba"), *alphas, *betas),
            ],
            hidden,
        )
        conv = self._device.download(
            self.weights.filters(tensor_name(index, "ssm_conv1d"), spec.conv_kernel, spec.channels)
        )
        channels = np.concatenate([np.arange(keys), *(keys + np.arange(v.start, v.stop) for v in values)])
        places = np.arange(_MOST_ROWS)[:, None] * heads + np.argsort(order)
        return DeltaNetLayer(
            self._device,
            inputs=inputs,
            out=self.weights.matrix([tensor_name(index, "ssm_out")], inner, [hidden]),
            weights=DeltaWeights(
                conv=self._device.upload(np.ascontiguousarray(conv[channels])),
                decay=self._device.upload(self._values(f"blk.{index}.ssm_a", heads)[order]),
                dt_bias=self._device.upload(self._values(f"blk.{index}.ssm_dt.bias", heads)[order]),
                norm=self.weights.vector(tensor_name(index, "ssm_norm"), d),
                eps=self._spec.norm_eps,
                key_heads=spec.key_heads,
            ),
            state=DeltaState.allocate(self._device, spec, self._states.slots, self._states.verify_rows),
            places=self._device.upload(places.astype(np.int32)),
        )

    def _delta_net(self, index: int, spec: GatedDeltaNet) -> DeltaNetLayer:
        if spec.grouped:
            return self._grouped_delta_net(index, spec)
        hidden, inner, heads = self._spec.hidden, spec.value_heads * spec.head_dim, spec.value_heads
        names = [tensor_name(index, part) for part in ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta")]
        return DeltaNetLayer(
            self._device,
            inputs=self.weights.matrix(names, hidden, [spec.channels, inner, heads, heads]),
            out=self.weights.matrix([tensor_name(index, "ssm_out")], inner, [hidden]),
            weights=DeltaWeights(
                conv=self.weights.filters(tensor_name(index, "ssm_conv1d"), spec.conv_kernel, spec.channels),
                decay=self.weights.vector(f"blk.{index}.ssm_a", heads),
                dt_bias=self.weights.vector(f"blk.{index}.ssm_dt.bias", heads),
                norm=self.weights.vector(tensor_name(index, "ssm_norm"), spec.head_dim),
                eps=self._spec.norm_eps,
                key_heads=spec.key_heads,
            ),
            state=DeltaState.allocate(self._device, spec, self._states.slots, self._states.verify_rows),
        )

    def _mlp(self, index: int, spec: GatedMLP, suffix: str) -> GatedMLPLayer:
        parts = {"ffn_gate" + suffix: spec.hidden, "ffn_up" + suffix: spec.hidden}
        if fused_gate_up(self._file.tensors, index, spec.hidden, suffix):
            parts = {"ffn_up" + suffix: 2 * spec.hidden}
        biases = _biases(index, parts if spec.bias else {})
        names = [tensor_name(index, part) for part in parts]
        return GatedMLPLayer(
            self._device,
            spec,
            gate_up=self.weights.matrix(names, self._spec.hidden, [*parts.values()], biases),
            down=self._projection(index, "ffn_down" + suffix, spec.hidden, bias=spec.bias),
        )

    def _plain_mlp(self, index: int, spec: PlainMLP) -> PlainMLPLayer:
        biases = _biases(index, {"ffn_up": spec.hidden} if spec.bias else {})
        return PlainMLPLayer(
            self._device,
            up=self.weights.matrix([tensor_name(index, "ffn_up")], self._spec.hidden, [spec.hidden], biases),
            down=self._projection(index, "ffn_down", spec.hidden, bias=spec.bias),
        )

    def _moe(self, index: int, spec: MoE) -> MoELayer:
        hidden = self._spec.hidden
        routers = {"ffn_gate_inp": spec.experts}
        biases = _biases(index, routers if spec.biases else {})
        if spec.shared_gate:
            routers["ffn_gate_inp_shexp"] = 1
        bias = self.weights.vector(f"blk.{index}.exp_probs_b.bias", spec.experts) if spec.bias else None
        expert_scale = (
            self.weights.vector(f"blk.{index}.ffn_down_exps.scale", spec.experts) if spec.expert_scale else None
        )
        names = [tensor_name(index, part) for part in routers]
        experts: RoutedExperts | OffloadedExperts
        if self._offload is not None and self.offloaded is not None and index in self._offload.layers:
            routed = load_experts(self._file, self.offloaded, self._offload.device, index, spec, hidden)
            experts = OffloadedExperts(self._device, routed, self._host_rows)
        else:
            experts = load_experts(self._file, self.weights, self._device, index, spec, hidden)
        return MoELayer(
            self._device,
            spec,
            bias=bias,
            expert_scale=expert_scale,
            router=self.weights.matrix(names, hidden, [*routers.values()], biases),
            experts=experts,
            shared=self._mlp(index, GatedMLP(spec.shared, spec.activation), "_shexp") if spec.shared else None,
        )

    def _rotary(self, spec: Rope) -> Rotary:
        if spec not in self._rotaries:
            factors = None
            if spec.factors is not None:
                factors = self._values(spec.factors, spec.dims // 2)
            self._rotaries[spec] = Rotary(self._device, spec, factors)
        return self._rotaries[spec]


def _biases(layer: int, parts: Mapping[str, int]) -> list[tuple[str, int]]:
    return [(f"blk.{layer}.{part}.bias", size) for part, size in parts.items()]
