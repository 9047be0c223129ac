"""Functions that the three models share. Weights are plain dicts from GGUF tensor name to float32 tensor [out, in];
products run in `dtype`, norms, gates and the residual stream in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = Mapping[str, Tensor]
EPS = 1e-6


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """float32 x / rms(x) * weight over the last axis."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x W^T, in `dtype`."""
    return F.linear(x.to(dtype), weight.to(dtype))


def feed_forward(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, dtype: torch.dtype) -> Tensor:
    """x + the gated MLP of the normed x."""
    y = rms(x, norm).to(dtype)
    return x + linear(F.silu(linear(y, gate, dtype)) * linear(y, up, dtype), down, dtype)


def rope(x: Tensor, positions: Tensor, dims: int, base: float) -> Tensor:
    """Rotate [batch, T, heads, d] over the first `dims` elements, halves paired, to `positions` [batch or 1, T]."""
    half = dims // 2
    frequencies = base ** (-torch.arange(half, device=x.device, dtype=torch.float64) * 2 / dims)
    angles = (positions.double()[..., None] * frequencies)[:, :, None]
    cos, sin = angles.cos().float(), angles.sin().float()
    a, b = x[..., :half].float(), x[..., half:dims].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., dims:].float()], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, mask: Tensor | None = None) -> Tensor:
    """Attention of [batch, T, heads, d] on [batch, S, kv_heads, d], causal if there is no mask [batch, 1, T, S]."""
    repeat = q.shape[2] // k.shape[2]
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None).transpose(1, 2)


def matrix(rows: int, cols: int, scale: float = 1.0) -> Tensor:
    """A fresh matrix [rows, cols] whose products have the size of their input, times `scale`."""
    return torch.randn(rows, cols) * (scale / math.sqrt(cols))


def trainable(weights: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies on the device that take gradients."""
    return {name: w.to(device, torch.float32).detach().requires_grad_() for name, w in weights.items()}


def token_loss(x: Tensor, head: Tensor, labels: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Weighted mean of the cross entropy of float32 hidden states [n, H] against labels [n]; weight float32 [n]."""
    logits = linear(x, head, dtype).float()
    return (F.cross_entropy(logits, labels, reduction="none") * weight).sum() / weight.sum().clamp(min=1e-6)


def no_compile(function: Any) -> Any:
    """The identity, in place of torch.compile."""
    return function
