"""What a family's layers have, in the words of docs/guide/models.md."""

from __future__ import annotations

from collections.abc import Iterator

from luce.models.spec import (
    AltUpLayer,
    AnyLayer,
    Attention,
    GatedDeltaNet,
    GatedMLP,
    Layer,
    ModelSpec,
    MoE,
    PlainMLP,
    SandwichLayer,
    ShortConv,
)


def features(spec: ModelSpec) -> list[str]:
    """The features of a model, in the order of the table's columns of words."""
    found = [name for layer in spec.layers for name in (*_mixer(layer), *_feed_forward(layer), *_layer(layer))]
    found += _model(spec)
    order = {name: place for place, name in enumerate(ORDER)}
    return sorted(set(found), key=order.__getitem__)


#: all features
ORDER = (
    "gated DeltaNet",
    "short convolution",
    "latent attention (MLA)",
    "windows",
    "layers without rotation",
    "query and key norms",
    "attention biases",
    "sinks",
    "soft caps",
    "gated attention",
    "layers that share keys and values",
    "scaled queries at long positions",
    "experts",
    "shared experts",
    "experts in groups",
    "plain MLP",
    "sparse MLP",
    "per-layer embeddings",
    "AltUp",
    "LayerNorm",
    "post norms",
    "parallel residual",
    "multipliers",
    "multi-token prediction",
)


def _mixer(layer: AnyLayer) -> Iterator[str]:
    mixer = layer.mixer
    if isinstance(mixer, GatedDeltaNet):
        yield "gated DeltaNet"
    if isinstance(mixer, ShortConv):
        yield "short convolution"
    if not isinstance(mixer, Attention):
        return
    yield from (
        name
        for name, there in {
            "latent attention (MLA)": mixer.latent is not None,
            "windows": mixer.window is not None,
            "layers without rotation": mixer.rope is None,
            "query and key norms": mixer.qk_norm is not None,
            "attention biases": mixer.bias,
            "sinks": mixer.sinks,
            "soft caps": bool(mixer.softcap),
            "gated attention": mixer.query_gate or bool(mixer.output_gate),
            "layers that share keys and values": mixer.donor is not None,
            "scaled queries at long positions": mixer.temperature is not None,
        }.items()
        if there
    )


def _feed_forward(layer: AnyLayer) -> Iterator[str]:
    parts = [layer.ffn, layer.experts] if isinstance(layer, SandwichLayer) else [layer.ffn]
    for part in parts:
        if isinstance(part, MoE):
            yield "experts"
            if part.shared:
                yield "shared experts"
            if part.groups is not None:
                yield "experts in groups"
        if isinstance(part, PlainMLP):
            yield "plain MLP"
        if isinstance(part, GatedMLP) and part.sparsity is not None:
            yield "sparse MLP"


def _layer(layer: AnyLayer) -> Iterator[str]:
    if isinstance(layer, AltUpLayer):
        yield "AltUp"
    if not isinstance(layer, Layer):
        yield "post norms"
    else:
        if layer.mixer_post_norm is not None or layer.ffn_post_norm is not None:
            yield "post norms"
        if layer.parallel:
            yield "parallel residual"
        if layer.residual_scale != 1:
            yield "multipliers"


def _model(spec: ModelSpec) -> Iterator[str]:
    if spec.logit_softcap:
        yield "soft caps"
    if spec.per_layer:
        yield "per-layer embeddings"
    if spec.norm == "layer":
        yield "LayerNorm"
    if spec.logit_scale != 1 or spec.embedding_scale != 1:
        yield "multipliers"
    if spec.skipped_layers:
        yield "multi-token prediction"
