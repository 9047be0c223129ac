"""A real model: SmolLM2-135M-Instruct Q4_1 on the CPU, held against transformers on the dequantised weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import luce
from luce.errors import LuceError
from luce.hub.lookup import resolve_model

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
)
STEPS = 64


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return resolve_model("smollm2", fetch=False)
    except LuceError as error:
        pytest.skip(f"{error} (luce pull smollm2 brings the file)")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[luce.Model]:
    with luce.load(path, target_devices="cpu:0", max_ctx=1024, parallel=3) as model:
        yield model


@pytest.fixture(scope="module")
def oracle(path: Path) -> tuple[Any, Any]:
    """Model and tokenizer of transformers, which reads the file with its own code."""
    for package in ("torch", "transformers", "accelerate"):
        pytest.importorskip(package, reason=f"{package} is an oracle of this test and not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        network = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
        # EOS is an ordinary token here: all STEPS tokens are compared.
        network.generation_config.eos_token_id = None
        return network, AutoTokenizer.from_pretrained(**place)


@pytest.mark.oracle
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_continuation_equals_transformers(model: luce.Model, oracle: tuple[Any, Any], prompt: str) -> None:
    network, tokenizer = oracle
    encoded = tokenizer(prompt, return_tensors="pt")
    ids = encoded.input_ids[0].tolist()
    assert model.tokenize(prompt) == ids
    output = network.generate(**encoded, do_sample=False, max_new_tokens=STEPS, pad_token_id=0)
    expected = output[0].tolist()[len(ids) :]
    tokens = [t.id for t in model.generate(ids, max_tokens=STEPS, temperature=0, ignore_eos=True)]
    assert tokens == expected
    assert model.detokenize(tokens) == tokenizer.decode(expected, skip_special_tokens=True)
    assert len(tokens) == STEPS


@pytest.mark.oracle
def test_chat_template_equals_transformers(model: luce.Model, oracle: tuple[Any, Any]) -> None:
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    expected = oracle[1].apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert model.chat.prompt(messages) == list(expected)


def test_chat_answers_sensibly(model: luce.Model) -> None:
    prompt = model.chat.prompt([{"role": "user", "content": "What is the capital of France? Answer in one word."}])
    text = "".join(token.text for token in model.generate(prompt, max_tokens=32, temperature=0))
    assert "Paris" in text


def test_parallel_generations_are_independent(model: luce.Model) -> None:
    alone = [[t.id for t in model.generate(p, max_tokens=24, temperature=0)] for p in PROMPTS]
    together = [model.generate(p, max_tokens=24, temperature=0) for p in PROMPTS]
    assert [[t.id for t in generation] for generation in together] == alone


def test_replies_after_a_restart_are_those_of_the_first_run(path: Path, tmp_path: Path) -> None:
    found = []
    for devices, kinds in (("cpu:0", "f16"), ("cpu:0,cpu:1,cpu:2", "f16"), ("cpu:0", "q8_0"), ("cpu:0,cpu:1", "q8_0")):
        fields: dict[str, Any] = {"kv_cache_dir": str(tmp_path), "kv_cache_min_tokens": 1, "max_ctx": 512}
        with luce.load(path, target_devices=devices, cache_type_k=kinds, cache_type_v=kinds, **fields) as model:
            prompt = model.tokenize(PROMPTS[2] * 8)
            generation = model.generate(prompt, max_tokens=12, temperature=0, ignore_eos=True)
            tokens = [token.id for token in generation]
            assert generation.finish is not None
            timings = generation.finish.timings
            found.append((tokens, timings.cached_tokens, timings.cache_tier))
    for computed, restored in (found[:2], found[2:]):
        assert computed[1:] == (0, "none")
        assert restored == (computed[0], len(prompt), "disk")
