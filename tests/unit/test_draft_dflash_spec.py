"""Keys and tensors of a draft file as a DFlashSpec, and refusals that name them."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType, GGUFWriter

from luce.draft.dflash.spec import DFlashSpec, spread
from luce.errors import FormatError, ModelError, UnsupportedError
from luce.gguf.reader import open_gguf
from luce.models.spec import Attention, ModelSpec, Yarn
from tests.support.drafts import DRAFTS, spec_of
from tests.support.made_drafts import MadeDraft
from tests.support.reference import Reference


def read(path: Path, made: MadeDraft, architecture: str = "dflash-draft") -> DFlashSpec:
    with open_gguf(made.write(path / "draft.gguf", architecture)) as file:
        return spec_of(file, path)


def mixers(spec: DFlashSpec) -> list[Attention]:
    return [block.mixer for block in spec.layers if isinstance(block.mixer, Attention)]


def test_a_plain_draft(tmp_path: Path) -> None:
    spec = read(tmp_path, MadeDraft.random())
    assert (spec.hidden, spec.vocab, spec.block, spec.mask_token, spec.captures) == (32, 64, 8, 63, (0, 1))
    assert [(m.window, m.bidirectional, m.output_gate) for m in mixers(spec)] == [(None, True, 0)] * 2
    assert not (spec.capture_norms or spec.context_norm or spec.mask_embedding or spec.context_base)


@pytest.mark.parametrize("kind", [GGUFValueType.INT32, GGUFValueType.UINT32, GGUFValueType.INT64])
def test_types_of_ids(kind: GGUFValueType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(writer: GGUFWriter, key: str, values: list[int]) -> None:
        writer.add_key_value(key, values, GGUFValueType.ARRAY, sub_type=kind)

    monkeypatch.setattr(GGUFWriter, "add_array", add)
    assert read(tmp_path, MadeDraft.random(dflash__target_layer_ids=[0, 3])).captures == (0, 3)


@pytest.mark.parametrize("architecture", ["qwen35-dflash-draft", "dflash-draft", "gemma4-dflash-draft"])
def test_architectures(architecture: str, tmp_path: Path) -> None:
    made = MadeDraft.random()
    assert read(tmp_path, made, architecture).target_scale == architecture.startswith("gemma4")


SCALED = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 512,
}
PATTERN = {"attention__sliding_window": 24, "attention__sliding_window_pattern": [True, False]}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (PATTERN, [(24, False), (None, True)]),
        ({**PATTERN, "attention__causal": True}, [(24, False), (None, False)]),
        ({**PATTERN, "attention__causal": False}, [(24, True), (None, True)]),
        ({**PATTERN, "attention__sliding_window": 0}, [(4096, False), (None, True)]),
        ({"attention__causal": True}, [(None, False), (None, False)]),
    ],
)
def test_flavours_of_layers(keys: dict[str, Any], expected: list[tuple[int | None, bool]], tmp_path: Path) -> None:
    assert [(m.window, m.bidirectional) for m in mixers(read(tmp_path, MadeDraft.random(**keys)))] == expected


def test_optional_keys(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "dflash__mask_token_id": None,
        "dflash__target_layer_ids": None,
        "dflash__block_size": None,
        "vocab_size": None,
        "rope__dimension_count": 6,
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 512,
        "dflash__input_embedding_scale": 2.5,
        "dflash__output_multiplier": 0.5,
        "final_logit_softcapping": 30.0,
        "dflash__backbone_rotary_base": 500.0,
        "dflash__context_kv_layer_norm": 1,
        "dflash__n_target_layers": 2,
        "dflash__n_target_features": 64,
    }
    spec = read(tmp_path, MadeDraft.random(**keys))
    assert (spec.block, spec.mask_token, spec.captures, spec.vocab) == (16, None, None, 0)
    assert mixers(spec)[0].rope.dims == 6 and mixers(spec)[0].rope.yarn == Yarn(4.0, 512, 32.0, 1.0)
    assert (spec.embedding_scale, spec.logit_scale, spec.logit_softcap, spec.context_base) == (2.5, 0.5, 30.0, 500.0)
    assert spec.context_norm


def test_the_fusing_matrix_wins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert read(tmp_path, MadeDraft.random(dflash__n_target_layers=3)).count == 2
    assert "dflash.n_target_layers is 3, but dflash.fc.weight says 2" in caplog.text


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention__head_count": None}, "attention.head_count"),
        ({"rope__freq_base": None}, "rope.freq_base"),
        ({"attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon"),
        ({"block_count": 0}, "block_count is 0"),
        ({"block_count": 1025}, "block_count is 1025, more than 1024"),
        ({"embedding_length": 131073}, "embedding_length is 131073"),
        ({"feed_forward_length": 524289}, "feed_forward_length is 524289"),
        ({"attention__head_count": 1025}, "attention.head_count is 1025"),
        ({"attention__key_length": 2048}, "attention.key_length is 2048"),
        ({"attention__head_count_kv": 3}, "attention.head_count is 4, not a multiple of the 3 KV heads"),
        ({"attention__value_length": 8}, "attention.value_length is 8"),
        ({"attention__sliding_window": 24}, "sliding_window_pattern is missing, but attention.sliding_window is 24"),
        ({**PATTERN, "attention__sliding_window_pattern": [True]}, "sliding_window_pattern has 1 entries"),
        ({"attention__sliding_window": -1}, "attention.sliding_window is -1"),
        ({"dflash__target_layer_ids": [1, 1]}, r"target_layer_ids is \[1, 1\]"),
        ({"dflash__target_layer_ids": [2, 1]}, "ascending order"),
        ({"dflash__target_layer_ids": [1]}, "has 1 entries, but 2 layers are fused"),
        ({"dflash__mask_token_id": 64}, "mask_token_id is 64, but the vocabulary has 64 tokens"),
        ({"dflash__block_size": 1}, "block_size is 1"),
        ({"dflash__block_size": 65}, "block_size is 65"),
        ({"rope__scaling__type": "longrope"}, "rope.scaling.type is 'longrope'"),
        ({**SCALED, "rope__scaling__factor": 0.0}, "rope.scaling.factor is 0, expected a finite number above 0"),
        ({**SCALED, "rope__scaling__factor": np.inf}, "rope.scaling.factor is inf"),
        ({**SCALED, "rope__scaling__yarn_beta_fast": 0.0}, "rope.scaling.yarn_beta_fast is 0"),
        ({**SCALED, "rope__scaling__yarn_beta_slow": np.nan}, "rope.scaling.yarn_beta_slow is nan"),
        ({"rope__freq_base": 1.0}, "rope.freq_base is 1, expected a finite number above 1"),
        ({"rope__freq_base": np.nan}, "rope.freq_base is nan"),
        ({"attention__layer_norm_rms_epsilon": -1.0}, "attention.layer_norm_rms_epsilon is -1"),
        ({"dflash__backbone_rotary_base": 0.0}, "dflash.backbone_rotary_base is 0"),
        ({"dflash__input_embedding_scale": np.nan}, "dflash.input_embedding_scale is nan"),
        ({"dflash__output_multiplier": 0.0}, "dflash.output_multiplier is 0"),
        ({"final_logit_softcapping": -30.0}, "final_logit_softcapping is -30"),
        ({"dflash__conv_kernel_size": 4}, "dflash.conv_group_size' is missing"),
        ({"dflash__selector_rank": 4}, "dflash.conv_kernel_size' is missing"),
        ({"attention__value_scale": 2.0}, "attention.value_scale is unknown"),
    ],
)
def test_refused_by_name(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((UnsupportedError, FormatError), match=message):
        read(tmp_path, MadeDraft.random(**keys))


def test_heads_that_are_off(tmp_path: Path) -> None:
    read(tmp_path, MadeDraft.random(dflash__domino__enabled=0, dflash__domino__emb_dim=8))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("dflash.fc.weight", (32, 60), r"dflash.fc.weight has shape \[60, 32\]"),
        ("dflash.fc.weight", (16, 64), r"dflash.fc.weight has shape \[64, 16\]"),
        ("blk.0.attn_gate.weight", (4, 32), "in all layers or in none"),
        ("dflash.aux_hidden_norm.0.weight", (32,), "aux_hidden_norm.1.weight is missing"),
    ],
)
def test_shapes_are_the_truth(name: str, shape: tuple[int, ...], message: str, tmp_path: Path) -> None:
    made = MadeDraft.random()
    made.tensors[name] = np.zeros(shape, np.float32)
    with pytest.raises(UnsupportedError, match=message):
        read(tmp_path, made)


def test_no_fusing_matrix(tmp_path: Path) -> None:
    made = MadeDraft.random()
    del made.tensors["dflash.fc.weight"]
    with pytest.raises(UnsupportedError, match=r"tensor dflash.fc.weight is missing"):
        read(tmp_path, made)


def test_another_architecture() -> None:
    target = Reference("qwen3-a-F32").path
    with (
        open_gguf(target) as file,
        pytest.raises(UnsupportedError, match=r"general.architecture 'qwen3' is not a DFlash draft"),
    ):
        spec_of(file, target)


def test_truncated_file(tmp_path: Path) -> None:
    whole = (DRAFTS / "qwen35-a-draft-Q8_0.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-100])
    with pytest.raises(FormatError, match="passes the end of the file"):
        open_gguf(tmp_path / "cut.gguf")


def target(**changes: Any) -> ModelSpec:
    spec = Reference("qwen35-a-F32").spec
    return replace(spec, hidden=32, vocab=64, layers=spec.layers[:4], **changes)


def test_what_does_not_fit_the_model(tmp_path: Path) -> None:
    spec = read(tmp_path, MadeDraft.random(dflash__target_layer_ids=[1, 3]))
    assert spec.captured(target()) == (1, 3)
    for other, message in (
        (replace(target(), hidden=48), "this draft expects hidden size 32; the model has 48"),
        (replace(target(), vocab=65), "this draft expects a vocabulary of 64 tokens; the model has 65"),
        (replace(target(), layers=target().layers[:3]), "reads layer 3 of the model, which has 3 layers"),
    ):
        with pytest.raises(ModelError, match=message):
            spec.captured(other)


@pytest.mark.parametrize(
    ("count", "layers", "expected"),
    [
        (5, 64, (1, 16, 31, 46, 61)),
        (5, 32, (1, 8, 15, 22, 29)),
        (1, 9, (4,)),
        (3, 8, (1, 3, 5)),
        # 15.5 and 44.5 go to the even neighbour.
        (5, 62, (1, 16, 30, 44, 59)),
    ],
)
def test_captures_without_a_key(count: int, layers: int, expected: tuple[int, ...]) -> None:
    assert spread(count, layers) == expected
