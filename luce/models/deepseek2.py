"""DeepSeek-V2, V3, R1 and the models stored under their name (Kimi K2, GLM-4.7-Flash, Moonlight): latent attention,
experts in groups, shared experts, leading dense layers; trailing layers predict further tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace

from luce.gguf.metadata import shown
from luce.models.keys import Source, model, read_experts, read_mlp, read_temperature, read_yarn, running_layers
from luce.models.spec import Attention, Dialect, ExpertGroups, Latent, Layer, Markers, ModelSpec, MoE, Rope
from luce.models.tool_formats import DEEPSEEK_V31

_SOFTMAX, _SIGMOID = 1, 2
#: layers and vocabulary of GLM-4.7-Flash, whose files have no expert_gating_func
_FLASH = ((47, 48), 154880)


def spec(source: Source) -> ModelSpec:
    """The spec of a deepseek2 file."""
    attention = _attention(source)
    leading = source.integer("leading_dense_block_count", 0)
    dense = read_mlp(source) if leading else None
    layers = [
        Layer(attention, dense if dense is not None and layer < leading else _experts(source))
        for layer in range(running_layers(source))
    ]
    return replace(
        model(source, "deepseek2", layers),
        eos=("<｜end▁of▁sentence｜>", "<|im_end|>", "[EOS]", "<|user|>", "<|observation|>", "<|endoftext|>"),
        dialect=Dialect(reasoning=Markers("<think>", "</think>"), calls=DEEPSEEK_V31),
    )


def _attention(source: Source) -> Attention:
    if source.key("attention.key_length_mla") not in source.metadata:
        raise source.refuse(
            "attention.key_length_mla",
            "is missing: the file is of a converter that left attn_kv_b undivided; convert the model anew",
        )
    heads, rank = source.positive("attention.head_count"), source.positive("attention.kv_lora_rank")
    turned, key = source.positive("rope.dimension_count"), source.positive("attention.key_length_mla")
    if turned % 2 or turned >= key:
        raise source.refuse("rope.dimension_count", f"is {turned}, expected an even number below {key}")
    kind = source.metadata.string(source.key("rope.scaling.type"), default="none")
    if kind not in ("none", "yarn"):
        raise source.refuse("rope.scaling.type", f"is {shown(kind)}, expected yarn or none")
    scale, yarn = key**-0.5, None
    if kind == "yarn":
        # The stored multiplier is 0.1 mscale_all_dim, and mscale is the same: cos and sin are left as they are, and the
        # scores get the square of the magnitude.
        yarn = replace(read_yarn(source), log_multiplier=1.0)
        scale *= (1 + source.number("rope.scaling.yarn_log_multiplier", 0.0) * math.log(yarn.factor)) ** 2
    base = source.above("rope.freq_base", 10000.0, least=1.0)
    return Attention(
        heads=heads,
        kv_heads=1,
        head_dim=turned + rank,
        rope=Rope(dims=turned, base=base, adjacent=True, yarn=yarn),
        scale=scale,
        temperature=read_temperature(source),
        latent=Latent(
            rank=rank,
            query_rank=source.integer("attention.q_lora_rank", 0),
            plain=key - turned,
            value=source.positive("attention.value_length_mla"),
        ),
    )


def _experts(source: Source) -> MoE:
    layers, vocabulary = _FLASH
    flash = source.stored_layers() in layers and source.vocabulary() == vocabulary
    experts = read_experts(source, gating=_SIGMOID if flash else _SOFTMAX, normalise=False)
    count = source.integer("expert_group_count", 1)
    if count <= 1:
        return experts
    used = source.positive("expert_group_used_count")
    if experts.experts % count or used > count or used * (experts.experts // count) < experts.used:
        raise source.refuse(
            "expert_group_used_count", f"is {used} of {count} groups, for {experts.used} of {experts.experts} experts"
        )
    # V3, whose router is a sigmoid, takes the sum of a group's two best experts; V2 the best one.
    return replace(experts, groups=ExpertGroups(count, used, "two best" if experts.gating == "sigmoid" else "best"))
