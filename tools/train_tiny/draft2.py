"""The DFlash2 draft of the target: a DFlash draft with a convolution around each part of a layer, and a selector that
chooses a row's token by the token before it (../shared/spec of DFlash2: z-lab/dflash, vLLM's qwen3_dflash2)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from .data import VOCAB
from .draft import BLOCK, HIDDEN, LAYERS, Blocks, Draft, fresh
from .layers import Weights, linear, matrix, rms

#: taps of the convolutions, channels of a group, rank of the selector, and candidates of a row
TAPS, GROUP, RANK, TOP = 2, 16, 64, 16
_PARTS = ("attn", "ffn")


def grown(draft: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Initial weights by GGUF name: of a DFlash draft, whose tokens they give, or of a fresh one."""
    weights = dict(fresh() if draft is None else draft)
    for name in (f"blk.{layer}.{part}_conv" for layer in range(LAYERS) for part in _PARTS):
        weights[f"{name}_base"] = torch.stack([torch.ones(2, HIDDEN), *[torch.zeros(2, HIDDEN)] * (TAPS - 1)], 1)
        weights[f"{name}_proj.weight"] = torch.zeros(2 * TAPS * (HIDDEN // GROUP), HIDDEN)
    weights["selector_hidden.weight"] = matrix(RANK, HIDDEN)
    weights["selector_predecessor.weight"] = torch.randn(VOCAB, RANK)
    weights["selector_successor.weight"] = torch.zeros(VOCAB, RANK)
    return weights


def convolve(u: Tensor, base: Tensor, coefficients: Tensor) -> Tensor:
    """One side of a convolution: u [batch, blocks * BLOCK, HIDDEN], base [TAPS, HIDDEN], coefficients [batch, rows,
    TAPS, groups] -> as u. Rows before a block are zero."""
    rows = u.float().unflatten(1, (-1, BLOCK))
    weights = base + coefficients.float().repeat_interleave(GROUP, -1)
    out = torch.zeros_like(rows)
    for tap, own in enumerate(weights.unflatten(1, (-1, BLOCK)).unbind(3)):
        out = out + own * F.pad(rows, (0, 0, tap, 0))[:, :, :BLOCK]
    return out.flatten(1, 2)


class Draft2(Draft):
    """The draft's forward pass, and its selector."""

    def _mix(self, w: Weights, layer: int, x: Tensor, f: Tensor, where: Blocks) -> Tensor:
        y = rms(x, w[f"blk.{layer}.attn_norm.weight"])
        (first, second), base = self._coefficients(w, layer, "attn", y)
        inner = convolve(y, base[0], first).to(self.dtype)
        return x + convolve(self._attention(w, layer, inner, f, where), base[1], second)

    def _feed(self, w: Weights, layer: int, x: Tensor) -> Tensor:
        y = rms(x, w[f"blk.{layer}.ffn_norm.weight"])
        (first, second), base = self._coefficients(w, layer, "ffn", y)
        inner = convolve(y, base[0], first).to(self.dtype)
        gate, up, down = (w[f"blk.{layer}.ffn_{n}.weight"] for n in ("gate", "up", "down"))
        out = linear(F.silu(linear(inner, gate, self.dtype)) * linear(inner, up, self.dtype), down, self.dtype)
        return x + convolve(out, base[1], second)

    def _coefficients(self, w: Weights, layer: int, part: str, y: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The coefficients of the input and output sides, and the base [2, TAPS, HIDDEN]."""
        name = f"blk.{layer}.{part}_conv"
        found = linear(y, w[f"{name}_proj.weight"], self.dtype).unflatten(-1, (2, TAPS, -1))
        return (found[..., 0, :, :], found[..., 1, :, :]), w[f"{name}_base"]

    def losses(self, w: Weights, base: Weights, z: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits, labels = linear(z, base["output.weight"], self.dtype).float(), tokens[..., 1:]
        plain = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view(labels.shape)
        best, ids = logits.topk(TOP, -1)
        # The selector learns among the candidates; a right token that is none of them takes the last one's place.
        missing = (ids != labels[..., None]).all(-1)
        learned = torch.cat([ids[..., :-1], torch.where(missing, labels, ids[..., -1])[..., None]], -1)
        scores = logits.gather(-1, learned) + self.edges(w, z, tokens[..., :-1], learned)
        place = (learned == labels[..., None]).long().argmax(-1)
        selected = F.cross_entropy(scores.flatten(0, 2), place.flatten(), reduction="none").view(labels.shape)
        with torch.no_grad():
            chosen = (best + self.edges(w, z, tokens[..., :-1], ids)).argmax(-1, keepdim=True)
        return plain + selected, ids.gather(-1, chosen)[..., 0]

    def drafted(self, w: Weights, base: Weights, z: Tensor, seeds: Tensor) -> Tensor:
        best, ids = linear(z, base["output.weight"], self.dtype).float().topk(TOP, -1)
        before, found = seeds, []
        for row in range(z.shape[1]):
            scores = best[:, row] + self.edges(w, z[:, row], before, ids[:, row])
            before = ids[:, row].gather(-1, scores.argmax(-1, keepdim=True))[:, 0]
            found.append(before)
        return torch.stack(found, 1)

    def edges(self, w: Weights, z: Tensor, before: Tensor, ids: Tensor) -> Tensor:
        """Biases of candidates ids [..., TOP] behind the tokens `before` [...]: rows z [..., HIDDEN]."""
        first = F.embedding(before, w["selector_predecessor.weight"]) * linear(
            z, w["selector_hidden.weight"], self.dtype
        )
        return (F.embedding(ids, w["selector_successor.weight"]) * first[..., None, :]).sum(-1)
