"""GLM-4-0414 and GLM-Z1: dense decoder, norms before and behind each part, half of each head rotated."""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, model, read_attention, read_mlp, read_rope, running_layers
from luce.models.spec import Dialect, Layer, Markers, ModelSpec
from luce.models.tool_formats import GLM45

#: of all GLM-4 models
GLM_EOS = ("<|user|>", "<|observation|>", "<|endoftext|>")
#: a message ends where the next one begins
GLM_DIALECT = Dialect(
    reasoning=Markers("<think>", "</think>"),
    calls=GLM45,
    notes=("prompts begin with [gMASK]<sop>, which the template writes",),
)


def spec(source: Source) -> ModelSpec:
    """The spec of a glm4 file."""
    # The vision models' files hold rows in the other order.
    adjacent = source.key("rope.dimension_sections") not in source.metadata
    layer = Layer(
        read_attention(source, read_rope(source, adjacent=adjacent)),
        read_mlp(source),
        mixer_post_norm="post_attention_norm",
        ffn_post_norm="post_ffw_norm",
    )
    return replace(
        model(source, "glm4", (layer,) * running_layers(source)),
        eos=GLM_EOS,
        dialect=replace(GLM_DIALECT, notes=("tool calls are a line with the name and one with JSON",)),
    )
