"""Qwen3-Next and Qwen3-Coder-Next: as Qwen3.5 with experts, with value heads of gated DeltaNet grouped by key head."""

from __future__ import annotations

from dataclasses import replace

from luce.models.hybrid import hybrid
from luce.models.keys import Source, read_experts
from luce.models.spec import CHATML, Dialect, Markers, ModelSpec


def spec(source: Source) -> ModelSpec:
    """The spec of a qwen3next file."""
    if "blk.0.ssm_in.weight" in source.tensors:
        raise source.refuse(
            "ssm.inner_size",
            "belongs to a file with ssm_in undivided, as early converters wrote; convert the model anew",
        )
    experts = replace(read_experts(source, gating=1), shared_gate=True)
    return replace(
        hybrid(source, "qwen3next", experts, grouped=True),
        mask_token=None,
        dialect=Dialect(
            reasoning=Markers("<think>", "</think>"),
            notes=("Thinking releases begin a reply inside <think>, Instruct releases do not reason",),
            message=CHATML,
        ),
    )
