"""The parts that the Qwen3.5 families share: gated DeltaNet layers with one of gated full attention in between.

Trailing layers for multi-token prediction are not layers of the forward pass.
"""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, attention_heads, model, rope_dims, running_layers
from luce.models.qwen3 import LEAD_IN
from luce.models.spec import (
    CHATML,
    DELTA_CONV_KERNELS,
    DELTA_HEAD_DIMS,
    Attention,
    Dialect,
    GatedDeltaNet,
    GatedMLP,
    Layer,
    Markers,
    ModelSpec,
    MoE,
    ReasoningBudget,
    Rope,
)
from luce.models.tool_formats import QWEN_XML


def hybrid(source: Source, family: str, ffn: GatedMLP | MoE, *, grouped: bool = False) -> ModelSpec:
    """The spec of a file whose every layer has this feed-forward part; `grouped` as in GatedDeltaNet."""
    layers = running_layers(source)
    attention = Layer(mixer=_attention(source), ffn=ffn, ffn_norm="post_attention_norm")
    recurrent = Layer(mixer=_delta_net(source, grouped=grouped), ffn=ffn, ffn_norm="post_attention_norm")
    return replace(
        model(source, family, [recurrent if flag else attention for flag in _recurrent_layers(source, layers)]),
        eos=("<|im_end|>", "<|endoftext|>"),
        nfc=True,
        dialect=Dialect(
            reasoning=Markers("<think>", "</think>"),
            calls=QWEN_XML,
            budget=ReasoningBudget(LEAD_IN, "\n\n", usual_tokens=32768, most_tokens=81920),
            notes=(
                "a reply begins inside <think>; enable_thinking false closes it in the prompt",
                "tool calls are XML, <function=NAME> and <parameter=NAME>, not JSON",
            ),
            message=CHATML,
        ),
        mask_token=248070,
    )


def _attention(source: Source) -> Attention:
    heads = attention_heads(source)
    sections = source.metadata.integers(source.key("rope.dimension_sections"), default=())
    return Attention(
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        rope=Rope(
            dims=rope_dims(source, heads.head_dim),
            base=source.number("rope.freq_base"),
            sections=tuple(sections),
        ),
        scale=heads.head_dim**-0.5,
        qk_norm="head",
        query_gate=True,
    )


def _delta_net(source: Source, *, grouped: bool) -> GatedDeltaNet:
    key_heads = source.positive("ssm.group_count")
    value_heads = source.positive("ssm.time_step_rank")
    head_dim = source.positive("ssm.state_size")
    inner = source.positive("ssm.inner_size")
    if value_heads % key_heads:
        raise source.refuse("ssm.time_step_rank", f"is {value_heads}, not a multiple of ssm.group_count {key_heads}")
    if inner != value_heads * head_dim:
        raise source.refuse("ssm.inner_size", f"is {inner}, expected {value_heads} heads of {head_dim}")
    taps = source.positive("ssm.conv_kernel")
    for key, value, known in (
        ("ssm.state_size", head_dim, DELTA_HEAD_DIMS),
        ("ssm.conv_kernel", taps, DELTA_CONV_KERNELS),
    ):
        if value not in known:
            raise source.refuse(key, f"is {value}, expected one of {', '.join(map(str, known))}")
    return GatedDeltaNet(key_heads, value_heads, head_dim, taps, grouped)


def _recurrent_layers(source: Source, layers: int) -> list[bool]:
    key = source.key("attention.recurrent_layers")
    if key not in source.metadata:
        interval = source.positive("full_attention_interval", 4)
        return [bool((layer + 1) % interval) for layer in range(layers)]
    value = source.metadata[key]
    if not isinstance(value, list | tuple) or len(value) < layers:
        raise source.refuse("attention.recurrent_layers", f"must be an array of at least {layers} flags")
    return [bool(flag) for flag in value[:layers]]
