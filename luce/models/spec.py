"""What a model is, as data: a family file turns GGUF metadata into a ModelSpec; layers are built from that alone.

Shapes are in elements. Tensor names follow the GGUF convention `blk.N.NAME`; a spec names only what differs between
families.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Activation = Literal["silu", "gelu"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding over the first `dims` elements of a head.

    `adjacent` pairs (x[2i], x[2i+1]) as GGUF `llama` files need; otherwise (x[i], x[i + dims/2]).
    `sections` are the M-RoPE sections, interleaved as in Qwen3.5; with equal positions on all axes they change nothing.
    `factors` names a tensor of dims/2 divisors of the frequencies; `linear` divides every position.
    """

    dims: int
    base: float
    adjacent: bool = False
    sections: tuple[int, ...] = ()
    factors: str | None = None
    linear: float = 1.0


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention over the paged cache: query head h reads KV head h // (heads / kv_heads).

    `gated`: attn_q holds [head, (query, gate), head_dim] and the output is multiplied by sigmoid(gate) (Qwen3.5).
    `window`: number of keys visible including the row's own, None for all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    scale: float
    qk_norm: bool = False
    gated: bool = False
    window: int | None = None


@dataclass(frozen=True)
class GatedDeltaNet:
    """Gated delta rule with a causal convolution before it.

    Value head h reads key head h mod key_heads (the tiled order of GGUF files).
    """

    key_heads: int
    value_heads: int
    head_dim: int
    conv_kernel: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: all q heads, all k heads, all v heads."""
        return (2 * self.key_heads + self.value_heads) * self.head_dim


@dataclass(frozen=True)
class GatedMLP:
    """down(act(gate x) * up x)."""

    hidden: int
    activation: Activation = "silu"


@dataclass(frozen=True)
class Block:
    """Pre-norm block: x += mixer(norm(x)); x += ffn(norm(x)). The norms' tensor names differ between families."""

    mixer: Attention | GatedDeltaNet
    ffn: GatedMLP
    mixer_norm: str = "attn_norm"
    ffn_norm: str = "ffn_norm"


@dataclass(frozen=True)
class PageGroup:
    """Attention layers whose pages live and die together: all that see the same window."""

    window: int | None


@dataclass(frozen=True)
class ModelSpec:
    """One model. `eos` are token texts that end a reply beside the file's own eos and eot ids."""

    family: str
    hidden: int
    vocab: int
    context_length: int
    norm_eps: float
    blocks: tuple[Block, ...]
    tied_head: bool
    eos: tuple[str, ...] = ()
    nfc: bool = False
    skipped_blocks: tuple[int, ...] = field(default=())

    @property
    def page_groups(self) -> tuple[PageGroup, ...]:
        """The distinct page groups, in the order of their first layer; empty if no layer attends."""
        windows = dict.fromkeys(b.mixer.window for b in self.blocks if isinstance(b.mixer, Attention))
        return tuple(PageGroup(w) for w in windows)

    @property
    def recurrent(self) -> bool:
        """Whether any layer carries a state that cannot be rewound by shortening."""
        return any(isinstance(b.mixer, GatedDeltaNet) for b in self.blocks)

    def group_of(self, block: int) -> int | None:
        """The index of the page group that attention block `block` reads, None for a recurrent block."""
        mixer = self.blocks[block].mixer
        if not isinstance(mixer, Attention):
            return None
        return self.page_groups.index(PageGroup(mixer.window))
