"""Granite 3 and dense Granite 4: as Llama, with multipliers of embeddings, scores, residual additions and logits."""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, model, read_attention, read_mlp, read_rope
from luce.models.spec import Dialect, GatedMLP, Layer, MessageMarkers, ModelSpec, MoE


def spec(source: Source) -> ModelSpec:
    """The spec of a granite file."""
    return granite(source, "granite", read_mlp(source))


def granite(source: Source, family: str, ffn: GatedMLP | MoE) -> ModelSpec:
    """The spec of a file whose every layer has this feed-forward part."""
    # The key says whether heads are rotated at all.
    rotated = source.flag("rope.scaling.finetuned", True)
    layer = Layer(
        read_attention(source, read_rope(source, adjacent=True) if rotated else None),
        ffn,
        residual_scale=source.above("residual_scale", 1.0),
    )
    return replace(
        model(source, family, (layer,) * source.stored_layers()),
        eos=("<|end_of_text|>",),
        embedding_scale=source.above("embedding_scale", 1.0),
        logit_scale=1 / source.above("logit_scale", 1.0),
        dialect=Dialect(message=MessageMarkers(starts=("<|start_of_role|>",), ends=("<|end_of_text|>",))),
    )
