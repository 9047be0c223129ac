"""Models stored under the name llama: the texts that end their replies."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFValueType

from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.models.spec import ModelSpec
from luce.text.tokenizer import Tokenizer
from tests.support.gguf_files import Key, Tensor, encode, floats
from tests.support.vocabulary import byte_level


def spec(path: Path) -> ModelSpec:
    numbers = {
        "block_count": 1,
        "embedding_length": 8,
        "context_length": 64,
        "feed_forward_length": 8,
        "attention.head_count": 2,
    }
    keys = [
        Key("general.architecture", GGUFValueType.STRING, "llama"),
        Key("llama.attention.layer_norm_rms_epsilon", GGUFValueType.FLOAT32, 1e-5),
        *(Key(f"llama.{name}", GGUFValueType.UINT32, value) for name, value in numbers.items()),
    ]
    tensors = [
        Tensor("token_embd.weight", (8, 300), data=floats(8, 300)),
        Tensor("blk.0.attn_norm.weight", (8,), data=floats(8)),
    ]
    path.write_bytes(encode(keys, tensors))
    with open_gguf(path) as file:
        return read_spec(Source(str(path), file.metadata, file.tensors))


@pytest.mark.parametrize(
    ("named", "control"),
    [
        ("<|eot_id|>", ("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>")),
        ("<|im_end|>", ("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
        ("</s>", ("<s>", "</s>", "<|end_of_turn|>")),
    ],
)
def test_every_end_of_a_template_ends_a_reply(named: str, control: tuple[str, ...], tmp_path: Path) -> None:
    keys = byte_level(control=control, eos_token_id=256 + control.index(named))
    tokenizer = Tokenizer(keys, eos_texts=spec(tmp_path / "model.gguf").eos)
    other = {"<|begin_of_text|>", "<|python_tag|>", "<|im_start|>", "<s>"}
    assert {tokenizer.token_text(i) for i in tokenizer.eos_ids} == set(control) - other
