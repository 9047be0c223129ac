"""EXAONE 4.0: norms behind each part only, and on query and key heads; in the 32B three of four layers slide, and the
others are not rotated.
"""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, read_attention, read_rope
from luce.models.olmo2 import normed_behind, slides
from luce.models.spec import Dialect, Markers, ModelSpec


def spec(source: Source) -> ModelSpec:
    """The spec of an exaone4 file."""
    rotated = replace(read_attention(source, read_rope(source, base=1e6)), qk_norm="head")
    whole = replace(rotated, rope=None) if slides(source) else rotated
    return replace(
        normed_behind(source, "exaone4", whole, rotated),
        eos=("[|endofturn|]",),
        dialect=Dialect(reasoning=Markers("<think>", "</think>")),
    )
