"""Spec to layers: names the tensors, checks their shapes, allocates the states. Only this module switches over the
parts of a spec."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from luce.errors import UnsupportedError
from luce.gguf.reader import GGUFFile
from luce.layers.altup import AltUp, AltUpDecoderLayer, Laurel, StreamMaps
from luce.layers.attention import AttentionLayer, AttentionWeights, Mirror
from luce.layers.build_deltanet import MOST_ROWS, delta_net
from luce.layers.decoder_layer import (
    DecoderLayer,
    Embedding,
    Experts,
    Head,
    Mixer,
    PerLayerMix,
    SandwichDecoderLayer,
)
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
    GatedMLP,
    Latent,
    Layer,
    ModelSpec,
    MoE,
    PlainMLP,
    Rope,
    ShortConv,
)
from luce.ops.page_ranking import NEWEST_QUERIES
from luce.ops.qkv import HeadNorms
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device

AnyDecoderLayer = DecoderLayer | SandwichDecoderLayer | AltUpDecoderLayer

_PER_LAYER_PARTS = {
    "inp_gate": "per_layer_inp_gate",
    "proj": "per_layer_proj",
    "post_norm": "per_layer_post_norm",
}


class LayerBuilder:
    """Builds the layers `layers` of one shard. `pool`, `int8`: as for WeightLoader."""

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        layers: range,
        device: Device,
        states: StateOptions,
        offload: ExpertOffload | None = None,
        pool: WeightPool | None = None,
        *,
        int8: bool = False,
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
        self.weights = WeightLoader(file, device, pool, int8=int8)
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
        join = self._maps("altup_unembd_proj.weight").join if spec.streams > 1 else None
        return Head(self._device, self.norm(spec.final_norm), weight, spec.logit_scale, spec.logit_softcap, join)

    def split(self) -> StreamMaps:
        """Makes the copies of the stream, in the first shard of a model that keeps some."""
        return self._maps("altup_proj.weight")

    def _maps(self, name: str) -> StreamMaps:
        hidden, copies = self._spec.hidden, self._spec.streams - 1
        weight = self.weights.experts([name], hidden, [hidden], copies)
        return StreamMaps(self._device, weight, self._numbered(copies))

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

    def layer(self, index: int) -> AnyDecoderLayer:
        """Layer `index` of the spec. Raises UnsupportedError if the file holds tensors of it that the family lacks."""
        spec = self._spec.layers[index]
        built: AnyDecoderLayer
        if isinstance(spec, Layer):
            built = self._decoder_layer(index, spec)
        else:
            built = self._sandwich(index, spec) if isinstance(spec, models.SandwichLayer) else self._altup(index, spec)
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
            state = DeltaState.allocate(self._device, spec.mixer, self._states.slots, self._states.verify_rows)
            mixer = delta_net(self._device, self.weights, self._spec, index, spec.mixer, state)
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
            per_layer = self._per_layer_mix(index, spec.ffn)
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

    def _altup(self, index: int, spec: models.AltUpLayer) -> AltUpDecoderLayer:
        device, weights, hidden, streams = self._device, self.weights, self._spec.hidden, self._spec.streams
        router_norm = self._values(tensor_name(index, "altup_router_norm"), hidden) / np.float32(hidden)
        return AltUpDecoderLayer(
            altup=AltUp(
                router_norm=Norm(device.upload(router_norm), self._spec.norm_eps),
                router=weights.matrix([tensor_name(index, "altup_router")], hidden, [streams]),
                predict=weights.filters(tensor_name(index, "altup_predict_coef"), streams, streams**2),
                correct=weights.filters(tensor_name(index, "altup_correct_coef"), streams, streams),
                scale=weights.vector(tensor_name(index, "altup_correct_scale"), hidden),
            ),
            laurel=Laurel(
                left=weights.matrix([tensor_name(index, "laurel_l")], hidden, [spec.laurel]),
                right=weights.matrix([tensor_name(index, "laurel_r")], spec.laurel, [hidden]),
                post_norm=self._norm(index, "laurel_post_norm"),
            ),
            mixer_norm=self._norm(index, "attn_norm"),
            mixer=self._attention(index, spec.mixer),
            mixer_post_norm=self._norm(index, "post_attention_norm"),
            ffn_norm=self._norm(index, "ffn_norm"),
            ffn=self._mlp(index, spec.ffn, ""),
            ffn_post_norm=self._norm(index, "post_ffw_norm"),
            per_layer=self._per_layer_mix(index, spec.ffn),
        )

    def _per_layer_mix(self, index: int, ffn: GatedMLP) -> PerLayerMix:
        hidden, width = self._spec.hidden, self._spec.per_layer
        return PerLayerMix(
            index=index,
            gate=self.weights.matrix([self._per_layer(index, "inp_gate")], hidden, [width]),
            out=self.weights.matrix([self._per_layer(index, "proj")], width, [hidden]),
            post_norm=self.norm(self._per_layer(index, "post_norm").removesuffix(".weight")),
            activation=ffn.activation,
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
            wide = np.broadcast_to(row, (MOST_ROWS, heads))
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
        router = self.weights.matrix(names, hidden, [*routers.values()], biases)
        before = self.weights.invariant_rows
        layer = MoELayer(
            self._device,
            spec,
            bias=bias,
            expert_scale=expert_scale,
            router=router,
            experts=experts,
            shared=self._mlp(index, GatedMLP(spec.shared, spec.activation), "_shexp") if spec.shared else None,
        )
        # As one more expert, the shared MLP's matrices are not multiplied by themselves.
        rows = before if layer.shared_joins else self.weights.invariant_rows
        self.weights.invariant_rows = min(rows, layer.invariant_rows)
        return layer

    def _rotary(self, spec: Rope) -> Rotary:
        if spec not in self._rotaries:
            names = spec.factors, spec.long_factors
            factors = [None if name is None else self._values(name, spec.dims // 2) for name in names]
            self._rotaries[spec] = Rotary(self._device, spec, *factors)
        return self._rotaries[spec]


def _biases(layer: int, parts: Mapping[str, int]) -> list[tuple[str, int]]:
    return [(f"blk.{layer}.{part}.bias", size) for part, size in parts.items()]
