"""Muon for matrices, AdamW for the rest, on a schedule by wall clock."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

# Newton-Schulz coefficients of Jordan et al., "Muon" (2024): five steps bring singular values into [0.7, 1.2].
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5


class Clock:
    """The share of a stage's time that has passed, and the learning rate's factor: warm-up, plateau, linear decay."""

    def __init__(self, seconds: float, *, warm: float = 0.02, decay: float = 0.55) -> None:
        self._start = time.monotonic()
        self._seconds = seconds
        self._warm = warm
        self._decay = decay

    @property
    def progress(self) -> float:
        """0 at the start, 1 at the end."""
        return (time.monotonic() - self._start) / self._seconds

    @property
    def factor(self) -> float:
        """The current factor of the peak learning rate."""
        done = self.progress
        return max(0.0, min(1.0, done / self._warm + 0.01, (1.0 - done) / self._decay))


def _orthogonal(stack: Tensor) -> Tensor:
    """[n, rows, cols] matrices with their singular values near 1 (Newton-Schulz, bf16)."""
    a, b, c = _COEFFICIENTS
    x = stack.bfloat16() if stack.is_cuda else stack
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


class Optimiser:
    """`weights` by GGUF name: hidden matrices by Muon, one stack for each shape; tables, heads and vectors by AdamW.

    Muon's step is lr * 0.2 sqrt(max(rows, cols)) times the orthogonal momentum, so that one rate and decay fit both.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], *, lr: float, decay: float = 0.1, tables: tuple[str, ...] = ()
    ) -> None:
        self._lr, self._decay = lr, decay
        named = {
            name: w for name, w in weights.items() if w.ndim == 2 and "conv" not in name and not name.startswith(tables)
        }
        shapes: dict[torch.Size, list[Tensor]] = {}
        for w in named.values():
            if min(w.shape) >= 16:
                shapes.setdefault(w.shape, []).append(w)
        self._groups = list(shapes.values())
        self._momenta = [torch.zeros((len(g), *g[0].shape), device=g[0].device) for g in self._groups]
        muon = {id(w) for g in self._groups for w in g}
        rest = [w for w in weights.values() if id(w) not in muon]
        self._all = list(weights.values())
        self._adam = torch.optim.AdamW(
            [
                {"params": [w for w in rest if w.ndim == 2], "weight_decay": 0.01},
                {"params": [w for w in rest if w.ndim != 2], "weight_decay": 0.0},
            ],
            lr=lr,
            betas=(0.9, 0.95),
            fused=rest[0].is_cuda,
        )

    @torch.no_grad()
    def step(self, factor: float) -> Tensor:
        """One step at `factor` times the peak rate. Clips the gradients to norm 1 and drops them; returns the norm."""
        norm = torch.nn.utils.clip_grad_norm_(self._all, 1.0)
        rate = self._lr * factor
        for group, momentum in zip(self._groups, self._momenta, strict=True):
            gradient = torch.stack([w.grad for w in group if w.grad is not None]).float()
            momentum.lerp_(gradient, 0.05)
            update = _orthogonal(gradient.lerp(momentum, 0.95)).float()
            scale = rate * 0.2 * max(group[0].shape) ** 0.5
            torch._foreach_mul_(group, 1.0 - rate * self._decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-scale)
        for part in self._adam.param_groups:
            part["lr"] = rate
        self._adam.step()
        for w in self._all:
            w.grad = None
        return norm
