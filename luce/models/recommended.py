"""Models to begin with, by the memory that they need. Facts as their repositories list them."""

from __future__ import annotations

from dataclasses import dataclass

#: when the facts were gathered
AS_OF = "2026-11-24"


@dataclass(frozen=True)
class RecommendedModel:
    """One model."""

    #: GB (10^9 bytes) of all devices together, for the weights, a context of 8,192 tokens and activations
    memory: int
    #: what `luce pull` takes
    name: str
    #: what its makers call it
    model: str
    #: bytes of the file, to three digits
    size: int
    #: its `general.architecture`
    family: str
    licence: str


RECOMMENDED = (
    RecommendedModel(1, "smollm2", "SmolLM2 135M Instruct", 98_400_000, "llama", "Apache 2.0"),
    RecommendedModel(4, "bartowski/Qwen_Qwen3-4B-GGUF:Q4_K_M", "Qwen3 4B", 2_500_000_000, "qwen3", "Apache 2.0"),
    RecommendedModel(8, "bartowski/Qwen_Qwen3-8B-GGUF:Q4_K_M", "Qwen3 8B", 5_030_000_000, "qwen3", "Apache 2.0"),
    RecommendedModel(
        16, "bartowski/openai_gpt-oss-20b-GGUF:MXFP4", "gpt-oss 20b", 12_100_000_000, "gpt-oss", "Apache 2.0"
    ),
    RecommendedModel(24, "unsloth/Qwen3.6-27B-GGUF:UD-Q4_K_XL", "Qwen3.6 27B", 17_600_000_000, "qwen35", "Apache 2.0"),
    RecommendedModel(
        64,
        "bartowski/Llama-3.3-70B-Instruct-GGUF:Q4_K_M",
        "Llama 3.3 70B Instruct",
        42_500_000_000,
        "llama",
        "Llama 3.3 Community",
    ),
    RecommendedModel(80, "ggml-org/gpt-oss-120b-GGUF:MXFP4", "gpt-oss 120b", 63_400_000_000, "gpt-oss", "Apache 2.0"),
)
