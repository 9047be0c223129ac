"""A model as data: a family file turns GGUF metadata into a ModelSpec; layers are built from that alone.

Shapes are in elements. Tensor names follow the GGUF convention `blk.N.NAME`; a spec names only the tensors whose names
differ between families.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from luce.models.calls import Calls
from luce.models.channels import Channels
from luce.models.tool_formats import HERMES

#: silu and gelu (its tanh approximation) of the gate times up; clamped_swiglu (gpt-oss): (u + 1) g sigmoid(1.702 g)
#: with g = min(gate, 7) and u = up clamped to [-7, 7]
Activation = Literal["silu", "gelu", "clamped_swiglu"]
Gating = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al., arXiv 2309.00071, section 3) divides the frequencies of slow pairs by `factor` and leaves fast
    ones as they are; cos and sin are multiplied by (0.1 ln(factor) + 1) / (0.1 log_multiplier ln(factor) + 1)."""

    factor: float
    #: positions of the training before the stretching
    original_context: int
    #: pairs that turn more often than this in the original context are fast
    beta_fast: float
    #: pairs that turn less often than this in the original context are slow; between the two lies a linear ramp
    beta_slow: float
    #: `mscale_all_dim` of checkpoints
    log_multiplier: float = 0.0
    #: the ramp begins and ends at whole pairs
    rounded: bool = True


@dataclass(frozen=True)
class Temperature:
    """Queries at position p are multiplied by 1 + scale ln(1 + floor(p / length)) (Llama 4, Ministral 3)."""

    scale: float
    length: int


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding over the first `dims` elements of a head."""

    dims: int
    base: float
    #: pairs are (x[2i], x[2i+1]), as GGUF `llama` files need; otherwise (x[i], x[i + dims/2])
    adjacent: bool = False
    #: the M-RoPE sections, interleaved as in Qwen3.5; with equal positions on all axes they change nothing
    sections: tuple[int, ...] = ()
    #: name of a tensor [dims/2] of divisors of the frequencies
    factors: str | None = None
    #: name of the tensor of those that hold in their place in stretched sequences (luce.runtime.step.STRETCHED)
    long_factors: str | None = None
    #: divisor of every position
    linear: float = 1.0
    yarn: Yarn | None = None
    #: multiplies cos and sin
    magnitude: float = 1.0


@dataclass(frozen=True)
class Latent:
    """The parts of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) in its absorbed form.

    A row's keys and values of all heads are one latent c, `rank` values that attn_kv_a_mqa gives and a norm scales, and
    one rotated key. Queries are taken to the latents' space: a head's score is attn_k_b q . c + its rotated part times
    the rotated key, and its result attn_v_b times the weighted sum of latents. So `Attention` has one KV head, the
    rotated key and then c, and a row's values are its keys.
    """

    rank: int
    #: width of the compressed queries, of which attn_q_b makes the heads; 0: attn_q makes them of the row
    query_rank: int
    #: values of a query head that are not rotated
    plain: int
    #: values of a head's result
    value: int


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention over the paged cache: query head h reads KV head h // (heads / kv_heads)."""

    heads: int
    kv_heads: int
    head_dim: int
    #: None: heads are not rotated (NoPE)
    rope: Rope | None
    scale: float
    #: a norm on each query and key head, or one on all query heads and one on all key heads together
    qk_norm: Literal["head", "whole"] | None = None
    #: attn_q, attn_k and attn_v have biases
    bias: bool = False
    #: attn_output has a bias
    out_bias: bool = False
    #: attn_q holds [head, (query, gate), head_dim] and the output is multiplied by sigmoid(gate) (Qwen3.5)
    query_gate: bool = False
    #: values per head that attn_gate gives, 1 or head_dim; the output is multiplied by their softplus (Laguna). 0: none
    output_gate: int = 0
    #: values are normalised per head, without a weight
    value_norm: bool = False
    #: the values are the key projection, before the key's norm and rotation
    value_from_key: bool = False
    #: the layer whose keys and values this one reads, having none of its own
    donor: int | None = None
    #: number of keys visible, including the row's own; None: all
    window: int | None = None
    #: rows of one step see each other, later ones too, as far as the window goes either way
    bidirectional: bool = False
    temperature: Temperature | None = None
    #: c > 0 turns scores, after the scale, into c tanh(scores / c)
    softcap: float = 0.0
    #: attn_sinks holds a number z for each query head, and e^z joins the sum that divides the weights (gpt-oss)
    sinks: bool = False
    latent: Latent | None = None


@dataclass(frozen=True)
class ShortConv:
    """Gated short convolution (LFM2): out(c * conv(b * x)), b, c and x being the thirds of in(y), with the newest
    `kernel` rows of b * x of each channel. These rows are kept in pages like keys: a window that can be shortened."""

    kernel: int

    @property
    def window(self) -> int:
        """Rows that a row reads, its own included."""
        return self.kernel


#: head_dim and conv_kernel of the GatedDeltaNet that kernels/deltanet*.cu are compiled for
DELTA_HEAD_DIMS = (64, 128)
DELTA_CONV_KERNELS = (2, 3, 4)


@dataclass(frozen=True)
class GatedDeltaNet:
    """Gated delta rule with a causal convolution before it.

    Value head h reads key head h mod key_heads (the tiled order of Qwen3.5's files).
    """

    key_heads: int
    value_heads: int
    head_dim: int
    conv_kernel: int
    #: the file's value heads that read one key head lie side by side (Qwen3-Next); loading reorders them
    grouped: bool = False

    @property
    def channels(self) -> int:
        """Channels of the convolution: all q heads, all k heads, all v heads."""
        return (2 * self.key_heads + self.value_heads) * self.head_dim


@dataclass(frozen=True)
class GatedMLP:
    """down(act(gate x) * up x)."""

    #: width between the projections
    hidden: int
    activation: Activation = "silu"
    #: all projections have biases
    bias: bool = False
    #: a gate becomes max(0, gate - mean - sparsity * std) over its row before the activation (Gemma 3n); None: it stays
    sparsity: float | None = None


@dataclass(frozen=True)
class PlainMLP:
    """down(gelu(up x))."""

    #: width between the projections
    hidden: int
    #: both projections have biases
    bias: bool = False


@dataclass(frozen=True)
class ExpertGroups:
    """Experts in `count` equal runs, of which only the `used` best can be chosen from (DeepSeek-V2, V3)."""

    count: int
    used: int
    #: a group's score is that of its best expert, or the sum of its two best
    score: Literal["best", "two best"]


@dataclass(frozen=True)
class MoE:
    """`used` of `experts` gated MLPs of width `hidden`, and a shared one of width `shared` for every row.

    The router's scores are gated over all experts.
    """

    experts: int
    used: int
    hidden: int
    #: 0: no shared MLP
    shared: int
    gating: Gating
    #: the scores of the chosen experts are divided by their sum
    normalise: bool = True
    #: multiplies the scores of the chosen experts
    scale: float = 1.0
    #: exp_probs_b is added to the gated scores, for choosing only
    bias: bool = False
    #: the shared MLP's result is multiplied by sigmoid(gate . x)
    shared_gate: bool = False
    #: ffn_down_exps.scale multiplies the weight of a chosen expert
    expert_scale: bool = False
    activation: Activation = "silu"
    #: the router and all projections of the experts have biases
    biases: bool = False
    groups: ExpertGroups | None = None


@dataclass(frozen=True)
class DynamicConv:
    """A grouped causal convolution over the rows of a block, around a part of a layer (DFlash2).

    With x the part's normed input, c = P x of each row, and conv(s, u)[i] = sum over the taps t of (base[s, t] +
    c[i, s, t], one value for each group of channels) * u[i - t], where u is 0 before the block: the part computes from
    conv(0, x), and conv(1, its output) is added to the stream.
    """

    #: a row and the rows before it
    taps: int
    #: channels that share a coefficient; divides the width of the stream
    group: int


@dataclass(frozen=True)
class Layer:
    """x += post(mixer(pre(x))); x += post(ffn(pre(x))), with four norms, of which some may be missing.

    The norms' tensor names differ between families; None: there is no such norm.
    """

    mixer: Attention | ShortConv | GatedDeltaNet
    ffn: GatedMLP | PlainMLP | MoE
    mixer_norm: str | None = "attn_norm"
    ffn_norm: str | None = "ffn_norm"
    mixer_post_norm: str | None = None
    ffn_post_norm: str | None = None
    #: multiplies what is added to x
    residual_scale: float = 1.0
    #: x += mixer(y) + ffn(y) with y = mixer_norm(x) (Command R)
    parallel: bool = False
    #: around the mixer, and another one around ffn; not with `parallel`
    conv: DynamicConv | None = None


@dataclass(frozen=True)
class SandwichLayer:
    """Gemma 4's layer: a norm before and after each part, then a scale on the whole stream.

    With per-layer embeddings a third part follows, which mixes in this layer's input.
    """

    mixer: Attention
    ffn: GatedMLP
    #: run beside the dense MLP, with norms of their own
    experts: MoE | None = None


#: copies of the residual stream for which kernels/altup.cu is compiled
ALTUP_STREAMS = 4


@dataclass(frozen=True)
class AltUpLayer:
    """Gemma 3n's layer, which keeps four copies x_0 .. x_3 of the stream (AltUp, Baykal et al., NeurIPS 2023).

    With mod(u) = tanh(altup_router (rms(u) altup_router_norm / hidden)) and c = altup_predict_coef mod(x_0), copy j
    becomes p_j = x_j + sum over i of c[4 j + i] x_i. With y = attn_norm(p_0) and LAuReL's
    l = y + laurel_post_norm(laurel_r laurel_l y), b = (p_0 + post_attention_norm(mixer(y)) + l) / sqrt(2) and
    r = b + post_ffw_norm(ffn(ffn_norm(b))). With d = altup_correct_coef mod(r), x_j = p_j + (1 + d[j]) (r - p_0).
    The per-layer input is mixed with x_0 altup_correct_scale, and the result added to all copies but the first.
    """

    mixer: Attention
    ffn: GatedMLP
    #: rank of laurel_l
    laurel: int


@dataclass(frozen=True)
class PageGroup:
    """Layers that share one page table: all attention layers and convolutions with the same window."""

    window: int | None


@dataclass(frozen=True)
class Markers:
    """Texts around a part of a reply. Each begins with a token of its own, which is visible text to the tokenizer."""

    open: str
    close: str


@dataclass(frozen=True)
class MessageMarkers:
    """Texts between which a chat template writes a message: one of `starts`, the message, one of `ends`."""

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    #: each marker is one special token, which no message can contain; in a vocabulary without these tokens there are no
    #: markers
    special: bool = True


#: ChatML
CHATML = MessageMarkers(starts=("<|im_start|>",), ends=("<|im_end|>",))


@dataclass(frozen=True)
class ReasoningBudget:
    """How reasoning ends when its budget is used up, and how long a family's replies are, reasoning included."""

    #: what leads to the closing marker, as the family's makers write it
    lead_in: str = ""
    #: what a reply has behind the closing marker, special tokens included
    lead_out: str = ""
    #: tokens that the family's makers recommend for a reply
    usual_tokens: int = 16000
    #: tokens that they recommend for a reply to a complex problem, if that is more
    most_tokens: int = 0
    #: tokens of the reasoning at efforts that they name themselves
    tiers: tuple[tuple[str, int], ...] = ()
    #: tokens of a reply that a limited reasoning leaves to the text
    reserved_tokens: int = 4096
    #: most tokens of a chat reply without a limit of its own; None: as many as the context has
    limit: int | None = None


@dataclass(frozen=True)
class Dialect:
    """The format of a family's prompts and replies."""

    reasoning: Markers | None = None
    budget: ReasoningBudget = ReasoningBudget()
    #: tool calls, unless the chat template has texts of another dialect of luce/models/tool_formats.py
    calls: Calls = HERMES
    #: facts about the template that may surprise a client, for people
    notes: tuple[str, ...] = ()
    #: around each message of a prompt
    message: MessageMarkers | None = None
    #: the messages of which a reply consists; None: a reply is one text
    channels: Channels | None = None


@dataclass(frozen=True)
class LongContext:
    """What LongRoPE (Ding et al., arXiv 2402.13753) changes for sequences beyond the original context: other divisors
    hold at all of their positions."""

    #: positions of the original context
    original: int
    #: positions of the whole context
    length: int
    #: name of the tensor of divisors
    factors: str


AnyLayer = Layer | SandwichLayer | AltUpLayer


@dataclass(frozen=True)
class ModelSpec:
    """One model."""

    family: str
    #: width of the residual stream
    hidden: int
    vocab: int
    context_length: int
    norm_eps: float
    layers: tuple[AnyLayer, ...]
    #: the head is the embedding table
    tied_head: bool
    #: texts of tokens that end a reply, beside the file's own eos and eot ids
    eos: tuple[str, ...] = ()
    #: text is brought into Unicode normal form C before it is tokenized
    nfc: bool = False
    #: indices of stored layers that the forward pass leaves out: they predict further tokens (multi-token prediction)
    skipped_layers: tuple[int, ...] = field(default=())
    #: multiplies token embeddings
    embedding_scale: float = 1.0
    #: norms of rows: by the root mean square, or LayerNorm: (x - mean) / sqrt(var + norm_eps)
    norm: Literal["rms", "layer"] = "rms"
    #: norms of rows have biases
    norm_bias: bool = False
    #: the last norm's tensor name
    final_norm: str = "output_norm"
    #: multiplies logits
    logit_scale: float = 1.0
    #: c > 0 turns logits into c tanh(logits / c)
    logit_softcap: float = 0.0
    #: width of per-layer embeddings, 0 for none
    per_layer: int = 0
    dialect: Dialect = Dialect()
    #: positions before the newest one that full attention should see, wherever the rest of the context is
    tail: int = 0
    #: id of the token whose embedding the masked rows of a draft block begin with, for drafts whose file names none
    mask_token: int | None = None
    #: how sequences of more than `context_length` positions are run; None: there is no other way
    long_context: LongContext | None = None

    @property
    def streams(self) -> int:
        """Copies of the residual stream: 1, or those that AltUp layers keep."""
        return ALTUP_STREAMS if any(isinstance(layer, AltUpLayer) for layer in self.layers) else 1

    @property
    def longest_context(self) -> int:
        """The most positions of a sequence that `for_context` can give."""
        return self.context_length if self.long_context is None else self.long_context.length

    @property
    def original_context(self) -> int | None:
        """Most positions of a sequence that is not stretched, where longer ones can be; None: no sequence can."""
        long = self.long_context
        return long.original if long is not None and self.context_length == long.length else None

    def for_context(self, positions: int) -> ModelSpec:
        """The model for sequences of up to `positions`, 0 for the most that there can be: with the divisors of the long
        context beside its own if there are so many."""
        long = self.long_context
        if long is None or 0 < positions <= self.context_length:
            return self
        layers = tuple(_with_long_factors(layer, long.factors) for layer in self.layers)
        return replace(self, context_length=long.length, layers=layers)

    @property
    def page_groups(self) -> tuple[PageGroup, ...]:
        """The distinct page groups, in the order of their first layer; empty if no layer has pages."""
        windows = dict.fromkeys(x.mixer.window for x in self.layers if not isinstance(x.mixer, GatedDeltaNet))
        return tuple(PageGroup(w) for w in windows)

    @property
    def recurrent(self) -> bool:
        """Whether any layer carries a state that cannot be rewound by shortening."""
        return any(isinstance(layer.mixer, GatedDeltaNet) for layer in self.layers)

    def mixture(self, layer: int) -> MoE | None:
        """The experts of a layer; None if it has none."""
        own = self.layers[layer]
        part = own.experts if isinstance(own, SandwichLayer) else own.ffn
        return part if isinstance(part, MoE) else None

    def donor(self, layer: int) -> int | None:
        """The layer whose keys and values `layer` reads instead of its own."""
        mixer = self.layers[layer].mixer
        return mixer.donor if isinstance(mixer, Attention) else None

    def owns_full_pages(self, layer: int) -> bool:
        """Whether a layer has pages of full attention of its own."""
        mixer = self.layers[layer].mixer
        return isinstance(mixer, Attention) and mixer.window is None and mixer.donor is None

    def lent(self, boundary: int) -> tuple[int, ...]:
        """The layers before `boundary` whose keys and values later layers read, ascending."""
        donors = {self.donor(layer) for layer in range(boundary, len(self.layers))}
        return tuple(sorted(donor for donor in donors if donor is not None and donor < boundary))

    def group_of(self, layer: int) -> int | None:
        """The index of the page group that a layer reads, None for a recurrent layer."""
        mixer = self.layers[layer].mixer
        if isinstance(mixer, GatedDeltaNet):
            return None
        return self.page_groups.index(PageGroup(mixer.window))


def _with_long_factors(layer: AnyLayer, factors: str) -> AnyLayer:
    """A layer whose rotation has these divisors for stretched sequences."""
    mixer = layer.mixer
    if not isinstance(layer, Layer) or not isinstance(mixer, Attention):
        return layer
    if mixer.rope is None or mixer.rope.factors is None:
        return layer
    return replace(layer, mixer=replace(mixer, rope=replace(mixer.rope, long_factors=factors)))
