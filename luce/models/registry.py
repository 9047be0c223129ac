"""GGUF architecture name to family, one line each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from luce.errors import UnsupportedError
from luce.gguf.metadata import shown
from luce.models import (
    cohere2,
    command_r,
    deepseek2,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    gemma3n,
    gemma4,
    glm4,
    glm4moe,
    gpt_oss,
    granite,
    granitemoe,
    laguna,
    lfm2,
    lfm2moe,
    llama,
    minimax_m2,
    mistral3,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen2moe,
    qwen3,
    qwen3moe,
    qwen3next,
    qwen35,
    qwen35moe,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from luce.models.keys import Source
from luce.models.shapes import check_shapes
from luce.models.spec import ModelSpec

FAMILIES: dict[str, Callable[[Source], ModelSpec]] = {
    "cohere2": cohere2.spec,
    "command-r": command_r.spec,
    "deepseek2": deepseek2.spec,
    "ernie4_5": ernie4_5.spec,
    "ernie4_5-moe": ernie4_5_moe.spec,
    "exaone4": exaone4.spec,
    "gemma": gemma.spec,
    "gemma2": gemma2.spec,
    "gemma3": gemma3.spec,
    "gemma3n": gemma3n.spec,
    "gemma4": gemma4.spec,
    "glm4": glm4.spec,
    "glm4moe": glm4moe.spec,
    "gpt-oss": gpt_oss.spec,
    "granite": granite.spec,
    "granitemoe": granitemoe.spec,
    "laguna": laguna.spec,
    "lfm2": lfm2.spec,
    "lfm2moe": lfm2moe.spec,
    "llama": llama.spec,
    "minimax-m2": minimax_m2.spec,
    "mistral3": mistral3.spec,
    "olmo2": olmo2.spec,
    "olmoe": olmoe.spec,
    "phi3": phi3.spec,
    "qwen2": qwen2.spec,
    "qwen2moe": qwen2moe.spec,
    "qwen3": qwen3.spec,
    "qwen3moe": qwen3moe.spec,
    "qwen3next": qwen3next.spec,
    "qwen35": qwen35.spec,
    "qwen35moe": qwen35moe.spec,
    "seed_oss": seed_oss.spec,
    "smollm3": smollm3.spec,
    "stablelm": stablelm.spec,
    "starcoder2": starcoder2.spec,
}

#: what Luce has no code for, of architectures whose files people have
MISSING: Mapping[str, str] = {
    "falcon-h1": "Mamba-2 states, and attention beside them in one layer",
    "granitehybrid": "Mamba-2 states",
    "hunyuan-dense": "norms of query and key heads behind their rotation",
    "hunyuan-moe": "norms of query and key heads behind their rotation",
    "jamba": "Mamba states",
    "kimi-linear": "Kimi Delta Attention",
    "mamba": "Mamba states",
    "mamba2": "Mamba-2 states",
    "nemotron_h": "Mamba-2 states, and layers of one part",
    "nemotron_h_moe": "Mamba-2 states, layers of one part, and experts without gates",
    **dict.fromkeys(("bert", "jina-bert-v2", "modern-bert", "nomic-bert", "nomic-bert-moe"), "embedding models"),
    **dict.fromkeys(("t5", "t5encoder"), "encoders"),
    "clip": "projectors of images",
}


def read_spec(source: Source) -> ModelSpec:
    """The spec of a file. Raises UnsupportedError naming the architecture if Luce does not support it, with what is
    missing where that is known, or for a file without tensors."""
    if not source.tensors:
        raise UnsupportedError(f"{source.path}: holds a vocabulary but no tensors: there is no model to run")
    family = FAMILIES.get(source.architecture)
    if family is None:
        why = MISSING.get(source.architecture)
        rest = f": Luce has no code for {why}" if why else f"; Luce runs {', '.join(sorted(FAMILIES))}"
        name = shown(source.architecture)
        raise UnsupportedError(f"{source.path}: general.architecture {name} is not supported{rest}")
    spec = family(source)
    check_shapes(source, spec)
    return spec
