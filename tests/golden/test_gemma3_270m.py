"""A real base model without a chat template: Gemma 3 270M in Q4_K_M, in the file that LUCE_TEST_GEMMA3 names
(CONTRIBUTING.md says where it comes from), held against transformers on the dequantised weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import luce
from luce.gguf.reader import open_gguf

if "LUCE_TEST_GEMMA3" not in os.environ:
    pytest.skip("LUCE_TEST_GEMMA3 names no file of Gemma 3 270M", allow_module_level=True)
# Not left in the environment, where it would be a setting of Luce.
FILE = Path(os.environ.pop("LUCE_TEST_GEMMA3"))
STEPS, WINDOW = 64, 512


def days(count: int) -> str:
    return " ".join(
        f"On day {day} the keeper wrote that he had counted {day * day % 97} gulls and {day % 7} ships."
        for day in range(1, count + 1)
    )


#: the second fills the window while it is continued, the third is longer than two windows
PROMPTS = ("The capital of France is", days(22), days(56))
#: what the converter writes for the names of the checkpoint
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


@pytest.fixture(scope="module")
def model() -> Iterator[luce.Model]:
    with luce.load(FILE, target_devices="cpu:0", cpu_weights="float32", max_ctx=2048) as model:
        yield model


@pytest.fixture(scope="module")
def oracle() -> Any:
    """The model of transformers with the file's weights, dequantised by the gguf package, in float32."""
    torch = pytest.importorskip("torch", reason="torch is an oracle of this test and not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is an oracle of this test, not installed")
    reader = gguf.GGUFReader(FILE)
    values = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}

    def key(name: str) -> Any:
        return reader.fields[f"gemma3.{name}"].contents()

    network = transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            vocab_size=len(values["token_embd.weight"]),
            hidden_size=key("embedding_length"),
            intermediate_size=key("feed_forward_length"),
            num_hidden_layers=key("block_count"),
            num_attention_heads=key("attention.head_count"),
            num_key_value_heads=key("attention.head_count_kv"),
            head_dim=key("attention.key_length"),
            max_position_embeddings=key("context_length"),
            sliding_window=key("attention.sliding_window"),
            query_pre_attn_scalar=key("attention.key_length"),
            rms_norm_eps=key("attention.layer_norm_rms_epsilon"),
            attn_implementation="eager",
        )
    ).eval()
    assert network.config.sliding_window == WINDOW
    for name, parameter in network.named_parameters():
        layer, _, part = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
        found = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}.get(name)
        stored = values[f"{found or f'blk.{layer}.{NAMES[part]}'}.weight"]
        # Norms of the checkpoint are offsets from 1.
        parameter.data = torch.from_numpy(np.array(stored)) - (1 if "norm" in name else 0)
    network.tie_weights()
    return network


def greedy(model: luce.Model, ids: list[int]) -> list[int]:
    return [token.id for token in model.generate(ids, max_tokens=STEPS, temperature=0, ignore_eos=True)]


@pytest.mark.oracle
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda text: f"{len(text)} characters")
def test_greedy_continuation_equals_transformers(model: luce.Model, oracle: Any, prompt: str) -> None:
    import torch

    ids = model.tokenizer.with_bos(model.tokenize(prompt))
    least, most = {PROMPTS[0]: (0, 10), PROMPTS[1]: (WINDOW - STEPS, WINDOW), PROMPTS[2]: (2 * WINDOW, 1800)}[prompt]
    assert least < len(ids) < most
    tokens = greedy(model, ids)
    assert len(tokens) == STEPS
    # Each token is the likeliest behind the prompt and the tokens before it: so greedy decoding gives them all.
    with torch.no_grad():
        logits = oracle(torch.tensor([ids + tokens]), logits_to_keep=STEPS + 1, use_cache=False).logits[0, :-1]
    assert logits.argmax(dim=1).tolist() == tokens


def test_luce_run_continues_a_text(model: luce.Model) -> None:
    prompt = PROMPTS[0]
    flags = ("-n", str(STEPS), "-o", "temperature=0", "--devices", "cpu:0", "--cpu-weights", "float32")
    command = [sys.executable, "-m", "luce", "run", str(FILE), prompt, *flags, "--max-ctx", "2048"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (
        done.stdout.strip() == model.detokenize(greedy(model, model.tokenizer.with_bos(model.tokenize(prompt)))).strip()
    )


def test_the_file_has_no_chat_template() -> None:
    with open_gguf(FILE) as file:
        assert "tokenizer.chat_template" not in file.metadata
