"""Counts in metadata that the tensors contradict are refused before anything is planned with them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from luce.cli.main import main
from luce.errors import UnsupportedError
from luce.gguf.metadata import Metadata
from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.models.shapes import check_matrices
from luce.models.spec import Attention
from tests.support.reference import Reference, references


def changed(directory: Path, name: str, key: str, value: int) -> Path:
    """A reference file with another value of a uint32 key."""
    data = Reference(name).path.read_bytes()
    at = data.index(key.encode()) + len(key)
    assert struct.unpack_from("<I", data, at) == (4,)
    path = directory / "changed.gguf"
    path.write_bytes(data[: at + 4] + struct.pack("<I", value) + data[at + 8 :])
    return path


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("qwen3-a-F32", "qwen3.block_count", 16000, "qwen3.block_count is 16000, expected at most 1024"),
        ("qwen3-a-F32", "qwen3.block_count", 1000, "tensor blk.{}.attn_norm.weight is missing"),
        ("qwen3-a-F32", "qwen3.attention.head_count", 8, "tensor blk.0.attn_q.weight has shape"),
        ("qwen3-a-F32", "qwen3.embedding_length", 1 << 30, "tensor token_embd.weight has shape"),
        ("qwen3-a-F32", "qwen3.feed_forward_length", 1 << 30, "tensor blk.0.ffn_gate.weight has shape"),
        ("qwen35moe-a-F32", "qwen35moe.expert_count", 1 << 30, "tensor blk.0.ffn_gate_inp.weight has shape"),
        ("qwen35moe-a-F32", "qwen35moe.expert_used_count", 11, "qwen35moe.expert_used_count is 11 of 10 experts"),
        ("qwen35moe-a-F32", "qwen35moe.expert_feed_forward_length", 99, "tensor blk.0.ffn_up_exps.weight has shape"),
        ("deepseek2-a-F32", "deepseek2.attention.kv_lora_rank", 40, "tensor blk.0.attn_kv_a_mqa.weight has shape"),
        ("deepseek2-a-F32", "deepseek2.attention.q_lora_rank", 48, "tensor blk.0.attn_q_a.weight has shape"),
        ("deepseek2-a-F32", "deepseek2.attention.value_length_mla", 16, "tensor blk.0.attn_v_b.weight has shape"),
        ("deepseek2-a-F32", "deepseek2.expert_group_count", 3, "deepseek2.expert_group_used_count is 2 of 3 groups"),
        ("deepseek2-a-F32", "deepseek2.rope.dimension_count", 48, "deepseek2.rope.dimension_count is 48, expected"),
        ("starcoder2-a-F32", "starcoder2.feed_forward_length", 64, "tensor blk.0.ffn_up.weight has shape"),
        ("phi3-a-F32", "phi3.feed_forward_length", 96, "tensor blk.0.ffn_up.weight has shape"),
        ("phi3-a-F32", "phi3.attention.head_count_kv", 2, "tensor blk.0.attn_qkv.weight has shape"),
        ("glm4moe-a-F32", "glm4moe.nextn_predict_layers", 3, "glm4moe.nextn_predict_layers is 3 of 3 layers"),
        ("glm4moe-a-F32", "glm4moe.expert_gating_func", 4, "glm4moe.expert_gating_func is 4, expected one of 1, 2, 3"),
    ],
)
def test_counts_that_the_tensors_contradict(
    name: str, key: str, value: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(tmp_path, name, key, value)
    layers = len(Reference(name).spec.layers)
    assert main(["inspect", str(path)]) == 3
    shown = capsys.readouterr().err
    assert message.format(layers) in shown and str(path) in shown and shown.count("\n") == 1


def test_a_vocabulary_of_another_size_than_the_head(tmp_path: Path) -> None:
    reference = Reference("qwen35moe-a-F32")
    with open_gguf(reference.path) as file:
        tensors = dict(file.tensors)
        tensors["token_embd.weight"] = tensors["output_norm.weight"]
        with pytest.raises(UnsupportedError, match=r"tensor output\.weight has shape"):
            read_spec(Source("x.gguf", file.metadata, tensors))


@pytest.mark.parametrize(
    ("name", "removed", "added", "message"),
    [
        (
            "deepseek2-a-F32",
            "deepseek2.attention.key_length_mla",
            "",
            "key_length_mla is missing: .* attn_kv_b undivided",
        ),
        ("qwen3next-a-F32", "", "blk.0.ssm_in.weight", "ssm_in undivided, as early converters wrote"),
        ("commandr-a-F32", "", "blk.0.attn_q_norm.weight", "attn_q_norm.weight: Luce has no code for LayerNorms of"),
        ("stablelm-a-F32", "", "blk.0.attn_q_norm.weight", "attn_q_norm.weight: Luce has no code for LayerNorms of"),
        ("phi3-a-F32", "rope_factors_short.weight", "", ""),
    ],
)
def test_files_that_differ_from_those_that_run(name: str, removed: str, added: str, message: str) -> None:
    with open_gguf(Reference(name).path) as file:
        keys = {key: file.metadata[key] for key in file.metadata if key != removed}
        tensors = {key: tensor for key, tensor in file.tensors.items() if key != removed}
        tensors |= {added: tensors["output_norm.weight"]} if added else {}
        source = Source("x.gguf", Metadata(keys, file.metadata.path), tensors)
        if message:
            with pytest.raises(UnsupportedError, match=message):
                read_spec(source)
        else:
            # Without divisors for short contexts one set of frequencies holds for the whole trained length.
            assert read_spec(source).context_length == 131072
            assert Reference(name).spec.context_length == 4096


def test_a_long_context_has_divisors_of_its_own() -> None:
    spec = Reference("phi3-a-F32").spec
    assert (spec.context_length, spec.longest_context, spec.original_context) == (4096, 131072, None)
    assert spec.for_context(1) is spec and spec.for_context(4096) is spec
    longer = spec.for_context(4097)
    assert (longer.context_length, longer.longest_context, longer.original_context) == (131072, 131072, 4096)
    assert longer.for_context(1) is longer and spec.for_context(0) == longer
    ropes = [x.mixer.rope for x in longer.layers if isinstance(x.mixer, Attention) and x.mixer.rope]
    factors = {(rope.factors, rope.long_factors) for rope in ropes}
    assert factors == {("rope_factors_short.weight", "rope_factors_long.weight")}
    plain = Reference("llama-a-F32").spec
    assert plain.for_context(1 << 30) is plain and plain.original_context is None


@pytest.mark.parametrize("reference", references(), ids=lambda r: r.name)
def test_a_matrix_that_is_missing_is_named_before_anything_is_planned(reference: Reference) -> None:
    with open_gguf(reference.path) as file:
        source = Source("x.gguf", file.metadata, file.tensors)
        spec = read_spec(source)
        check_matrices(source, spec)
        layer = len(spec.layers) - 1
        parts = ("attn_output", "ffn_down", "ffn_gate_inp", "shortconv.out_proj", "attn_q", "attn_qkv", "ffn_up")
        names = [f"blk.{layer}.{part}.weight" for part in parts]
        found = []
        for name in (name for name in names if name in file.tensors):
            left = {key: tensor for key, tensor in file.tensors.items() if key != name}
            with pytest.raises(UnsupportedError, match=r"x.gguf: tensor blk.\d+.\S+ is missing"):
                check_matrices(Source("x.gguf", file.metadata, left), spec)
            found.append(name)
        assert len(found) > 1


@pytest.mark.parametrize("verb", [["inspect", "--layers"], ["inspect", "--json"], ["run", "hi", "--dry-run"]])
def test_no_plan_of_what_cannot_be_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: list[str]) -> None:
    path = tmp_path / "x.gguf"
    whole = Reference("llama-a-F32").path.read_bytes()
    path.write_bytes(whole.replace(b"blk.1.attn_output.weight", b"blk.1.attn_outpux.weight"))
    assert main([verb[0], str(path), *verb[1:], "--target-devices", "cpu:0"]) == 3
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == f"luce: {path}: tensor blk.1.attn_output.weight is missing\n"
