"""Published checkpoints: read as they are, and converted with every key that they may have."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T

from luce.draft.dflash.safetensors import open_checkpoint
from luce.errors import FormatError, ModelError, UnsupportedError
from luce.gguf.reader import open_gguf
from tests.support.drafts import DRAFTS, DRAFTS2, matrix, spec_of
from tests.support.made_drafts import MadeDraft, brain, write_checkpoint
from tools import convert_dflash

CHECKPOINT = DRAFTS / "qwen35-a-draft-hf"


def config(**changes: Any) -> dict[str, Any]:
    """The config.json of MadeDraft.random()."""
    found = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0,
        "block_size": 8,
        "dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 1]},
        **changes,
    }
    return {name: value for name, value in found.items() if value is not ...}


def test_the_reference_checkpoint(tmp_path: Path) -> None:
    assert convert_dflash.main([str(CHECKPOINT), str(tmp_path / "out.gguf")]) == 0
    with open_gguf(tmp_path / "out.gguf") as made, open_gguf(DRAFTS / "qwen35-a-draft-F32.gguf") as expected:
        assert made.tensors.keys() == expected.tensors.keys()
        for name, info in made.tensors.items():
            assert info.type == (T.F32 if info.rows == 1 else T.BF16)
            np.testing.assert_array_equal(matrix(made, name).view(np.uint32), matrix(expected, name).view(np.uint32))
        assert spec_of(made, CHECKPOINT) == spec_of(expected, CHECKPOINT)
        prefix = "dflash-draft."
        own = {key.removeprefix(prefix): made.metadata[key] for key in made.metadata if key.startswith(prefix)}
        for key in expected.metadata:
            name = key.removeprefix("qwen35-dflash-draft.")
            if name != key:
                assert own.pop(name) == expected.metadata[key], key
        assert own == {}


@pytest.mark.parametrize(("type", "stored"), [("f32", T.F32), ("f16", T.F16), ("bf16", T.BF16), ("q8_0", T.Q8_0)])
def test_types(type: str, stored: T, tmp_path: Path) -> None:
    assert convert_dflash.main([str(CHECKPOINT), str(tmp_path / "out.gguf"), "--type", type]) == 0
    with open_gguf(tmp_path / "out.gguf") as made, open_gguf(DRAFTS / "qwen35-a-draft-F32.gguf") as expected:
        assert {info.type for info in made.tensors.values() if info.rows > 1} == {stored}
        for name in made.tensors:
            np.testing.assert_allclose(matrix(made, name), matrix(expected, name), rtol=2e-3, atol=0.005)


EVERY_KEY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "windows": (
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24, "use_sliding_window": True},
        {"attention__sliding_window": 24, "attention__sliding_window_pattern": [True, False]},
    ),
    "windows that are off": (
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24, "use_sliding_window": False},
        {"attention__sliding_window": 0, "attention__sliding_window_pattern": [True, False]},
    ),
    "causal flag": ({"is_causal": False}, {"attention__causal": False}),
    "causal flag of its own": (
        {"dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 1], "causal": True}},
        {"attention__causal": True},
    ),
    "ids at the top": (
        {"dflash_config": ..., "mask_token_id": 62, "target_layer_ids": [2, 5]},
        {"dflash__mask_token_id": 62, "dflash__target_layer_ids": [2, 5]},
    ),
    "ids at the top beside none of its own": (
        {"dflash_config": {"mask_token_id": None, "target_layer_ids": [2, 5]}, "mask_token_id": 62},
        {"dflash__mask_token_id": 62, "dflash__target_layer_ids": [2, 5]},
    ),
    "no ids": (
        {"dflash_config": {}},
        {"dflash__mask_token_id": None, "dflash__target_layer_ids": None},
    ),
    "block size of its own": (
        {"block_size": 9, "dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 1], "block_size": 10}},
        {"dflash__block_size": 10},
    ),
    "rope base further down": (
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
        {"rope__freq_base": 500.0},
    ),
    "linear": (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope__scaling__type": "linear", "rope__scaling__factor": 2.0},
    ),
    "yarn": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 16}},
        {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 4.0,
            "rope__scaling__original_context_length": 512,
            "rope__scaling__yarn_beta_fast": 16.0,
        },
    ),
    "partial rotation": ({"partial_rotary_factor": 0.5}, {"rope__dimension_count": 8}),
    "transformers' own class": (
        {
            "architectures": ["MuseGlimmerAssistantModel"],
            "model_type": "muse_glimmer_assistant",
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 24,
        },
        {
            "attention__sliding_window": 25,
            "attention__sliding_window_pattern": [True, False],
            "attention__causal": False,
        },
    ),
    "factors": (
        {
            "input_embedding_scale": 2.0,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 30.0,
            "backbone_rotary_base": 50.0,
            "context_kv_layer_norm": True,
        },
        {
            "dflash__input_embedding_scale": 2.0,
            "dflash__output_multiplier": 0.5,
            "final_logit_softcapping": 30.0,
            "dflash__backbone_rotary_base": 50.0,
            "dflash__context_kv_layer_norm": 1,
        },
    ),
}


NATIVE = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


@pytest.mark.parametrize("case", EVERY_KEY)
@pytest.mark.parametrize("parts", [1, 3])
def test_every_key(case: str, parts: int, tmp_path: Path) -> None:
    changes, keys = EVERY_KEY[case]
    made = MadeDraft.random(1, gate=1, capture_norms=True, **keys)
    names = NATIVE if "own class" in case else {}
    tensors = {names.get(name, name): brain(tensor) for name, tensor in made.published().items()}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", config(**changes), tensors, parts)
    assert convert_dflash.main([str(checkpoint), str(tmp_path / "out.gguf")]) == 0
    with (
        open_checkpoint(checkpoint) as direct,
        open_gguf(tmp_path / "out.gguf") as converted,
        open_gguf(made.write(tmp_path / "made.gguf")) as expected,
    ):
        spec = spec_of(expected, tmp_path)
        assert spec_of(converted, tmp_path) == spec
        for name in expected.tensors:
            np.testing.assert_array_equal(matrix(direct, name), matrix(expected, name))
            np.testing.assert_array_equal(matrix(converted, name), matrix(expected, name))
        # The numbers of the JSON are doubles.
        assert spec_of(direct, tmp_path).layers == spec.layers


@pytest.mark.parametrize("kind", ["domino", "dspark", "sure"])
def test_correction_heads(kind: str, tmp_path: Path) -> None:
    made = MadeDraft.random(1)
    made = made.with_domino(64) if kind == "domino" else made.with_dspark(64, confidence=38 if kind == "sure" else 0)
    tensors = {name: brain(tensor) for name, tensor in made.published().items()}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", config(), tensors)
    assert convert_dflash.main([str(checkpoint), str(tmp_path / "out.gguf")]) == 0
    with open_gguf(tmp_path / "out.gguf") as converted, open_gguf(made.write(tmp_path / "made.gguf")) as expected:
        spec = spec_of(converted, tmp_path)
        assert spec.correction is not None and spec == spec_of(expected, tmp_path)
        assert converted.tensors.keys() == expected.tensors.keys()
        for name in expected.tensors:
            np.testing.assert_array_equal(matrix(converted, name), matrix(expected, name))


SECOND = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 6}


@pytest.mark.parametrize("suffix", ["", ".weight"])
@pytest.mark.parametrize("name", ["qwen35-a-draft2-hf", "qwen35-a-draft2-var-hf"])
def test_dflash2(name: str, suffix: str, tmp_path: Path) -> None:
    """Both reference checkpoints, bit for bit, also with the names of codebooks that transformers saves."""
    source = tmp_path / "checkpoint"
    shutil.copytree(DRAFTS2 / name, source)
    raw = (source / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    renamed = {key + (suffix if key.endswith("codebook") else ""): value for key, value in header.items()}
    text = json.dumps(renamed).encode()
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    assert convert_dflash.main([str(source), str(tmp_path / "out.gguf")]) == 0
    with open_checkpoint(DRAFTS2 / name) as direct, open_gguf(tmp_path / "out.gguf") as made:
        assert spec_of(made, source).correction == spec_of(direct, source).correction is not None
        assert made.tensors.keys() == direct.tensors.keys()
        for tensor, info in made.tensors.items():
            assert info.shape == direct.tensors[tensor].shape
            np.testing.assert_array_equal(matrix(made, tensor), matrix(direct, tensor))
        assert made.tensors["blk.0.attn_conv_base"].type == T.F32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DFlash3DraftModel"]}, "architectures is"),
        ({"architectures": ["DFlash2DraftModel"]}, "dflash_config.conv_kernel_size is missing"),
        ({"architectures": ["DFlash2DraftModel"], **SECOND, "selector_top_k": 0}, "selector_top_k is 0"),
        ({"architectures": ["DFlash2DraftModel"], **SECOND, "projector_type": "x"}, "projector_type is 'x'"),
        (
            {"architectures": ["DFlash2DraftModel"], **SECOND, "dflash_config": {"target_layer_ids": [0, 1]}},
            "dflash_config.mask_token_id is missing",
        ),
        ({"conv_kernel_size": 4}, "conv_kernel_size is unknown"),
        ({"dflash_config": {"selector_rank": 8}}, "dflash_config.selector_rank is unknown"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"draft_vocab_size": 32}, "draft_vocab_size is unknown"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling is of type 'llama3'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "rope_scaling.mscale is unknown"),
        ({"layer_types": ["full_attention"]}, "layer_types must name"),
        ({"architectures": ["MuseGlimmerAssistantModel"]}, "layer_types must name"),
        ({"hidden_size": "32"}, "hidden_size is '32', expected an integer"),
        ({"rms_norm_eps": None}, "layer_norm_rms_epsilon' is missing"),
        ({"target_layer_ids": "x", "dflash_config": {}}, "target_layer_ids must be a list"),
        ({"dflash_config": [63]}, "dflash_config must be an object or null"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rope_theta": float("nan")}, "rope_theta is nan, expected a number"),
        ({"sliding_window": 24, "use_sliding_window": True}, "layer_types must name"),
    ],
)
def test_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = MadeDraft.random().published()
    checkpoint = write_checkpoint(tmp_path / "checkpoint", config(**changes), tensors)
    assert convert_dflash.main([str(checkpoint), str(tmp_path / "out.gguf")]) == 3
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_unknown_tensor(tmp_path: Path) -> None:
    tensors = MadeDraft.random().published() | {"layers.0.self_attn.sinks": np.zeros(4, np.float32)}
    with pytest.raises(UnsupportedError, match=r"layers.0.self_attn.sinks' is unknown"):
        open_checkpoint(write_checkpoint(tmp_path / "checkpoint", config(), tensors))


def damaged(change: str) -> bytes:
    header = {"fc.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    data = bytes(24)
    if change == "size":
        header["fc.weight"]["shape"] = [2, 4]
    elif change == "end":
        data = bytes(23)
    elif change == "offsets":
        header["fc.weight"]["data_offsets"] = [-24, 0]
    elif change == "type":
        header["fc.weight"]["dtype"] = "I64"
    elif change == "overlap":
        header["norm.weight"] = {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}
    elif change == "shape":
        header["fc.weight"]["shape"] = [True, 6]
    text = json.dumps(header).encode()
    length = {"header": 1 << 40, "json": len(text) - 3}.get(change, len(text))
    return struct.pack("<Q", length) + text + data


def test_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "nowhere", DRAFTS / "qwen35-a-draft-F32.gguf"):
        assert convert_dflash.main([str(path), str(tmp_path / "out.gguf")]) == 2
        assert capsys.readouterr().err == f"convert_dflash: {path}: is neither a directory nor a safetensors file\n"


@pytest.mark.parametrize("change", ["size", "end", "offsets", "type", "overlap", "shape", "header", "json"])
def test_damaged_files(change: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config(), {})
    (tmp_path / "model.safetensors").write_bytes(damaged(change))
    with pytest.raises((FormatError, UnsupportedError), match=r"model.safetensors"):
        open_checkpoint(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json: No such file"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config()))
    with pytest.raises(ModelError, match=r"model.safetensors: No such file"):
        open_checkpoint(tmp_path)
    index = {"weight_map": {"fc.weight": "../elsewhere.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="names files of other directories"):
        open_checkpoint(tmp_path)
