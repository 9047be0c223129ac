"""Every reference file across restarts: what a sequence resumed from the disk says is what the whole one says."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import luce
from luce.api import Model
from tests.support.reference import Reference, references

each_file = pytest.mark.parametrize("reference", references(), ids=lambda r: r.name)


def load(path: Path, directory: Path, **more: Any) -> Model:
    fields = {"target_devices": "cpu:0", "max_ctx": 256, "kv_cache_min_tokens": 1, **more}
    return luce.load(path, kv_cache_dir=str(directory), **fields)


def ask(model: Model, prompt: list[int], n: int) -> tuple[list[int], int, str]:
    """(greedy reply, tokens from the cache, tier)."""
    generation = model.generate(prompt, max_tokens=n, temperature=0, ignore_eos=True)
    tokens = [token.id for token in generation if token.id >= 0]
    assert generation.finish is not None
    return tokens, generation.finish.timings.cached_tokens, generation.finish.timings.cache_tier


def saved(model: Model, prompt: list[int]) -> int:
    """How much of a prompt is on the disk after its reply: up to its last boundary where states are large, else all."""
    spec = model.spec
    exact = spec.recurrent or any(group.window is not None for group in spec.page_groups)
    return [len(prompt), *(model.chat.boundaries(prompt) if exact else ())][-1]


@each_file
def test_greedy_after_a_restart(reference: Reference, tmp_path: Path) -> None:
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    with load(reference.path, tmp_path) as model:
        assert ask(model, prompt, 10) == (expected[:10], 0, "none")
    with load(reference.path, tmp_path) as model:
        assert ask(model, prompt, 32) == (expected, saved(model, prompt), "disk")
        assert ask(model, prompt, 32) == (expected, len(prompt), "ram")
    # And behind the reply of the first run, whose snapshot continues that of the prompt.
    with load(reference.path, tmp_path) as model:
        assert ask(model, [*prompt, *expected[:10]], 22) == (expected[10:], len(prompt) + 9, "disk")


@pytest.mark.parametrize(
    "name", ["qwen3-a-F32", "qwen35-a-F32", "qwen35moe-b-Q4_K_M", "laguna-a-F32", "gemma4-e-F32", "gemma4-moe-F32"]
)
def test_any_placement_restores_what_any_other_one_saved(name: str, tmp_path: Path) -> None:
    reference = Reference(name)
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    layers = len(reference.spec.blocks)
    splits: list[tuple[float, ...]] = [(), (1.0,) * layers, (2.0, layers - 2.0)]
    for i, before in enumerate(splits):
        for j, after in enumerate(splits):
            directory = tmp_path / f"{i}{j}"
            for split, tier in ((before, "none"), (after, "disk")):
                devices = tuple(f"cpu:{n}" for n in range(len(split) or 1))
                with load(reference.path, directory, target_devices=devices, target_layer_split=split) as model:
                    known = saved(model, prompt) if tier == "disk" else 0
                    assert ask(model, prompt, 32) == (expected, known, tier)


@pytest.mark.parametrize("types", [("bf16", "bf16"), ("q8_0", "q4_0")], ids="-".join)
def test_stored_types(types: tuple[str, str], tmp_path: Path) -> None:
    reference = Reference("qwen35-a-F32")
    prompt = reference.expected["prompt_long"].tolist()
    kinds = dict(zip(("cache_type_k", "cache_type_v"), types, strict=True))
    with load(reference.path, tmp_path, **kinds) as model:
        expected = ask(model, prompt, 20)
    with load(reference.path, tmp_path, **kinds) as model:
        assert ask(model, prompt, 20) == (expected[0], saved(model, prompt), "disk")
    with load(reference.path, tmp_path) as model:
        assert ask(model, prompt, 20)[1:] == (0, "none")


def test_a_copy_of_the_file_is_the_same_model_and_another_file_is_not(tmp_path: Path) -> None:
    reference, other = Reference("qwen35-a-F32"), tmp_path / "other.gguf"
    prompt = reference.expected["prompt_long"].tolist()
    shutil.copy(reference.path, other)
    with load(reference.path, tmp_path / "cache") as model:
        expected = ask(model, prompt, 4)[0]
    with load(other, tmp_path / "cache") as model:
        # The bytes of an unknown file are read first, behind the scenes.
        assert model.engine.cache is not None and model.engine.cache.disk is not None
        while model.engine.cache.disk.store is None:
            time.sleep(0.01)
        assert ask(model, prompt, 4) == (expected, saved(model, prompt), "disk")
    data = bytearray(other.read_bytes())
    data[-5] ^= 1
    other.write_bytes(data)
    with load(other, tmp_path / "cache") as model:
        assert ask(model, prompt, 1)[1:] == (0, "none")
    with load(Reference("qwen35-a-Q8_0").path, tmp_path / "cache") as model:
        assert ask(model, prompt, 1)[1:] == (0, "none")


def test_a_chat_of_ten_turns_reads_only_what_is_new_also_after_restarts(tmp_path: Path) -> None:
    # The state of this model is 8 layers' worth whatever the length; its pages grow with the conversation.
    reference = Reference("qwen35-a-F32")
    words = reference.expected["prompt_long"].tolist()
    with luce.load(reference.path, target_devices="cpu:0", max_ctx=1024, cache_ram=0) as plain:
        history, written, known = words[:100], 0, 0
        for turn in range(10):
            with load(reference.path, tmp_path, max_ctx=1024) as model:
                expected = ask(plain, history, 8)[0]
                said, cached, tier = ask(model, history, 8)
                assert (said, cached) == (expected, known)
                assert tier == ("disk" if turn else "none")
            stored = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
            if turn == 1:
                step = stored - written
            elif turn > 1:
                assert stored - written < 1.3 * step
            written = stored
            known = len(history) + 7
            history = [*history, *said, *words[turn : turn + 40]]
