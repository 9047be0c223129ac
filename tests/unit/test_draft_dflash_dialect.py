"""DFlash2 drafts in llama.cpp's dialect: the same draft as the checkpoint's; refusals that name file and field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from numpy.typing import NDArray

import luce
from luce.draft.dflash.dialect import translated
from luce.draft.dflash.spec import DFlashSpec
from luce.errors import LuceError
from luce.gguf.reader import GGUFFile, open_gguf
from luce.runtime.host import HostDevice
from tests.support.drafts import DraftedText, DraftReference, matrix, open_draft, spec_of
from tools.convert_dflash import add_key

DRAFT = DraftReference("qwen35-a-draft2-hf")
RENAMED = {"dflash.fc.weight": "fc.weight", "dflash.hidden_norm.weight": "enc.output_norm.weight"}
KEYS: dict[str, Any] = {
    "context_length": 4096,
    "embedding_length": 64,
    "block_count": 3,
    "feed_forward_length": 160,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.causal": False,
    "attention.sliding_window": 32,
    "attention.sliding_window_pattern": [True, True, True],
    "rope.freq_base": 1e6,
    "rope.dimension_sections": [16, 0, 0, 0],
    "block_size": 8,
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 16,
    # Each one more than the checkpoint's.
    "target_layers": [2, 4, 7],
}


def write(
    path: Path, change: Mapping[str, Any] | None = None, tensors: Mapping[str, NDArray[np.float32] | None] | None = None
) -> Path:
    """The reference draft in the dialect; None leaves a key or tensor out."""
    writer = GGUFWriter(path, "dflash")
    for name, value in {**KEYS, **(change or {})}.items():
        if value is not None and name != "mask":
            add_key(writer, f"dflash.{name}", value)
    if (change or {}).get("mask", 765) is not None:
        writer.add_uint32("tokenizer.ggml.mask_token_id", 765)
    writer.add_token_list([str(i) for i in range(768)])
    with open_draft(DRAFT.path) as file:
        found: dict[str, NDArray[np.float32] | None] = {
            RENAMED.get(name, name): matrix(file, name).reshape(*reversed(info.shape))
            for name, info in file.tensors.items()
        }
        for name, tensor in {**found, **(tensors or {})}.items():
            if tensor is not None:
                writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path) -> tuple[GGUFFile, DFlashSpec]:
    file = translated(open_gguf(path))
    return file, spec_of(file, path)


def test_it_is_the_draft_of_the_checkpoint(tmp_path: Path) -> None:
    file, spec = read(write(tmp_path / "draft.gguf"))
    with file, open_draft(DRAFT.path) as expected:
        own = spec_of(expected, DRAFT.path)
        assert spec.captures == (1, 3, 6) and spec.vocab == 768
        assert replace(spec, path="", norm_eps=0.0) == replace(own, path="", norm_eps=0.0)
        assert file.tensors.keys() == expected.tensors.keys()
        for name in file.tensors:
            np.testing.assert_array_equal(matrix(file, name), matrix(expected, name))


def test_factors_of_logits(tmp_path: Path) -> None:
    file, spec = read(write(tmp_path / "draft.gguf", {"logit_scale": 0.5, "final_logit_softcapping": 20.0}))
    file.close()
    assert (spec.logit_scale, spec.logit_softcap) == (0.5, 20.0)


def test_it_drafts_for_its_target(tmp_path: Path) -> None:
    prompt = DRAFT.target.expected["prompt_17"].tolist()
    replies = []
    for draft in (str(write(tmp_path / "draft.gguf")), "off"):
        with luce.load(DRAFT.target.path, draft=draft, target_devices="cpu:0", max_ctx=256, verify_width=8) as model:
            replies.append([t.id for t in model.generate(prompt, max_tokens=16, temperature=0, ignore_eos=True)])
            stats = model.engine.stats().draft
        assert draft == "off" or (stats is not None and stats.state == "on" and stats.proposed > 0)
    assert replies[0] == replies[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_layers": None}, "dflash.target_layers"),
        ({"target_layers": [0, 4, 7]}, r"dflash.target_layers is \[0, 4, 7\]"),
        ({"mask": None}, "tokenizer.ggml.mask_token_id"),
        ({"sample_from_anchor": True}, "sample_from_anchor is true"),
        ({"rope.dimension_sections": [8, 8, 0, 0]}, "rope.dimension_sections is"),
        ({"conv_kernel_size": None}, "conv_kernel_size"),
        ({"conv_kernel_size": 5}, "conv_kernel_size is 5, more than 4"),
        ({"conv_group_size": 24}, "conv_group_size is 24, which does not divide"),
        ({"selector_rank": 0}, "selector_rank is 0"),
        ({"selector_top_k": 65}, "selector_top_k is 65, more than 64"),
        ({"hyper_connection_count": 4}, "hyper_connection_count is unknown"),
    ],
)
def test_refused_by_the_field(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(LuceError, match=rf"draft.gguf: .*{message}") as found:
        read(write(tmp_path / "draft.gguf", change))
    assert "\n" not in str(found.value)


def zeros(*shape: int) -> NDArray[np.float32]:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("change", "tensors", "message"),
    [
        ({}, {"selector_successor.weight": None}, "selector_successor.weight is missing"),
        ({}, {"selector_predecessor.weight": None}, "selector_predecessor.weight is missing"),
        ({}, {"selector_hidden.weight": zeros(7, 64)}, "selector_hidden.weight has shape"),
        ({}, {"selector_successor.weight": zeros(700, 8)}, "selector_successor.weight has shape"),
        ({}, {"blk.1.attn_conv_base": zeros(2, 64)}, "blk.1.attn_conv_base has shape"),
        ({}, {"blk.2.ffn_conv_proj.weight": None}, "blk.2.ffn_conv_proj.weight is missing"),
        ({"conv_group_size": 8}, {}, "blk.0.attn_conv_proj.weight has shape"),
        ({name: 0 for name in KEYS if name.startswith(("conv", "selector"))}, {}, "attn_conv_base is unknown"),
        ({}, {"token_embd.weight": zeros(768, 64)}, "token_embd.weight is unknown"),
        ({}, {"d2t": zeros(32)}, "d2t is unknown"),
    ],
)
def test_refused_by_the_tensor(
    change: dict[str, Any], tensors: dict[str, NDArray[np.float32] | None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(LuceError, match=rf"draft.gguf: tensor .*{message}"):
        file, spec = read(write(tmp_path / "draft.gguf", change, tensors))
        with file:
            DraftedText(file, spec, HostDevice(), zeros(1, 192), zeros(64))
