"""Gemma 3: five sliding layers for each global one, which have rotary bases of their own; norms before and behind each
part, and on query and key heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from luce.models.keys import Source, model, read_attention, read_rope, sliding_layers
from luce.models.spec import AnyLayer, Attention, Dialect, GatedMLP, Layer, MessageMarkers, ModelSpec, Rope

#: by the config of the 27B model, whose queries are scaled by its width; the files have no key for it
_LAYERS_27B = 62


def spec(source: Source) -> ModelSpec:
    """The spec of a gemma3 file."""
    layers = source.stored_layers()
    whole = replace(read_attention(source, read_rope(source, base=1e6)), qk_norm="head")
    whole = by_width(source, whole) if layers == _LAYERS_27B else whole
    # The scaling of the context concerns the global layers.
    near = Rope(dims=whole.head_dim, base=source.above("rope.freq_base_swa", 10000.0, least=1.0))
    sliding = replace(whole, rope=near, window=source.positive("attention.sliding_window"))
    flags = sliding_layers(source, layers, 6)
    return gemma(source, "gemma3", [sliding if flag else whole for flag in flags])


def by_width(source: Source, attention: Attention) -> Attention:
    """With queries scaled by the stream's width divided by the heads."""
    return replace(attention, scale=(source.positive("embedding_length") / attention.heads) ** -0.5)


def gemma(source: Source, family: str, mixers: Sequence[Attention], *, post_norms: bool = True) -> ModelSpec:
    """A model of Gemma, Gemma 2 or Gemma 3, which share all parts but attention."""
    layers = [
        Layer(
            mixer,
            GatedMLP(source.positive("feed_forward_length"), "gelu"),
            mixer_post_norm="post_attention_norm" if post_norms else None,
            ffn_post_norm="post_ffw_norm" if post_norms else None,
        )
        for mixer in mixers
    ]
    return gemma_model(source, family, layers)


def gemma_model(source: Source, family: str, layers: Sequence[AnyLayer]) -> ModelSpec:
    """What stands around the layers of every Gemma before the fourth."""
    return replace(
        model(source, family, layers),
        eos=("<end_of_turn>", "<eos>"),
        embedding_scale=source.positive("embedding_length") ** 0.5,
        logit_softcap=source.number("final_logit_softcapping", 0.0),
        dialect=Dialect(
            notes=("the role assistant is written model", "a system prompt goes into the first user message"),
            message=MessageMarkers(starts=("<start_of_turn>",), ends=("<end_of_turn>",)),
        ),
    )
