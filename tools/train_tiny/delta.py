"""The gated delta rule in chunks, for training: matrix products over all chunks at once, then one product per chunk.

Per value head, rows of a chunk of C tokens, G the running sum of the log decays inside the chunk, D_ij = exp(G_i - G_j)
for j <= i and 0 above:

    A = beta (K K^T) D, strictly lower    T = (I + A)^-1    U = T (beta V)    W = T (beta e^G K)
    S' = e^G_last S + (e^(G_last - G) K)^T (U - W S) = M S + B
    O  = (e^G Q) S + (tril(Q K^T) D) (U - W S)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 64


class _Exact:
    """Full float32 products within: a TF32 state drifts."""

    def __enter__(self) -> None:
        self._before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")

    def __exit__(self, *_: object) -> None:
        torch.set_float32_matmul_precision(self._before)


class _Inverse(torch.autograd.Function):
    """(I + A)^-1 of strictly lower A [n, C, C], by doubling the size of the inverted diagonal blocks."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        size = a.shape[-1]
        index = torch.arange(size, device=a.device)
        x = torch.eye(size, device=a.device).expand_as(a)
        with _Exact():
            width = 1
            while width < size:
                block = index // width
                below = (block[:, None] == block + 1) & (block % 2 == 0)
                x = x - x @ torch.where(below, a, 0.0) @ x
                width *= 2
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with _Exact():
            return -(x.mT @ gradients[0] @ x.mT).tril(-1)


class _Scan(torch.autograd.Function):
    """S_0 = start, S_(n+1) = M_n S_n + B_n: m, b [h, N, d, d], start [h, d, d] -> all N + 1 states [h, N + 1, d, d]."""

    @staticmethod
    def forward(ctx: Any, m: Tensor, b: Tensor, start: Tensor) -> Tensor:
        states = [start]
        with _Exact():
            for i in range(m.shape[1]):
                states.append(torch.baddbmm(b[:, i], m[:, i], states[-1]))
        result = torch.stack(states, 1)
        ctx.save_for_backward(m, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m, states = ctx.saved_tensors
        later = gradients[0]
        total = [later[:, -1]]
        with _Exact():
            for i in range(m.shape[1] - 1, -1, -1):
                total.append(torch.baddbmm(later[:, i], m[:, i].mT, total[-1]))
            db = torch.stack(total[-2::-1], 1)
            return db @ states[:, :-1].mT, db, total[-1]


@torch.compiler.disable
def _inverse(a: Tensor) -> Tensor:
    return _Inverse.apply(a)


@torch.compiler.disable
def _scan(m: Tensor, b: Tensor, start: Tensor) -> Tensor:
    return _Scan.apply(m, b, start)


def _chunks(x: Tensor) -> Tensor:
    """[batch, T, heads, ...] -> [batch * heads, T / C, C, ...]."""
    batch, rows, heads = x.shape[:3]
    x = x.reshape(batch, rows // CHUNK, CHUNK, heads, *x.shape[3:]).movedim(3, 1)
    return x.reshape(batch * heads, *x.shape[2:])


def _before(k: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=k.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    return (beta[..., None] * (k @ k.mT) * decay).tril(-1), decay, total


def _between(t: Tensor, k: Tensor, v: Tensor, beta: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    u = t @ (beta[..., None] * v)
    w = t @ ((beta * total.exp())[..., None] * k)
    last = total[..., -1:]
    reach = ((last - total).exp()[..., None] * k).mT
    keep = torch.eye(k.shape[-1], device=k.device) * last.exp()[..., None]
    return u, w, keep - reach @ w, reach @ u


def _after(q: Tensor, k: Tensor, u: Tensor, w: Tensor, decay: Tensor, total: Tensor, states: Tensor) -> Tensor:
    written = u - w @ states
    return (total.exp()[..., None] * q) @ states + ((q @ k.mT) * decay) @ written


class Delta:
    """`Delta(compile)(q, k, v, g, beta)`."""

    def __init__(self, compile: Any) -> None:
        self._before, self._between, self._after = compile(_before), compile(_between), compile(_after)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """float32 q, k, v [batch, T, heads, d] (T a multiple of CHUNK), g (log decay), beta [batch, T, heads].

        Returns o [batch, T, heads, d] and the last state [batch, heads, d, d] (key, value).
        """
        batch, rows, heads, d = q.shape
        q, k, v, g, beta = (_chunks(x) for x in (q, k, v, g, beta))
        a, decay, total = self._before(k, g, beta)
        u, w, m, b = self._between(_inverse(a), k, v, beta, total)
        states = _scan(m, b, torch.zeros(batch * heads, d, d, device=q.device))
        o = self._after(q, k, u, w, decay, total, states[:, :-1])
        o = o.reshape(batch, heads, rows // CHUNK, CHUNK, d).movedim(1, 3).reshape(batch, rows, heads, d)
        return o, states[:, -1].reshape(batch, heads, d, d)
