"""GGUF architecture name to family, one line each."""

from __future__ import annotations

from collections.abc import Callable

from luce.errors import UnsupportedError
from luce.gguf.metadata import shown
from luce.models import gemma4, laguna, llama, qwen3, qwen35, qwen35moe
from luce.models.keys import Source
from luce.models.shapes import check_shapes
from luce.models.spec import ModelSpec

FAMILIES: dict[str, Callable[[Source], ModelSpec]] = {
    "gemma4": gemma4.spec,
    "laguna": laguna.spec,
    "llama": llama.spec,
    "qwen3": qwen3.spec,
    "qwen35": qwen35.spec,
    "qwen35moe": qwen35moe.spec,
}


def read_spec(source: Source) -> ModelSpec:
    """The spec of a file. Raises UnsupportedError naming the architecture if Luce does not support it."""
    family = FAMILIES.get(source.architecture)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedError(
            f"{source.path}: general.architecture {shown(source.architecture)} is not supported; Luce runs {known}"
        )
    spec = family(source)
    check_shapes(source, spec)
    return spec
