"""DFlash drafts of the published sizes with random weights, for times of steps, which do not depend on the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec

_NAME = "qwen35-dflash-draft"
# Of published DFlash2 drafts: taps of the convolutions, channels of a group, rank of the selector, candidates of a row.
_TAPS, _GROUP, _RANK, _TOP = 2, 16, 256, 16


@dataclass(frozen=True)
class _Sizes:
    """The shapes of a draft."""

    hidden: int
    ffn: int
    vocab: int
    captures: list[int]
    layers: int
    #: query heads, key heads, and their size
    heads: tuple[int, int, int]
    block: int
    generation: int

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name without `.weight`; of more than two dimensions or of one: F32."""
        hidden, (queries, keys, dim) = self.hidden, self.heads
        found: dict[str, tuple[int, ...]] = {
            "dflash.fc": (hidden, len(self.captures) * hidden),
            "dflash.hidden_norm": (hidden,),
            "output_norm": (hidden,),
        }
        own: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "ffn_norm": (hidden,),
            "attn_q": (queries * dim, hidden),
            "attn_k": (keys * dim, hidden),
            "attn_v": (keys * dim, hidden),
            "attn_q_norm": (dim,),
            "attn_k_norm": (dim,),
            "attn_output": (hidden, queries * dim),
            "ffn_gate": (self.ffn, hidden),
            "ffn_up": (self.ffn, hidden),
            "ffn_down": (hidden, self.ffn),
        }
        if self.generation == 2:
            for part in ("attn", "ffn"):
                own[f"{part}_conv_base"] = (2, _TAPS, hidden)
                own[f"{part}_conv_proj"] = (2 * _TAPS * (hidden // _GROUP), hidden)
            found["selector_hidden"] = (_RANK, hidden)
            found |= dict.fromkeys(("selector_predecessor", "selector_successor"), (self.vocab, _RANK))
        return found | {f"blk.{layer}.{part}": shape for layer in range(self.layers) for part, shape in own.items()}


def make(
    target: Path,
    out: Path,
    kind: Type,
    layers: int,
    heads: Sequence[int],
    block: int | None = None,
    *,
    generation: int = 1,
) -> None:
    """Write a draft for a target, with matrices of a type and up to five captures spread as in the paper's code.

    heads: query heads, key heads, and their size. Of the first generation blocks have 16 rows unless `block` says
    otherwise, and all layers but the last a window of 2048; of the second generation (DFlash2) blocks have 8 rows, all
    layers slide, and rows of a block see each other both ways. Quant blocks repeat a few thousand random ones.
    """
    with open_gguf(target) as file:
        spec = read_spec(Source(str(target), file.metadata, file.tensors))
        ffn = next(
            t.rows for name, t in file.tensors.items() if name.endswith((".ffn_up.weight", ".ffn_up_shexp.weight"))
        )
    count = len(spec.layers)
    captured = min(5, count - 3)
    captures = [round(1 + i * (count - 4) / max(1, captured - 1)) for i in range(captured)]
    queries, keys, dim = heads
    rows = block or (16 if generation == 1 else 8)
    sizes = _Sizes(spec.hidden, ffn, spec.vocab, captures, layers, (queries, keys, dim), rows, generation)
    writer = gguf.GGUFWriter(out, _NAME)
    _describe(writer, sizes)
    random = np.random.default_rng(0)
    for part, shape in sizes.tensors().items():
        if part.endswith("_conv_base"):
            # The row itself, and nothing of the rows before it.
            base = np.zeros(shape, np.float32)
            base[:, 0] = 1
            writer.add_tensor(part, base)
        elif len(shape) == 1:
            writer.add_tensor(f"{part}.weight", np.ones(shape, np.float32))
        else:
            writer.add_tensor(f"{part}.weight", _matrix(random, (shape[0], shape[1]), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, sizes: _Sizes) -> None:
    queries, keys, dim = sizes.heads
    writer.add_block_count(sizes.layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(sizes.hidden)
    writer.add_feed_forward_length(sizes.ffn)
    writer.add_vocab_size(sizes.vocab)
    writer.add_head_count(queries)
    writer.add_head_count_kv(keys)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_uint32(f"{_NAME}.attention.sliding_window", 2048)
    last = sizes.generation == 2
    writer.add_array(f"{_NAME}.attention.sliding_window_pattern", [True] * (sizes.layers - 1) + [last])
    writer.add_uint32(f"{_NAME}.dflash.n_target_layers", len(sizes.captures))
    writer.add_uint32(f"{_NAME}.dflash.block_size", sizes.block)
    writer.add_uint32(f"{_NAME}.dflash.mask_token_id", min(248070, sizes.vocab - 1))
    writer.add_array(f"{_NAME}.dflash.target_layer_ids", sizes.captures)
    if sizes.generation == 2:
        writer.add_bool(f"{_NAME}.attention.causal", False)
        for name, value in (("conv_kernel_size", _TAPS), ("conv_group_size", _GROUP)):
            writer.add_uint32(f"{_NAME}.dflash.{name}", value)
        for name, value in (("selector_rank", _RANK), ("selector_top_k", _TOP)):
            writer.add_uint32(f"{_NAME}.dflash.{name}", value)


def _matrix(random: np.random.Generator, shape: tuple[int, int], kind: Type) -> NDArray[np.uint8]:
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    some = random.standard_normal(4096 * elements).astype(np.float32) * shape[1] ** -0.5
    blocks = gguf.quants.quantize(some.reshape(4096, elements), kind).view(np.uint8).reshape(4096, size)
    return np.resize(blocks, (shape[0] * shape[1] // elements, size)).reshape(shape[0], -1)
