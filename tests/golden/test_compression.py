"""Numbers told in long texts of which a tenth is kept: they come back, and all placements give the same replies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import luce
from luce.text.prompt_compression import CompressionRequest
from tests.support.warm import WARM
from tools.bench_retrieval import Case, cases, recalled

TINY = Path(__file__).parents[2] / "models" / "tiny"
CONTEXT = 4096
#: tokens of the prompts that are read by default: their scores take a third of the time
SHORT = 2048
DEPTHS = np.linspace(0, 1, 20).tolist()
#: of these, the ones that are tried at once, and in other ways: two, one behind the other
SEVERAL = (3, 12, 8)
SOME = SEVERAL[:2]
#: depths in prompts of eight times the trained length, which take long: one by default
FAR = (0.35,)
#: longer than a prompt, so that the end of a prompt occurs nowhere else in it
FILLER = "\n".join(text for texts in json.loads((TINY / "prompts.json").read_text()).values() for text in texts)


def opened(**settings: Any) -> luce.Model:
    chosen: dict[str, Any] = {
        "target_devices": "cpu:0",
        "cpu_weights": "packed",
        "kv_cache_dir": "off",
        "prefill_compression": "always",
        "prefill_drafter": str(TINY / "drafter.gguf"),
        "prefill_keep_ratio": "0.1",
        **settings,
    }
    return luce.load(TINY / "target.gguf", max_ctx=CONTEXT + 64, **chosen)


@pytest.mark.parametrize(("length", "most"), [(SHORT, 0.3), pytest.param(CONTEXT, 0.25, marks=pytest.mark.slow)])
def test_numbers_come_back_at_all_depths(length: int, most: float) -> None:
    with opened() as model:
        found = list(recalled(model, list(cases(model, length, DEPTHS, FILLER))))
        assert model.compression.compressor is not None
        stats = model.compression.compressor.stats()
    # A tenth, the end with the question, and whole segments.
    assert stats.original == len(DEPTHS) * length and stats.kept < most * stats.original
    assert sum(right for right, _ in found) >= 19


@pytest.mark.parametrize("depths", [FAR, pytest.param((0, 0.7, 1), marks=pytest.mark.slow)], ids=str)
def test_numbers_come_back_from_eight_times_the_trained_length(depths: tuple[float, ...]) -> None:
    """The small model reads segments, and the target the tokens that its context holds."""
    with luce.load(
        TINY / "target.gguf",
        target_devices="cpu:0",
        cpu_weights="packed",
        kv_cache_dir="off",
        prefill_compression="always",
        prefill_drafter=str(TINY / "drafter.gguf"),
        prefill_keep_ratio="0.1",
    ) as model:
        trained = model.spec.context_length
        found = list(recalled(model, list(cases(model, 8 * trained, depths, FILLER))))
        assert model.compression.compressor is not None
        stats = model.compression.compressor.stats()
    assert stats.original == 8 * trained * len(depths) and stats.kept < trained * len(depths)
    assert all(right for right, _ in found)


def asked(model: luce.Model, numbers: Sequence[int]) -> list[Case]:
    every = list(cases(model, SHORT, DEPTHS, FILLER))
    return [every[number] for number in numbers]


@pytest.fixture(scope="module")
def replies() -> dict[int, tuple[bool, list[int]]]:
    """On one device, by the number of the case."""
    with opened() as model:
        found = dict(zip(SEVERAL, recalled(model, asked(model, SEVERAL)), strict=True))
    # What is compared is not the same whatever was kept.
    assert all(right for right, _ in found.values()) and len({tuple(ids) for _, ids in found.values()}) == len(SEVERAL)
    return found


PLACES: dict[str, dict[str, Any]] = {
    "three shards": {"target_devices": "cpu:0,cpu:1,cpu:2"},
    "daemon": {"target_devices": "cpu:0,cpu:1", "target_shard_ipc_bin": f"cpu={WARM}", "isolate_shards": True},
    "small model in a daemon": {
        "target_devices": "cpu:0,cpu:1",
        "target_shard_ipc_bin": f"cpu={WARM}",
        "prefill_drafter_device": "cpu:2",
    },
    "small model in a daemon, weights for each prompt": {
        "target_devices": "cpu:0,cpu:1",
        "target_shard_ipc_bin": f"cpu={WARM}",
        "prefill_drafter_device": "cpu:2",
        "draft_residency": "request-scoped",
    },
    "drafting": {"draft": str(TINY / "draft.gguf"), "verify_width": 16},
    "trees": {"draft": str(TINY / "draft.gguf"), "verify_width": 16, "ddtree": True},
    # Those of one layer after the other.
    "weights for each prompt": {"draft_residency": "request-scoped"},
    "KVFlash with the same small model": {
        "kvflash": "4160",
        "kvflash_policy": "drafter",
        "kvflash_drafter": str(TINY / "drafter.gguf"),
    },
}


@pytest.mark.parametrize("place", PLACES)
def test_replies_are_the_same(replies: dict[int, tuple[bool, list[int]]], place: str) -> None:
    with opened(**PLACES[place]) as model:
        assert list(recalled(model, asked(model, SOME))) == [replies[number] for number in SOME]


def test_the_prefix_cache_has_the_compressed_prompt_after_a_restart(
    replies: dict[int, tuple[bool, list[int]]], tmp_path: Path
) -> None:
    for cached in (False, True):
        with opened(kv_cache_dir=str(tmp_path), kv_cache_min_tokens=64) as model:
            (case,) = asked(model, SOME[:1])
            # The small model does not read the prompt again.
            assert model.compression.read(case.ids).reused is cached
            assert model.compression.read(case.ids, request=CompressionRequest(keep_ratio=0.2)).reused is cached
            reply = model.generate(case.ids, max_tokens=8, temperature=0, ignore_eos=True)
            assert [token.id for token in reply if token.id >= 0] == replies[SOME[0]][1]
            assert reply.finish is not None
            assert (reply.finish.timings.cache_tier == "disk") is cached


def test_kept_tokens_with_their_original_positions() -> None:
    found = []
    for place in ("one device", "three shards", "trees"):
        with opened(prefill_positions="original", **PLACES.get(place, {})) as model:
            wanted = asked(model, SOME)
            read = model.compression.read(wanted[0].ids)
            assert read.position_ids is not None and read.position_ids[-1] == SHORT - 1
            found.append(list(recalled(model, wanted)))
    assert all(right for right, _ in found[0]) and found[1:] == found[:1] * 2


def test_several_prompts_at_once(replies: dict[int, tuple[bool, list[int]]]) -> None:
    with opened(parallel=3) as model:
        assert list(recalled(model, asked(model, SEVERAL))) == list(replies.values())
