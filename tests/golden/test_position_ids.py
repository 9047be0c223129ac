"""Prompts whose tokens have the positions of a longer text: logits of transformers, and equal replies everywhere."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import luce
from luce.config.sampling import SamplingParams
from luce.engine.events import Event, Failed, Finished, Timings, Tokens
from luce.errors import RequestError
from tests.support.covering import each_kind
from tests.support.draft_replies import KINDS
from tests.support.reference import DIRECTORY, Reference, errors
from tests.support.warm import WARM

TINY = Path(__file__).parents[2] / "models" / "tiny"
#: files that transformers reads, and recipes of random models
FILES = ["lfm2-a", "minimaxm2-a", "qwen2-a", "qwen35-a", "qwen35moe-a", "stablelm-a"]
RECIPES = ["commandr-a", "ernie45-a", "ernie45moe-a", "gemma-a", "olmoe-a", "qwen2moe-a"]


def gapped(tokens: int, first: int = 20, gap: int = 80) -> NDArray[np.int32]:
    """Positions with gaps of up to `gap` behind token `first`, and behind every 37th one."""
    sizes = np.zeros(tokens, np.int64)
    sizes[first::37] = gap - 3 * np.arange(len(sizes[first::37]))
    found: NDArray[np.int32] = (np.arange(tokens) + np.cumsum(sizes)).astype(np.int32)
    return found


def oracle(name: str) -> Any:
    for package in ("torch", "transformers", "accelerate"):
        pytest.importorskip(package, reason=f"{package} is an oracle of this test and not installed")
    import torch
    import transformers

    from tools.make_reference import random_model

    if name in RECIPES:
        return random_model(name)
    options = {"gguf_file": f"{name}-F32.gguf", "dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(DIRECTORY, **options).eval()


@pytest.mark.oracle
@pytest.mark.parametrize("name", FILES + RECIPES)
def test_logits_equal_transformers(name: str) -> None:
    network = oracle(name)
    import torch

    reference = Reference(f"{name}-F32")
    prompt = reference.expected["prompt_long"].tolist()
    ids = gapped(len(prompt))
    with torch.no_grad():
        # With a mask, as without one gaps are taken for the begins of other texts.
        ones, own = torch.ones((1, len(prompt)), dtype=torch.long), torch.from_numpy(ids.astype(np.int64))[None]
        asked = {"input_ids": torch.tensor([prompt]), "attention_mask": ones, "position_ids": own}
        expected = network(**asked, use_cache=False).logits[0].numpy()
    with luce.load(reference.path, target_devices="cpu:0", max_ctx=512, chunk=50) as model:
        actual = model.logits(prompt, ids)
        counted = model.logits(prompt)
    assert np.median(errors(actual, expected)) <= reference.limits("f32")["nmse_median"]
    assert errors(counted, expected).max() > 1e-3


@each_kind()
def test_every_family_takes_them_on_every_placement(reference: Reference) -> None:
    prompt = reference.expected["prompt_long"].tolist()
    ids = gapped(len(prompt))
    found = []
    for devices in ("cpu:0", "cpu:0,cpu:1"):
        with luce.load(reference.path, target_devices=devices, max_ctx=512, chunk=50) as model:
            found.append(model.logits(prompt, ids))
            if devices == "cpu:0":
                counted = model.logits(prompt)
    np.testing.assert_array_equal(*found)
    # Experts of other rows round these in another way.
    different = errors(found[0], counted)
    assert different[:20].max() < 1e-9 and different[20:].max() > 1e-6


PROMPT = Reference("qwen35-a-F32").expected["prompt_long"].tolist()
IDS = gapped(len(PROMPT), first=70)


def asked(
    model: luce.Model, ids: NDArray[np.int32] | None, prompt: Sequence[int] = PROMPT, tokens: int = 24
) -> tuple[list[int], Timings]:
    """The greedy reply to a prompt at these positions."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    model.engine.submit(prompt, params, output=model.reply_text(), on_event=events.put, position_ids=ids)
    reply: list[int] = []
    while not isinstance(event := events.get(timeout=300), Finished):
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Tokens):
            reply += [token.id for token in event.tokens if token.id >= 0]
    return reply, event.timings


def opened(**settings: Any) -> luce.Model:
    chosen = {"target_devices": "cpu:0", "max_ctx": 512, "chunk": 64, "kv_cache_dir": "off", **settings}
    return luce.load(KINDS["fitted"][0].path, **chosen)


@pytest.fixture(scope="module")
def replies() -> tuple[list[int], list[int]]:
    """With these positions, and with counted ones."""
    with opened() as model:
        found = asked(model, IDS)[0], asked(model, None)[0]
    assert found[0] != found[1]
    return found


PLACES: dict[str, dict[str, Any]] = {
    "three devices": {"target_devices": "cpu:0,cpu:1,cpu:2"},
    "daemon": {"target_devices": "cpu:0,cpu:1", "target_shard_ipc_bin": f"cpu={WARM}", "isolate_shards": True},
    "chains": {"draft": KINDS["fitted"][1], "verify_width": 8},
    "trees": {"draft": KINDS["fitted"][1], "verify_width": 8, "ddtree": True},
    "repeats": {"draft": "ngram", "verify_width": 8},
}


@pytest.mark.parametrize("place", PLACES)
def test_replies_are_the_same(replies: tuple[list[int], list[int]], place: str) -> None:
    with opened(**PLACES[place]) as model:
        assert (asked(model, IDS)[0], asked(model, None)[0]) == replies


def test_the_prefix_cache_tells_positions_apart(replies: tuple[list[int], list[int]], tmp_path: Path) -> None:
    cached = []
    for _ in range(2):
        with opened(kv_cache_dir=str(tmp_path), kv_cache_min_tokens=64) as model:
            for ids, expected in ((IDS, replies[0]), (None, replies[1]), (IDS, replies[0]), (None, replies[1])):
                reply, timings = asked(model, ids)
                assert reply == expected
                cached.append((timings.cache_tier, timings.cached_tokens > IDS.argmax() // 2))
    none, ram, disk = ("none", False), ("ram", True), ("disk", True)
    assert cached == [none, none, ram, ram, disk, disk, ram, ram]


def test_a_text_shares_the_tokens_before_its_first_gap() -> None:
    """A model without recurrent states resumes behind any page."""
    reference = Reference("qwen2-a-F32")
    prompt = reference.expected["prompt_long"].tolist()
    ids = gapped(len(prompt), first=70)
    with luce.load(reference.path, target_devices="cpu:0", max_ctx=512, kv_cache_dir="off") as model:
        asked(model, None, prompt)
        (first, *_), timings = asked(model, ids, prompt)
        expected = model.logits(prompt, ids)[-1]
    assert timings.cached_tokens == 64 and first == expected.argmax()


def test_pages_of_kvflash_keep_their_positions() -> None:
    prompt, found = (PROMPT * 6)[:800], []
    for devices in ("cpu:0", "cpu:0,cpu:1"):
        settings = {"target_devices": devices, "max_ctx": 1024, "kvflash": "512", "kv_cache_dir": "off", "chunk": 64}
        with luce.load(TINY / "target.gguf", **settings) as model:
            found += [asked(model, ids, prompt)[0] for ids in (gapped(800, gap=100), None)]
            stats = model.engine.stats().paging
            assert stats is not None and stats.swapped_out > 0
    assert found[:2] == found[2:]


@pytest.mark.parametrize("ids", [IDS[:-1], IDS[::-1], IDS - 1, IDS + 2**20, np.zeros_like(IDS)])
def test_other_positions_are_refused(ids: NDArray[np.int32]) -> None:
    with opened() as model, pytest.raises(RequestError, match="position ids"):
        asked(model, ids)


def test_a_reply_ends_where_the_trained_positions_do() -> None:
    with opened() as model:
        last = model.spec.context_length - 1
        ids = IDS.copy()
        ids[-1] = last - 5
        reply, _ = asked(model, ids)
    assert len(reply) == 5
