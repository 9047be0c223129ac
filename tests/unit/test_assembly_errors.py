"""Files that parse and yet cannot be run: refused at load, naming the file and the tensor or key."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

import luce
from luce.errors import ModelError, UsageError
from tests.support.reference import Reference

SOURCE = Reference("qwen3-a-F32")


def load(tmp_path: Path, old: bytes, new: bytes, *, count: int = 1) -> str:
    """Load the file with some bytes of its header replaced; the message of the refusal."""
    data = SOURCE.path.read_bytes()
    assert data.count(old) >= count
    assert len(old) == len(new)
    path = tmp_path / "broken.gguf"
    path.write_bytes(data.replace(old, new, count))
    with pytest.raises(ModelError) as refusal:
        luce.load(path, target_devices="cpu:0")
    message = str(refusal.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_renamed_tensor(tmp_path: Path) -> None:
    assert "blk.1.attn_q.weight is missing" in load(tmp_path, b"blk.1.attn_q.weight", b"blk.1.attn_z.weight")


def test_tensor_that_the_family_lacks(tmp_path: Path) -> None:
    # Read as llama, the file holds head norms that this family would ignore.
    data = SOURCE.path.read_bytes().replace(b"qwen3.", b"llama.")
    value = struct.pack("<Q", 5) + b"qwen3"
    path = tmp_path / "other.gguf"
    path.write_bytes(data.replace(value, struct.pack("<Q", 5) + b"llama", 1))
    with pytest.raises(
        ModelError, match=r"other\.gguf: tensor blk\.0\.attn_\w_norm\.weight is unknown to family llama"
    ):
        luce.load(path, target_devices="cpu:0")


def test_wrong_shape(tmp_path: Path) -> None:
    key = b"qwen3.feed_forward_length" + struct.pack("<I", 4)
    data = SOURCE.path.read_bytes()
    at = data.index(key) + len(key)
    width = struct.unpack_from("<I", data, at)[0]
    message = load(tmp_path, key + struct.pack("<I", width), key + struct.pack("<I", width + 1))
    assert "blk.0.ffn_gate.weight" in message
    assert f"{width + 1}]" in message


def test_unknown_architecture(tmp_path: Path) -> None:
    message = load(tmp_path, b"qwen3", b"qwen9")
    assert "general.architecture 'qwen9'" in message


def test_unknown_tensor_type(tmp_path: Path) -> None:
    name = b"blk.0.attn_q.weight"
    data = SOURCE.path.read_bytes()
    at = data.index(name) + len(name) + 4 + 2 * 8
    old = data[at - 20 - len(name) : at + 4]
    message = load(tmp_path, old, old[:-4] + struct.pack("<I", 199))
    assert "blk.0.attn_q.weight" in message


def test_context_beyond_the_training(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--max-ctx"):
        luce.load(SOURCE.path, target_devices="cpu:0", max_ctx=1_000_000)


@pytest.mark.parametrize(("key", "old", "new"), [("state_size", 64, 72), ("conv_kernel", 4, 5)])
def test_sizes_of_a_recurrent_layer_that_no_kernel_has(tmp_path: Path, key: str, old: int, new: int) -> None:
    name = f"qwen35.ssm.{key}".encode() + struct.pack("<I", 4)
    data = Reference("qwen35-a-F32").path.read_bytes()
    assert name + struct.pack("<I", old) in data
    path = tmp_path / "sizes.gguf"
    data = data.replace(name + struct.pack("<I", old), name + struct.pack("<I", new))
    inner = b"qwen35.ssm.inner_size" + struct.pack("<I", 4)
    path.write_bytes(data.replace(inner + struct.pack("<I", 192), inner + struct.pack("<I", 3 * max(64, new))))
    with pytest.raises(ModelError, match=rf"sizes\.gguf: .*ssm\.{key} is {new}, expected one of"):
        luce.load(path, target_devices="cpu:0")


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope.freq_base", 1.0), ("rope.scaling.factor", 0.0), ("rope.scaling.yarn_beta_slow", float("nan"))],
)
def test_rotations_that_are_no_numbers_to_compute_with(tmp_path: Path, key: str, value: float) -> None:
    name = f"laguna.{key}".encode() + struct.pack("<I", 6)
    data = Reference("laguna-a-F32").path.read_bytes()
    assert data.count(name) == 1
    at = data.index(name) + len(name)
    path = tmp_path / "broken.gguf"
    path.write_bytes(data[:at] + struct.pack("<f", value) + data[at + 4 :])
    with pytest.raises(ModelError, match=rf"laguna\.{key} is .*, expected a finite number above"):
        luce.load(path, target_devices="cpu:0")
