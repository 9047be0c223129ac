"""StableLM 3B, StableLM 2 1.6B and StableLM Zephyr: dense decoder with LayerNorm, heads rotated in part."""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, model, read_attention, read_mlp, read_rope, refuse_norms_of_each_head
from luce.models.spec import CHATML, Dialect, Layer, ModelSpec


def spec(source: Source) -> ModelSpec:
    """The spec of a stablelm file. StableLM 2 12B has a norm of its own for each head, which Luce does not compute."""
    refuse_norms_of_each_head(source)
    # What layers have decides: converters write use_parallel_residual as true where the checkpoint does not say.
    parallel = "blk.0.ffn_norm.weight" not in source.tensors
    layer = Layer(
        read_attention(source, read_rope(source)),
        read_mlp(source),
        ffn_norm=None if parallel else "ffn_norm",
        parallel=parallel,
    )
    return replace(
        model(source, "stablelm", (layer,) * source.stored_layers(), eps="attention.layer_norm_epsilon"),
        norm="layer",
        norm_bias="output_norm.bias" in source.tensors,
        eos=("<|endoftext|>", "<|im_end|>"),
        dialect=Dialect(message=CHATML),
    )
