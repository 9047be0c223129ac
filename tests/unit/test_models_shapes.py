"""Counts in metadata that the tensors contradict are refused before anything is planned with them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from luce.cli.main import main
from luce.errors import UnsupportedError
from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from tests.support.reference import Reference


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
