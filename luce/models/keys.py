"""Reads a family's metadata keys; builds the parts of a spec that several families describe with the same keys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from luce.errors import UnsupportedError
from luce.gguf.metadata import Metadata, shown
from luce.gguf.reader import TensorInfo
from luce.models.spec import (
    AnyLayer,
    Attention,
    GatedMLP,
    Gating,
    LongContext,
    ModelSpec,
    MoE,
    Rope,
    Temperature,
    Yarn,
)

# Far above real models. It bounds the work for a hostile file with many small tensors.
_MOST_LAYERS = 1024


@dataclass(frozen=True)
class Source:
    """The part of a file that a family reads: its metadata and the names, shapes and types of its tensors."""

    path: str
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return self.metadata.string("general.architecture")

    def key(self, name: str) -> str:
        """`block_count` is `qwen35.block_count` in a qwen35 file."""
        return f"{self.architecture}.{name}"

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer of the architecture's own keys, required without a default."""
        key = self.key(name)
        return self.metadata.integer(key) if default is None else self.metadata.integer(key, default=default)

    def number(self, name: str, default: float | None = None) -> float:
        """A number of the architecture's own keys, required without a default."""
        key = self.key(name)
        return self.metadata.number(key) if default is None else self.metadata.number(key, default=default)

    def above(self, name: str, default: float | None = None, *, least: float = 0.0) -> float:
        """A finite number above `least`; others are refused."""
        value = self.number(name, default)
        if not least < value < math.inf:
            raise self.refuse(name, f"is {value:g}, expected a finite number above {least:g}")
        return value

    def positive(self, name: str, default: int | None = None) -> int:
        """An integer of at least 1; others are refused."""
        value = self.integer(name, default)
        if value < 1:
            raise self.refuse(name, f"is {value}, expected at least 1")
        return value

    def stored_layers(self) -> int:
        """`block_count`, which the tensors must confirm: a family makes a spec of every layer."""
        count = self.positive("block_count")
        if count > _MOST_LAYERS:
            raise self.refuse("block_count", f"is {count}, expected at most {_MOST_LAYERS}")
        found = {name.split(".", 2)[1] for name in self.tensors if name.startswith("blk.")}
        missing = next((layer for layer in range(count) if str(layer) not in found), None)
        if missing is not None:
            raise UnsupportedError(
                f"{self.path}: tensor blk.{missing}.attn_norm.weight is missing: {self.key('block_count')} is {count}"
            )
        return count

    def per_layer(self, name: str, layers: int, *, least: int = 1) -> list[int]:
        """An integer of at least `least` for each layer: an array in the file, or one positive value for all."""
        value = self.metadata.get(self.key(name))
        if not isinstance(value, list | tuple):
            return [self.positive(name)] * layers
        values = self.metadata.integers(self.key(name))
        if len(values) != layers or min(values) < least:
            kind = "positive numbers" if least == 1 else f"numbers of at least {least}"
            raise self.refuse(name, f"must be {layers} {kind}, one for each layer")
        return values

    def flag(self, name: str, default: bool) -> bool:
        """A boolean of the architecture's own keys."""
        return self.metadata.boolean(self.key(name), default=default)

    def biased(self, *parts: str) -> bool:
        """Whether the file has a bias for one of these parts of a layer."""
        return any(f"blk.0.{part}.bias" in self.tensors for part in parts)

    def refuse(self, name: str, why: str) -> UnsupportedError:
        """The error for a key whose value Luce does not support."""
        return UnsupportedError(f"{self.path}: {self.key(name)} {why}")

    def vocabulary(self) -> int:
        """Rows of the embedding table."""
        table = self.tensors.get("token_embd.weight")
        if table is None:
            raise UnsupportedError(f"{self.path}: tensor token_embd.weight is missing")
        return table.rows


def model(
    source: Source,
    family: str,
    layers: Sequence[AnyLayer],
    *,
    eps: str = "attention.layer_norm_rms_epsilon",
) -> ModelSpec:
    """A model of these layers, with the fields that all families read from the same keys; a family replaces others.

    `eps` is the key of the norms' epsilon.
    """
    return ModelSpec(
        family=family,
        hidden=source.positive("embedding_length"),
        vocab=source.vocabulary(),
        context_length=read_context(source),
        norm_eps=source.number(eps),
        layers=tuple(layers),
        skipped_layers=tuple(range(len(layers), source.stored_layers())),
        tied_head="output.weight" not in source.tensors,
        long_context=read_long_context(source),
    )


@dataclass(frozen=True)
class Heads:
    """heads, kv_heads and head_dim of full attention."""

    heads: int
    kv_heads: int
    head_dim: int


def attention_heads(source: Source) -> Heads:
    """Head counts and size of full attention; key and value heads must have the same size."""
    heads = source.positive("attention.head_count")
    kv_heads = source.positive("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise source.refuse("attention.head_count", f"is {heads}, not a multiple of the {kv_heads} KV heads")
    head_dim = source.positive("attention.key_length", max(1, source.positive("embedding_length") // heads))
    value_dim = source.positive("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise source.refuse("attention.value_length", f"is {value_dim}, but attention.key_length is {head_dim}")
    return Heads(heads, kv_heads, head_dim)


def rope_dims(source: Source, head_dim: int) -> int:
    """Rotated elements of a head: even, at most the whole head."""
    dims = source.positive("rope.dimension_count", head_dim)
    if dims % 2 or dims > head_dim:
        raise source.refuse("rope.dimension_count", f"is {dims}, expected an even number up to {head_dim}")
    return dims


def read_attention(source: Source, rope: Rope | None) -> Attention:
    """Attention of these heads with `attention.scale`, and biases where the file has them; a family replaces others."""
    heads = attention_heads(source)
    return Attention(
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        rope=rope,
        scale=source.number("attention.scale", 0.0) or heads.head_dim**-0.5,
        bias=source.biased("attn_q", "attn_qkv"),
        out_bias=source.biased("attn_output"),
    )


def refuse_norms_of_each_head(source: Source) -> None:
    """Refuses LayerNorms of query and key heads whose weight is another one for each head."""
    name = "blk.0.attn_q_norm.weight"
    if name in source.tensors:
        raise UnsupportedError(f"{source.path}: {name}: Luce has no code for LayerNorms of query and key heads")


def read_mlp(source: Source) -> GatedMLP:
    """A dense MLP, with biases where the file has them."""
    return GatedMLP(source.positive("feed_forward_length"), bias=source.biased("ffn_up"))


def read_rope(source: Source, *, base: float = 10000.0, adjacent: bool = False) -> Rope:
    """read_rope_of for the heads of attention_heads."""
    return read_rope_of(source, attention_heads(source).head_dim, base=base, adjacent=adjacent)


def read_rope_of(source: Source, head_dim: int, *, base: float, adjacent: bool = False) -> Rope:
    """The rotation of full attention, with every scaling of the context that files describe.

    Divisors: `rope_freqs.weight` (Llama 3), or with LongRoPE (Ding et al., arXiv 2402.13753) the short ones, which hold
    up to the original context (read_context); ModelSpec.for_context puts the long ones beside them.
    """
    kind = source.metadata.string(source.key("rope.scaling.type"), default="none")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise source.refuse("rope.scaling.type", f"is {shown(kind)}, expected none, linear, yarn or longrope")
    short = "rope_factors_short.weight"
    if kind == "longrope" and short not in source.tensors:
        raise source.refuse("rope.scaling.type", f"is {shown(kind)}, but tensor {short} is missing")
    factors = next((name for name in (short, "rope_freqs.weight") if name in source.tensors), None)
    return Rope(
        dims=rope_dims(source, head_dim),
        base=source.above("rope.freq_base", base, least=1.0),
        adjacent=adjacent,
        factors=factors,
        linear=source.above("rope.scaling.factor", 1.0) if kind == "linear" else 1.0,
        yarn=read_yarn(source) if kind == "yarn" else None,
        magnitude=source.above("rope.scaling.attn_factor", 1.0),
    )


def read_yarn(source: Source) -> Yarn:
    """YaRN. The stored yarn_attn_factor and yarn_ext_factor are ignored: published files of one model disagree in
    them."""
    return Yarn(
        factor=source.above("rope.scaling.factor"),
        original_context=source.positive("rope.scaling.original_context_length"),
        beta_fast=source.above("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=source.above("rope.scaling.yarn_beta_slow", 1.0),
        log_multiplier=source.number("rope.scaling.yarn_log_multiplier", 0.0),
    )


def read_temperature(source: Source) -> Temperature | None:
    """The temperature of queries; by default it rises with the context before YaRN."""
    scale = source.number("attention.temperature_scale", 0.0)
    if not scale:
        return None
    length = source.integer("attention.temperature_length", 0)
    return Temperature(scale, length or source.positive("rope.scaling.original_context_length"))


def read_context(source: Source) -> int:
    """The positions for which one set of rotary frequencies holds: with LongRoPE those before the stretching."""
    context = source.positive("context_length")
    if "rope_factors_short.weight" in source.tensors:
        return min(context, source.positive("rope.scaling.original_context_length", context))
    return context


def read_long_context(source: Source) -> LongContext | None:
    """The context behind that of read_context, of a file that has LongRoPE's divisors for it."""
    original, length, factors = read_context(source), source.positive("context_length"), "rope_factors_long.weight"
    has_more = factors in source.tensors and length > original
    return LongContext(original, length, factors) if has_more else None


def sliding_layers(source: Source, layers: int, period: int) -> list[bool]:
    """Whether each layer slides: as `attention.sliding_window_pattern` says, a flag for each layer or a period of which
    the last layer does not slide; without the key by the family's `period`."""
    name = "attention.sliding_window_pattern"
    value = source.metadata.get(source.key(name))
    if isinstance(value, list | tuple):
        flags = source.metadata.booleans(source.key(name))
        if len(flags) != layers:
            raise source.refuse(name, f"has {len(flags)} entries for {layers} layers")
        return flags
    each = source.positive(name, period)
    return [layer % each < each - 1 for layer in range(layers)]


def running_layers(source: Source) -> int:
    """The layers of the forward pass: those behind them predict further tokens (`nextn_predict_layers`)."""
    stored, predicting = source.stored_layers(), source.integer("nextn_predict_layers", 0)
    if predicting < 0 or predicting >= stored:
        raise source.refuse("nextn_predict_layers", f"is {predicting} of {stored} layers")
    return stored - predicting


#: values of expert_gating_func; the third is the softmax over the chosen experts, which is that over all, normalised
_GATINGS: dict[int, Gating] = {1: "softmax", 2: "sigmoid", 3: "softmax"}


def read_experts(source: Source, *, gating: int, normalise: bool = True) -> MoE:
    """A mixture of experts; `gating` and `normalise` are the family's, for files without these keys."""
    function = source.integer("expert_gating_func", gating)
    if function not in _GATINGS:
        raise source.refuse("expert_gating_func", f"is {function}, expected one of {', '.join(map(str, _GATINGS))}")
    count, hidden = source.positive("expert_count"), source.positive("expert_feed_forward_length")
    shared = source.integer("expert_shared_feed_forward_length", hidden * source.integer("expert_shared_count", 0))
    return MoE(
        experts=count,
        used=source.positive("expert_used_count"),
        hidden=hidden,
        shared=shared,
        gating=_GATINGS[function],
        normalise=function == 3 or source.flag("expert_weights_norm", normalise),
        # Converters write 0 for none.
        scale=source.number("expert_weights_scale", 0.0) or 1.0,
        bias=any(name.endswith(".exp_probs_b.bias") for name in source.tensors),
    )
