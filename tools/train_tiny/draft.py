"""The DFlash draft (arXiv 2602.06036) of the target: computes a block of tokens in one pass, from the target's hidden
states of the text so far, with the target's embedding and head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import target
from .drafter import attention_layer, project
from .layers import Weights, attend, feed_forward, linear, matrix, no_compile, rms

HIDDEN, LAYERS, FFN = target.HIDDEN, 4, 768
HEADS, KV_HEADS, HEAD = 4, 2, 64
ROPE_BASE = 1e6
BLOCK = 16
#: positions that it is trained with, and most that it sees
CONTEXT = 1792
#: Layers whose outputs are captured: later ones predict the next tokens better; the last is left out, since reference
#: implementations apply the final norm to it.
CAPTURE = (1, 3, 4, 5, 6)
# Loss weight of row k = 1.. is exp(-(k - 1) / _GAMMA): only the tokens before the first wrong one of a block count.
_GAMMA = 7.0
_ATTENTION = ("q", "k", "v", "q_norm", "k_norm", "output")


def fresh() -> dict[str, Tensor]:
    """Initial weights by GGUF name."""
    weights = {
        "dflash.fc.weight": matrix(HIDDEN, len(CAPTURE) * HIDDEN),
        "dflash.hidden_norm.weight": torch.ones(HIDDEN),
        "output_norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        layer_weights = attention_layer(HIDDEN, FFN, HEADS, KV_HEADS, HEAD, (2 * LAYERS) ** -0.5)
        weights |= {f"blk.{layer}.{name}": w for name, w in layer_weights.items()}
    return weights


def visible(anchors: Tensor, context: int) -> Tensor:
    """bool [batch, 1, blocks * BLOCK, context + blocks * BLOCK]: the text before a block's anchor, and its own rows."""
    batch, blocks = anchors.shape
    device = anchors.device
    text = torch.arange(context, device=device) < anchors[..., None]
    own = torch.eye(blocks, dtype=torch.bool, device=device).repeat_interleave(BLOCK, 1).expand(batch, -1, -1)
    return torch.cat([text, own], -1).repeat_interleave(BLOCK, 1)[:, None]


def _fuse(captured: Tensor, fc: Tensor, norm: Tensor, dtype: torch.dtype) -> Tensor:
    return rms(linear(captured, fc, dtype), norm).to(dtype)


@dataclass(frozen=True)
class Blocks:
    """Where blocks stand."""

    #: positions of their rows [batch, blocks * BLOCK]
    at: Tensor
    #: positions of the text [1, T]
    text: Tensor
    #: what a row sees, as `visible` has it
    mask: Tensor


class Draft:
    """The draft's forward pass."""

    def __init__(self, dtype: torch.dtype, mask_id: int, compile: Any = no_compile) -> None:
        self.dtype = dtype
        self.mask_id = mask_id
        # Only the shape of this function does not depend on the text's length, and it has the most to fuse.
        self._ffn = compile(feed_forward)

    def __call__(self, w: Weights, base: Weights, captured: Tensor, seeds: Tensor, anchors: Tensor) -> Tensor:
        """Hidden states z [batch, blocks, BLOCK, HIDDEN] for the target's head.

        captured [batch, T, captures * HIDDEN]; seeds [batch, blocks] are the tokens at positions anchors
        [batch, blocks]; a block sees the text before its anchor. `base` are the target's weights.
        """
        batch, blocks = anchors.shape
        ids = torch.full((batch, blocks, BLOCK), self.mask_id, device=seeds.device)
        ids[..., 0] = seeds
        x = F.embedding(ids, base["token_embd.weight"]).flatten(1, 2)
        f = _fuse(captured, w["dflash.fc.weight"], w["dflash.hidden_norm.weight"], self.dtype)
        text = torch.arange(captured.shape[1], device=seeds.device)[None]
        at = (anchors[..., None] + torch.arange(BLOCK, device=seeds.device)).flatten(1)
        where = Blocks(at, text, visible(anchors, captured.shape[1]))
        for layer in range(LAYERS):
            x = self._mix(w, layer, x, f, where)
            x = self._feed(w, layer, x)
        return rms(x, w["output_norm.weight"]).unflatten(1, (blocks, BLOCK))

    def _mix(self, w: Weights, layer: int, x: Tensor, f: Tensor, where: Blocks) -> Tensor:
        """x + the layer's attention."""
        y = rms(x, w[f"blk.{layer}.attn_norm.weight"]).to(self.dtype)
        return x + self._attention(w, layer, y, f, where)

    def _attention(self, w: Weights, layer: int, y: Tensor, f: Tensor, where: Blocks) -> Tensor:
        """The attention of normed rows y to the text's features f and to their own blocks."""
        dtype = self.dtype
        wq, wk, wv, q_norm, k_norm, out = (w[f"blk.{layer}.attn_{n}.weight"] for n in _ATTENTION)
        both = torch.cat([f, y], 1)
        positions = torch.cat([where.text.expand(len(where.at), -1), where.at], 1)
        v = linear(both, wv, dtype).unflatten(-1, (KV_HEADS, HEAD))
        q = project(y, wq, q_norm, where.at, ROPE_BASE, dtype)
        k = project(both, wk, k_norm, positions, ROPE_BASE, dtype)
        return linear(attend(q, k, v, dtype, where.mask).flatten(-2), out, dtype)

    def _feed(self, w: Weights, layer: int, x: Tensor) -> Tensor:
        """x + the layer's MLP."""
        parts = (w[f"blk.{layer}.{n}.weight"] for n in ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"))
        return self._ffn(x.flatten(0, 1), *parts, self.dtype).view(x.shape)

    def drafted(self, w: Weights, base: Weights, z: Tensor, seeds: Tensor) -> Tensor:
        """The tokens [n, BLOCK - 1] of blocks behind their seeds [n], greedily; z [n, BLOCK - 1, HIDDEN]."""
        return linear(z, base["output.weight"], self.dtype).float().argmax(-1)

    def loss(self, w: Weights, base: Weights, captured: Tensor, ids: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """(weighted cross entropy, mean rows right before the first wrong one) of blocks of ids [batch, T'], where
        every anchor is at most T' - BLOCK."""
        rows = (anchors[..., None] + torch.arange(BLOCK, device=ids.device)).flatten(1)
        tokens = ids.gather(1, rows).unflatten(1, (-1, BLOCK))
        z = self(w, base, captured, tokens[..., 0], anchors)[:, :, 1:]
        losses, drafted = self.losses(w, base, z, tokens)
        weight = torch.exp(-torch.arange(BLOCK - 1, device=ids.device) / _GAMMA)
        right = (drafted == tokens[..., 1:]).long().cumprod(-1).sum(-1).float().mean()
        return (losses * weight).mean() / weight.mean(), right

    def losses(self, w: Weights, base: Weights, z: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(cross entropy of each row, the tokens that it prefers where those before it are right), both [batch, blocks,
        BLOCK - 1], of z [batch, blocks, BLOCK - 1, HIDDEN] and the blocks' tokens [batch, blocks, BLOCK]."""
        logits, labels = linear(z, base["output.weight"], self.dtype).float(), tokens[..., 1:]
        losses = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view(labels.shape)
        return losses, logits.argmax(-1)

    @torch.no_grad()
    def accepted(
        self, w: Weights, base: Weights, captured: Tensor, ids: Tensor, prompt: int, budget: int
    ) -> list[tuple[int, int]]:
        """(tokens before it, tokens committed by it) of each step of greedy runs of `budget` tokens after `prompt`.

        ids [batch, >= prompt + budget + BLOCK] is the target's greedy text, so a comparison with it verifies.
        """
        at = torch.full((len(ids),), prompt, device=ids.device)
        steps: list[tuple[int, int]] = []
        while True:
            live = (at < prompt + budget).nonzero()[:, 0]
            if not len(live):
                return steps
            here = at[live]
            tokens = ids[live].gather(1, here[:, None] + torch.arange(BLOCK, device=ids.device))
            z = self(w, base, captured[live], tokens[:, :1], here[:, None])[:, 0, 1:]
            drafted = self.drafted(w, base, z, tokens[:, 0])
            count = 1 + (drafted == tokens[:, 1:]).long().cumprod(-1).sum(-1)
            count = torch.minimum(count, prompt + budget - here)
            at[live] += count
            steps += zip((here - prompt).tolist(), count.tolist(), strict=True)
