"""A DFlash draft as data, read from its file's metadata (Chen et al., "DFlash", arXiv 2602.06036).

A draft is a small Qwen3-like decoder without embedding and head of its own. It computes the rows of a block in one
pass. Its layers also attend to context rows: keys and values of hidden states that the target computed for the text so
far, fused into one feature per position.

Keys are `A.NAME` with A the architecture. A file with an unknown key of A is refused: the draft may depend on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from luce.draft.dflash.correction import DOMINO, DSPARK, SELECTOR_BEFORE, CorrectionSpec
from luce.errors import ModelError, UnsupportedError
from luce.gguf.metadata import shown
from luce.models.dflash import ARCHITECTURES, IGNORED_KEYS
from luce.models.keys import Source, attention_heads, rope_dims
from luce.models.spec import Attention, DynamicConv, GatedMLP, Layer, ModelSpec, Rope, Yarn
from luce.runtime.step import MAX_CANDIDATES

_log = logging.getLogger(__name__)

# Far above real drafts; they bound the memory that a hostile file makes us allocate.
_MOST_LAYERS, _MOST_HIDDEN, _MOST_FFN, _MOST_HEADS, _MOST_HEAD_DIM = 1024, 131072, 524288, 1024, 1024
_MOST_BLOCK, _MOST_CAPTURES, _MOST_VOCAB, _MOST_TAPS = 64, 8, 1 << 24, 4

#: names in files of the tensors outside layers, the usual one first
FUSION = ("dflash.fc.weight", "dflash_fc.weight")
FUSION_NORM = ("dflash.hidden_norm.weight", "dflash_hidden_norm.weight")
CAPTURE_NORM = ("dflash.aux_hidden_norm.{}.weight", "dflash_aux_hidden_norm.{}.weight")
CAPTURE_NORM_BARE = "dflash_aux_hidden_norm.{}"
FINAL_NORM = "output_norm.weight"
MASK_EMBEDDING = "dflash.mask_embedding.weight"

#: the keys of DFlash2: a file has all of them, or none above 0
_DFLASH2 = tuple(
    f"dflash.{name}" for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
)
_READ = frozenset(
    {
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "attention.causal",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "final_logit_softcapping",
        "dflash.n_target_layers",
        "dflash.n_target_features",
        "dflash.block_size",
        "dflash.mask_token_id",
        "dflash.target_layer_ids",
        "dflash.context_kv_layer_norm",
        "dflash.backbone_rotary_base",
        "dflash.input_embedding_scale",
        "dflash.output_multiplier",
        *IGNORED_KEYS,
        *(f"{DOMINO}{name}" for name in ("enabled", "gru_hidden_dim", "emb_dim", "vocab_size")),
        *(f"{DSPARK}{name}" for name in ("enabled", "markov_rank", "vocab_size", "confidence_dim")),
        f"{DSPARK}confidence.enabled",
        *_DFLASH2,
    }
)


@dataclass(frozen=True)
class DFlashSpec:
    """A DFlash draft, which borrows the target's embedding and head."""

    path: str
    #: width of the residual stream, the target's
    hidden: int
    #: 0 if the file does not say
    vocab: int
    #: positions that the draft was trained with
    context_length: int
    norm_eps: float
    #: the rows of a block see each other in both directions where a layer's attention is bidirectional
    layers: tuple[Layer, ...]
    #: rows of a block: the seed and block - 1 predictions
    block: int
    #: id of the token whose embedding the rows behind the seed begin with; None: the target's mask_token
    mask_token: int | None
    #: layers of the target whose outputs are fused, ascending; None: spread over the target
    captures: tuple[int, ...] | None
    #: number of captures, 1 to 8, each `hidden` wide
    count: int
    #: each captured row is normed before the rows are fused
    capture_norms: bool = False
    #: a layer's input norm is applied to the features before its keys and values
    context_norm: bool = False
    #: rotary base of the keys of context rows, if it differs from that of block rows
    context_base: float | None = None
    #: the draft has its own input for the rows behind the seed, and needs no mask_token
    mask_embedding: bool = False
    #: rows of the target's embedding are multiplied by the target's own factor
    target_scale: bool = False
    #: multiplies the inputs of a block
    embedding_scale: float = 1.0
    #: multiplies the logits of the target's head
    logit_scale: float = 1.0
    #: c > 0 turns logits x into c tanh(x / c)
    logit_softcap: float = 0.0
    #: the head that corrects a block's tokens
    correction: CorrectionSpec | None = None

    @property
    def model(self) -> ModelSpec:
        """The layers alone, as luce.layers.build takes them."""
        return ModelSpec(
            family="dflash",
            hidden=self.hidden,
            vocab=self.vocab,
            context_length=self.context_length,
            norm_eps=self.norm_eps,
            layers=self.layers,
            tied_head=False,
        )

    def captured(self, target: ModelSpec) -> tuple[int, ...]:
        """The layers of a target whose outputs the draft reads. Raises ModelError if the two do not fit."""
        layers = len(target.layers)
        if self.hidden != target.hidden:
            raise ModelError(
                f"{self.path}: this draft expects hidden size {self.hidden}; the model has {target.hidden}"
            )
        if self.vocab and self.vocab != target.vocab:
            raise ModelError(
                f"{self.path}: this draft expects a vocabulary of {self.vocab} tokens; the model has {target.vocab}"
            )
        found = self.captures if self.captures is not None else spread(self.count, layers)
        if found[-1] >= layers:
            raise ModelError(f"{self.path}: this draft reads layer {found[-1]} of the model, which has {layers} layers")
        return found


def spread(count: int, layers: int) -> tuple[int, ...]:
    """The layers of `count` captures in files without dflash.target_layer_ids: from 1 to three before the end."""
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + index * (layers - 4) / (count - 1)) for index in range(count))


def read_dflash(source: Source, *, window: int = 0) -> DFlashSpec:
    """The spec of a draft file.

    `window` > 0 makes every layer but the last slide with it, whatever the file says. Raises UnsupportedError or
    FormatError naming the file and the key or tensor that is wrong, missing or of an unsupported variant.
    """
    if source.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedError(
            f"{source.path}: general.architecture {source.architecture!r} is not a DFlash draft; those are {known}"
        )
    _refuse_unknown(source)
    layers = _bounded(source, "block_count", _MOST_LAYERS)
    hidden = _bounded(source, "embedding_length", _MOST_HIDDEN)
    attention = _attention(source)
    sliding, size = _sliding(source, layers, window)
    causal = source.metadata.boolean(source.key("attention.causal"), default=None)
    context_length = source.positive("context_length")
    ffn = GatedMLP(_bounded(source, "feed_forward_length", _MOST_FFN))
    gate, block, conv = _gate(source, layers, attention), _block(source), _conv(source, hidden)
    specs = tuple(
        Layer(
            mixer=attention(
                output_gate=gate,
                # A layer that slides by name only is still causal; its window is then the whole context.
                window=(size or context_length) if sliding[layer] else None,
                bidirectional=not (sliding[layer] if causal is None else causal),
            ),
            ffn=ffn,
            ffn_norm=_either(source, layer, "ffn_norm", "post_attention_norm"),
            conv=conv,
        )
        for layer in range(layers)
    )
    count = _fused(source, hidden)
    norms = _capture_norms(source, count)
    # Files with a gate or with capture norms come from a family that norms its context in every layer.
    flagged = source.integer("dflash.context_kv_layer_norm", 0) != 0
    based = source.key("dflash.backbone_rotary_base") in source.metadata
    mask = source.integer("dflash.mask_token_id", -1)
    vocab = source.integer("vocab_size", 0)
    if conv is not None and conv.taps > block:
        raise source.refuse("dflash.conv_kernel_size", f"is {conv.taps}, more than the {block} rows of a block")
    if vocab and mask >= vocab:
        raise source.refuse("dflash.mask_token_id", f"is {mask}, but the vocabulary has {vocab} tokens")
    return DFlashSpec(
        path=source.path,
        hidden=hidden,
        vocab=vocab,
        context_length=context_length,
        norm_eps=source.above("attention.layer_norm_rms_epsilon"),
        layers=specs,
        block=block,
        mask_token=None if mask < 0 else mask,
        captures=_captures(source, count),
        count=count,
        capture_norms=norms,
        context_norm=flagged or norms or gate > 0,
        context_base=source.above("dflash.backbone_rotary_base", least=1.0) if based else None,
        mask_embedding=MASK_EMBEDDING in source.tensors,
        target_scale=ARCHITECTURES[source.architecture],
        embedding_scale=source.above("dflash.input_embedding_scale", 1.0),
        logit_scale=source.above("dflash.output_multiplier", 1.0),
        logit_softcap=_softcap(source),
        correction=_correction(source, hidden) if conv is None else _selector(source, vocab),
    )


def _refuse_unknown(source: Source) -> None:
    prefix = source.key("")
    for key in source.metadata:
        name = key.removeprefix(prefix)
        if name != key and name not in _READ:
            raise source.refuse(name, "is unknown: the draft may depend on it")


def _correction(source: Source, hidden: int) -> CorrectionSpec | None:
    domino, dspark = (source.integer(f"{name}enabled", 0) for name in (DOMINO, DSPARK))
    if domino and dspark:
        raise source.refuse(
            f"{DSPARK}enabled", f"is set, and so is {DOMINO}enabled: a draft can have one correction head"
        )
    if domino:
        vocab = _bounded(source, f"{DOMINO}vocab_size", _MOST_VOCAB)
        width, inner = (_bounded(source, f"{DOMINO}{name}", _MOST_HIDDEN) for name in ("gru_hidden_dim", "emb_dim"))
        return CorrectionSpec("domino", vocab, width, inner)
    if not dspark:
        return None
    rank, confidence = _bounded(source, f"{DSPARK}markov_rank", _MOST_HIDDEN), 0
    if source.integer(f"{DSPARK}confidence.enabled", 0):
        confidence = source.positive(f"{DSPARK}confidence_dim")
        if confidence not in (hidden, hidden + rank):
            expected = f"expected {hidden} or {hidden + rank}"
            raise source.refuse(f"{DSPARK}confidence_dim", f"is {confidence}, {expected}")
    return CorrectionSpec("dspark", _bounded(source, f"{DSPARK}vocab_size", _MOST_VOCAB), rank, confidence=confidence)


def _conv(source: Source, hidden: int) -> DynamicConv | None:
    """The convolutions of a DFlash2 draft; None for a draft of the first generation."""
    if not any(source.integer(name, 0) for name in _DFLASH2):
        return None
    taps, group = source.positive("dflash.conv_kernel_size"), source.positive("dflash.conv_group_size")
    if taps > _MOST_TAPS:
        raise source.refuse("dflash.conv_kernel_size", f"is {taps}, more than {_MOST_TAPS}")
    if hidden % group:
        raise source.refuse("dflash.conv_group_size", f"is {group}, which does not divide the hidden size {hidden}")
    return DynamicConv(taps, group)


def _selector(source: Source, vocab: int) -> CorrectionSpec:
    for name in (f"{DOMINO}enabled", f"{DSPARK}enabled"):
        if source.integer(name, 0):
            raise source.refuse(
                name, "is set, but a DFlash2 draft has a selector: a draft can have one correction head"
            )
    rank, top = _bounded(source, "dflash.selector_rank", _MOST_HIDDEN), source.positive("dflash.selector_top_k")
    table = source.tensors.get(SELECTOR_BEFORE)
    if table is None:
        raise UnsupportedError(f"{source.path}: tensor {SELECTOR_BEFORE} is missing")
    rows = vocab or table.rows
    if top > min(MAX_CANDIDATES, rows):
        raise source.refuse("dflash.selector_top_k", f"is {top}, more than {min(MAX_CANDIDATES, rows)}")
    return CorrectionSpec("selector", rows, rank, top=top)


def _bounded(source: Source, name: str, most: int) -> int:
    value = source.positive(name)
    if value > most:
        raise source.refuse(name, f"is {value}, more than {most}")
    return value


def _softcap(source: Source) -> float:
    """0 for none."""
    name = "final_logit_softcapping"
    return source.above(name) if source.number(name, 0.0) else 0.0


def _attention(source: Source) -> Callable[..., Attention]:
    """Makes the attention of a layer; the parameters differ between layers."""
    for name in ("attention.head_count", "attention.head_count_kv"):
        _bounded(source, name, _MOST_HEADS)
    for name in ("attention.key_length", "attention.value_length"):
        _bounded(source, name, _MOST_HEAD_DIM)
    heads = attention_heads(source)
    if heads.head_dim % 2:
        raise source.refuse("attention.key_length", f"is {heads.head_dim}, expected an even number")
    rope = _rope(source, heads.head_dim)

    def attention(*, output_gate: int, window: int | None, bidirectional: bool) -> Attention:
        return Attention(
            heads=heads.heads,
            kv_heads=heads.kv_heads,
            head_dim=heads.head_dim,
            rope=rope,
            scale=heads.head_dim**-0.5,
            qk_norm="head",
            output_gate=output_gate,
            window=window,
            bidirectional=bidirectional,
        )

    return attention


def _rope(source: Source, head_dim: int) -> Rope:
    kind = source.metadata.string(source.key("rope.scaling.type"), default="none")
    if kind not in ("none", "linear", "yarn"):
        raise source.refuse("rope.scaling.type", f"is {shown(kind)}, expected none, linear or yarn")
    factor = source.above("rope.scaling.factor") if kind != "none" else 1.0
    yarn = None
    if kind == "yarn":
        yarn = Yarn(
            factor=factor,
            original_context=source.positive("rope.scaling.original_context_length"),
            beta_fast=source.above("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=source.above("rope.scaling.yarn_beta_slow", 1.0),
        )
    base = source.above("rope.freq_base", least=1.0)
    return Rope(dims=rope_dims(source, head_dim), base=base, linear=factor if kind == "linear" else 1.0, yarn=yarn)


def _sliding(source: Source, layers: int, window: int) -> tuple[Sequence[bool], int]:
    """A flag for each layer that slides, and the window of these layers, 0 for none."""
    if window:
        return [layer < layers - 1 for layer in range(layers)], window
    size = source.integer("attention.sliding_window", 0)
    if size < 0:
        raise source.refuse("attention.sliding_window", f"is {size}, expected at least 0")
    key = source.key("attention.sliding_window_pattern")
    if key not in source.metadata:
        if size:
            raise source.refuse(
                "attention.sliding_window_pattern", f"is missing, but attention.sliding_window is {size}"
            )
        return [False] * layers, 0
    flags = source.metadata.booleans(key)
    if len(flags) != layers:
        raise source.refuse("attention.sliding_window_pattern", f"has {len(flags)} entries for {layers} layers")
    return flags, size


def _gate(source: Source, layers: int, attention: Callable[..., Attention]) -> int:
    """Values per head of the output gate, 0 for no gate; the same in all layers."""
    spec = attention(output_gate=0, window=None, bidirectional=False)
    found = [source.tensors.get(f"blk.{layer}.attn_gate.weight") for layer in range(layers)]
    rows = {0 if tensor is None else tensor.rows for tensor in found}
    for size in (0, 1, spec.head_dim):
        if rows == {spec.heads * size}:
            return size
    raise UnsupportedError(
        f"{source.path}: tensors blk.N.attn_gate.weight must be in all layers or in none, with a row for each of "
        f"{spec.heads} heads or of {spec.heads * spec.head_dim} channels"
    )


def _either(source: Source, layer: int, *parts: str) -> str:
    """The name under which the file has a part; the first one if it has none of them."""
    return next((part for part in parts if f"blk.{layer}.{part}.weight" in source.tensors), parts[0])


def _fused(source: Source, hidden: int) -> int:
    """Number of captures. The shape of the fusion matrix decides."""
    name = stored(source, FUSION)
    fusion = source.tensors.get(name)
    if fusion is None:
        raise UnsupportedError(f"{source.path}: tensor {name} is missing")
    count = fusion.cols // hidden
    if fusion.rows != hidden or fusion.cols != count * hidden or not 1 <= count <= _MOST_CAPTURES:
        raise UnsupportedError(
            f"{source.path}: tensor {name} has shape {list(fusion.shape)}, expected [N * {hidden}, {hidden}] with N of "
            f"1 to {_MOST_CAPTURES}"
        )
    for key, expected in (("dflash.n_target_layers", count), ("dflash.n_target_features", fusion.cols)):
        if source.integer(key, expected) != expected:
            _log.warning(
                "%s: %s is %d, but %s says %d", source.path, source.key(key), source.integer(key), name, expected
            )
    return count


def _captures(source: Source, count: int) -> tuple[int, ...] | None:
    ids = source.metadata.integers(source.key("dflash.target_layer_ids"), default=None)
    if ids is None:
        return None
    if len(ids) != count:
        raise source.refuse("dflash.target_layer_ids", f"has {len(ids)} entries, but {count} layers are fused")
    if min(ids) < 0 or list(ids) != sorted(set(ids)):
        raise source.refuse("dflash.target_layer_ids", f"is {ids}, expected layers in ascending order, each once")
    return tuple(ids)


def _capture_norms(source: Source, count: int) -> bool:
    there = [capture_norm(source, index) in source.tensors for index in range(count)]
    if any(there) and not all(there):
        missing = capture_norm(source, there.index(False))
        raise UnsupportedError(f"{source.path}: tensor {missing} is missing: all captures need a norm, or none")
    return all(there)


def _block(source: Source) -> int:
    block = source.positive("dflash.block_size", 16)
    if not 2 <= block <= _MOST_BLOCK:
        raise source.refuse("dflash.block_size", f"is {block}, expected 2 to {_MOST_BLOCK}")
    return block


def stored(source: Source, names: Sequence[str]) -> str:
    """The name under which the file has a tensor; the first one if it has none of them."""
    return next((name for name in names if name in source.tensors), names[0])


def capture_norm(source: Source, index: int) -> str:
    """The name of the norm of capture `index`."""
    return stored(source, [name.format(index) for name in (*CAPTURE_NORM, CAPTURE_NORM_BARE)])
