"""The qwen3 drafter: a small dense decoder with the target's tokenizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import target
from .data import VOCAB
from .layers import Weights, attend, feed_forward, linear, matrix, no_compile, rms, rope

HIDDEN, LAYERS, FFN = 192, 4, 512
CONTEXT = target.CONTEXT
HEADS, KV_HEADS, HEAD = 4, 2, 64
ROPE_BASE = 1e6


def attention_layer(hidden: int, ffn: int, heads: int, kv_heads: int, head: int, out: float) -> dict[str, Tensor]:
    """Fresh weights of one Qwen3 layer, by the part of their GGUF names after `blk.N.`."""
    return {
        "attn_norm.weight": torch.ones(hidden),
        "attn_q.weight": matrix(heads * head, hidden),
        "attn_k.weight": matrix(kv_heads * head, hidden),
        "attn_v.weight": matrix(kv_heads * head, hidden),
        "attn_output.weight": matrix(hidden, heads * head, out),
        "attn_q_norm.weight": torch.ones(head) * 1.5,
        "attn_k_norm.weight": torch.ones(head) * 1.5,
        "ffn_norm.weight": torch.ones(hidden),
        "ffn_gate.weight": matrix(ffn, hidden),
        "ffn_up.weight": matrix(ffn, hidden),
        "ffn_down.weight": matrix(hidden, ffn, out),
    }


def fresh() -> dict[str, Tensor]:
    """Initial weights by GGUF name. The embedding is also the head."""
    weights = {"token_embd.weight": torch.randn(VOCAB, HIDDEN) * 0.05, "output_norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        layer_weights = attention_layer(HIDDEN, FFN, HEADS, KV_HEADS, HEAD, (2 * LAYERS) ** -0.5)
        weights |= {f"blk.{layer}.{name}": w for name, w in layer_weights.items()}
    return weights


def project(x: Tensor, weight: Tensor, norm: Tensor, positions: Tensor, base: float, dtype: torch.dtype) -> Tensor:
    """Heads [batch, T, heads, d] of a query or key projection: normed per head, then rotated to `positions`."""
    heads = linear(x, weight, dtype).unflatten(-1, (-1, norm.shape[0]))
    return rope(rms(heads, norm), positions, norm.shape[0], base).to(dtype)


def _attention_in(
    x: Tensor, norm: Tensor, q: Tensor, k: Tensor, v: Tensor, qn: Tensor, kn: Tensor, at: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    y = rms(x, norm).to(dtype)
    value = linear(y, v, dtype).unflatten(-1, (KV_HEADS, HEAD))
    return project(y, q, qn, at, ROPE_BASE, dtype), project(y, k, kn, at, ROPE_BASE, dtype), value


class Drafter:
    """The forward pass."""

    def __init__(self, dtype: torch.dtype, compile: Any = no_compile) -> None:
        self.dtype = dtype
        self._attention_in, self._ffn = compile(_attention_in), compile(feed_forward)

    def __call__(self, w: Weights, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Token ids [batch, T] -> the last layer's output [batch, T, HIDDEN], float32, before the final norm."""
        x = F.embedding(ids, w["token_embd.weight"])
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        names = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm")
        for layer in range(LAYERS):
            q, k, v = self._attention_in(x, *(w[f"blk.{layer}.{n}.weight"] for n in names), positions, self.dtype)
            o = attend(q, k, v, self.dtype).flatten(-2)
            x = x + linear(o, w[f"blk.{layer}.attn_output.weight"], self.dtype)
            parts = (w[f"blk.{layer}.{n}.weight"] for n in ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"))
            x = self._ffn(x, *parts, self.dtype)
        return x, []

    def head(self, w: Weights, x: Tensor) -> Tensor:
        """Logits, float32, of hidden states before the final norm."""
        return linear(rms(x, w["output_norm.weight"]), w["token_embd.weight"], self.dtype).float()
