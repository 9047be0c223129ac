"""Gemma 3n: four copies of the stream (AltUp), learned augmented residuals (LAuReL), per-layer embeddings, gates of
which only the largest count, and layers that read keys and values of another layer.
"""

from __future__ import annotations

import math
from dataclasses import replace

from luce.errors import UnsupportedError
from luce.models.gemma3 import gemma_model
from luce.models.gemma4 import donor
from luce.models.keys import Source, read_attention, read_rope, sliding_layers
from luce.models.spec import ALTUP_STREAMS, AltUpLayer, GatedMLP, ModelSpec, Rope

#: by the config of the published models; older files have no key for it
_SOFTCAP = 30.0


def spec(source: Source) -> ModelSpec:
    """The spec of a gemma3n file."""
    for key, only in (("altup.num_inputs", ALTUP_STREAMS), ("altup.active_idx", 0)):
        if (found := source.integer(key)) != only:
            raise source.refuse(key, f"is {found}, Luce has code for {only} alone")
    layers = source.stored_layers()
    widths = source.per_layer("feed_forward_length", layers)
    sliding, sparsities = sliding_layers(source, layers, 5), _sparsities(source, layers)
    whole = replace(read_attention(source, read_rope(source, base=1e6)), qk_norm="head", scale=1.0, value_norm=True)
    # As in Gemma 3, files may lack the base of sliding layers.
    near = Rope(dims=whole.head_dim, base=source.above("rope.freq_base_swa", 10000.0, least=1.0))
    window, rank = source.positive("attention.sliding_window"), _rank(source)
    specs = [
        AltUpLayer(
            mixer=replace(
                whole,
                rope=near if sliding[layer] else whole.rope,
                window=window if sliding[layer] else None,
                donor=donor(source, layer, sliding),
            ),
            ffn=GatedMLP(widths[layer], "gelu", sparsity=sparsities[layer]),
            laurel=rank,
        )
        for layer in range(layers)
    ]
    return replace(
        gemma_model(source, "gemma3n", specs),
        logit_softcap=source.number("final_logit_softcapping", _SOFTCAP),
        per_layer=source.positive("embedding_length_per_layer_input"),
    )


def _sparsities(source: Source, layers: int) -> list[float | None]:
    """Of each layer, how many standard deviations above the mean a gate must lie; None: all gates count."""
    name = "activation_sparsity_scale"
    values = source.metadata.numbers(source.key(name))
    if len(values) != layers:
        raise source.refuse(name, f"has {len(values)} entries for {layers} layers")
    if any(math.isnan(value) or value == math.inf for value in values):
        raise source.refuse(name, "holds a value that is neither finite nor -inf")
    return [None if value == -math.inf else value for value in values]


def _rank(source: Source) -> int:
    tensor = source.tensors.get("blk.0.laurel_l.weight")
    if tensor is None:
        raise UnsupportedError(f"{source.path}: tensor blk.0.laurel_l.weight is missing")
    return tensor.rows
