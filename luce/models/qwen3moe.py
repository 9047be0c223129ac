"""Qwen3 with experts: 30B-A3B, 235B-A22B, Coder."""

from __future__ import annotations

from luce.models.keys import Source, read_experts
from luce.models.qwen3 import qwen3
from luce.models.spec import ModelSpec


def spec(source: Source) -> ModelSpec:
    """The spec of a qwen3moe file."""
    return qwen3(source, "qwen3moe", read_experts(source, gating=1))
