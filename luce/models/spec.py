"""What a model is, as data: a family file turns GGUF metadata into a ModelSpec; layers are built from that alone.

Shapes are in elements. Tensor names follow the GGUF convention `blk.N.NAME`; a spec names only what differs between
families.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Activation = Literal["silu", "gelu"]
Gating = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al., arXiv 2309.00071, section 3): slow pairs are stretched by `factor`, fast ones are not; cos and
    sin are multiplied by 0.1 ln(factor) + 1."""

    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float


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
    yarn: Yarn | None = None


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention over the paged cache: query head h reads KV head h // (heads / kv_heads).

    `query_gate`: attn_q holds [head, (query, gate), head_dim] and the output is multiplied by sigmoid(gate) (Qwen3.5).
    `output_gate`: attn_gate gives that many values per head, 1 or head_dim, and the output is multiplied by their
    softplus (Laguna); 0 for none. `value_norm`: values are normalised per head, without a weight. `value_from_key`:
    the values are the key projection, before the key's norm and rotation. `donor`: the block whose keys and values this
    one reads, having none of its own.
    `window`: number of keys visible including the row's own, None for all. `bidirectional`: rows that are computed
    together see each other, later ones too, as far as the window goes either way.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    scale: float
    qk_norm: bool = False
    query_gate: bool = False
    output_gate: int = 0
    value_norm: bool = False
    value_from_key: bool = False
    donor: int | None = None
    window: int | None = None
    bidirectional: bool = False


#: head_dim and conv_kernel of the GatedDeltaNet that kernels/deltanet*.cu are compiled for
DELTA_HEAD_DIMS = (64, 128)
DELTA_CONV_KERNELS = (2, 3, 4)


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
class MoE:
    """`used` of `experts` gated MLPs of width `hidden`, and a shared one of width `shared` for every row.

    The router's scores are gated over all experts; the chosen ones' are divided by their sum if `normalise`, times
    `scale`. `bias`: exp_probs_b is added to the gated scores for choosing only. `shared` 0: no shared MLP;
    `shared_gate`: its result is multiplied by sigmoid(gate . x). `expert_scale`: ffn_down_exps.scale multiplies the
    weight of a chosen expert.
    """

    experts: int
    used: int
    hidden: int
    shared: int
    gating: Gating
    normalise: bool = True
    scale: float = 1.0
    bias: bool = False
    shared_gate: bool = False
    expert_scale: bool = False
    activation: Activation = "silu"


@dataclass(frozen=True)
class Layer:
    """Pre-norm block: x += mixer(norm(x)); x += ffn(norm(x)). The norms' tensor names differ between families."""

    mixer: Attention | GatedDeltaNet
    ffn: GatedMLP | MoE
    mixer_norm: str = "attn_norm"
    ffn_norm: str = "ffn_norm"


@dataclass(frozen=True)
class SandwichLayer:
    """Gemma's block: a norm before and after each part, then a scale on the whole stream.

    `experts` run beside the dense MLP, with norms of their own. With per-layer embeddings a third part follows, which
    mixes in this layer's input.
    """

    mixer: Attention
    ffn: GatedMLP
    experts: MoE | None = None


@dataclass(frozen=True)
class PageGroup:
    """Attention layers whose pages live and die together: all that see the same window."""

    window: int | None


@dataclass(frozen=True)
class Markers:
    """Texts around a part of a reply. Each begins with a token of its own, which is visible text to the tokenizer."""

    open: str
    close: str


@dataclass(frozen=True)
class Dialect:
    """How a family's chat template and replies are written.

    `reasoning` and `tool_call` mark these parts of a reply. `notes`: what the template does that a client may not
    expect, for people.
    """

    reasoning: Markers | None = None
    tool_call: Markers | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """One model. `eos` are token texts that end a reply beside the file's own eos and eot ids.

    `embedding_scale` multiplies token embeddings; `logit_softcap` c > 0 turns logits into c tanh(logits / c);
    `per_layer` is the width of per-layer embeddings, 0 for none. `captured`, which no file says, are the layers whose
    output a drafter reads, ascending; `ranked`, neither, whether pages of full attention are ranked (KVFlash). `tail`:
    positions before the newest that full attention should see, wherever the rest of the context is.
    """

    family: str
    hidden: int
    vocab: int
    context_length: int
    norm_eps: float
    layers: tuple[Layer | SandwichLayer, ...]
    tied_head: bool
    eos: tuple[str, ...] = ()
    nfc: bool = False
    skipped_layers: tuple[int, ...] = field(default=())
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0
    per_layer: int = 0
    captured: tuple[int, ...] = ()
    ranked: bool = False
    dialect: Dialect = Dialect()
    tail: int = 0

    @property
    def page_groups(self) -> tuple[PageGroup, ...]:
        """The distinct page groups, in the order of their first layer; empty if no layer attends."""
        windows = dict.fromkeys(b.mixer.window for b in self.layers if isinstance(b.mixer, Attention))
        return tuple(PageGroup(w) for w in windows)

    @property
    def recurrent(self) -> bool:
        """Whether any layer carries a state that cannot be rewound by shortening."""
        return any(isinstance(b.mixer, GatedDeltaNet) for b in self.layers)

    def donor(self, block: int) -> int | None:
        """The block whose keys and values `block` reads instead of its own."""
        mixer = self.layers[block].mixer
        return mixer.donor if isinstance(mixer, Attention) else None

    def ranks(self, block: int) -> bool:
        """Whether a block says which pages matter: if it has pages of full attention of its own."""
        mixer = self.layers[block].mixer
        return self.ranked and isinstance(mixer, Attention) and mixer.window is None and mixer.donor is None

    def lent(self, boundary: int) -> tuple[int, ...]:
        """The blocks before `boundary` whose keys and values blocks from there on read, ascending."""
        donors = {self.donor(block) for block in range(boundary, len(self.layers))}
        return tuple(sorted(donor for donor in donors if donor is not None and donor < boundary))

    def group_of(self, block: int) -> int | None:
        """The index of the page group that attention block `block` reads, None for a recurrent block."""
        mixer = self.layers[block].mixer
        if not isinstance(mixer, Attention):
            return None
        return self.page_groups.index(PageGroup(mixer.window))
