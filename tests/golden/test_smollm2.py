"""A real model: SmolLM2-135M-Instruct Q4_1 on the CPU, held against transformers on the dequantised weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import luce
from luce.errors import LuceError
from luce.hub.lookup import resolve_model
from tests.support.smollm2 import MESSAGES, PROMPTS, RECORD, STEPS, computed, digest

Json = dict[str, Any]


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
def recorded(path: Path) -> Json:
    """What transformers computes from this file."""
    record: Json = json.loads(RECORD.read_text())
    assert record["file"] == digest(path), "another file: python -m tests.support.smollm2 records anew"
    return record


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_continuation_equals_transformers(model: luce.Model, recorded: Json, prompt: str) -> None:
    expected = recorded["prompts"][prompt]
    ids = expected["ids"]
    assert model.tokenize(prompt) == ids
    tokens = [t.id for t in model.generate(ids, max_tokens=STEPS, temperature=0, ignore_eos=True)]
    assert tokens == expected["tokens"]
    assert model.detokenize(tokens) == expected["text"]
    assert len(tokens) == STEPS


def test_chat_template_equals_transformers(model: luce.Model, recorded: Json) -> None:
    assert model.chat.prompt(MESSAGES) == recorded["chat"]


@pytest.mark.slow
@pytest.mark.oracle
def test_the_record_is_what_transformers_computes(path: Path, recorded: Json) -> None:
    for package in ("torch", "transformers", "accelerate"):
        pytest.importorskip(package, reason=f"{package} is an oracle of this test and not installed")
    assert computed(path) == recorded


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
    for read, restored in (found[:2], found[2:]):
        assert read[1:] == (0, "none")
        assert restored == (read[0], len(prompt), "disk")
