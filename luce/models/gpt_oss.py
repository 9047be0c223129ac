"""gpt-oss: every second layer slides; sinks of attention, biases everywhere, experts with a clamped activation."""

from __future__ import annotations

from dataclasses import replace

from luce.models.channels import Channels
from luce.models.keys import Source, model, read_attention, read_experts, read_rope, sliding_layers
from luce.models.spec import Dialect, Layer, Markers, MessageMarkers, ModelSpec, ReasoningBudget
from luce.models.tool_formats import HARMONY

# openai/harmony, docs/format.md.
_CHANNELS = Channels(
    start="<|start|>",
    channel="<|channel|>",
    message="<|message|>",
    ends=("<|end|>", "<|call|>", "<|return|>"),
    role="assistant",
    reasoning="analysis",
    final="final",
    preamble="commentary",
)


def spec(source: Source) -> ModelSpec:
    """The spec of a gpt-oss file."""
    rope = read_rope(source, base=150000.0)
    if rope.yarn is not None:
        # `truncate` is false in the published config; files have no key for it.
        rope = replace(rope, yarn=replace(rope.yarn, rounded=False))
    whole = replace(read_attention(source, rope), bias=True, out_bias=True, sinks=True)
    sliding = replace(whole, window=source.positive("attention.sliding_window"))
    # The softmax over the chosen experts is that over all, divided by the sum of the chosen.
    experts = replace(read_experts(source, gating=3), biases=True, activation="clamped_swiglu")
    flags = sliding_layers(source, source.stored_layers(), 2)
    layers = [Layer(sliding if flag else whole, experts, ffn_norm="post_attention_norm") for flag in flags]
    return replace(
        model(source, "gpt-oss", layers),
        eos=("<|return|>", "<|call|>", "<|endoftext|>"),
        dialect=Dialect(
            reasoning=Markers("<|channel|>analysis<|message|>", "<|end|>"),
            budget=ReasoningBudget(lead_out="<|start|>assistant<|channel|>final<|message|>"),
            calls=HARMONY,
            notes=("a reply has one tool call at most; a text before it is rendered as reasoning in later prompts",),
            message=MessageMarkers(starts=("<|start|>",), ends=("<|end|>",)),
            channels=_CHANNELS,
        ),
    )
