"""Snapshots across placements: any of them restores what any other one saved."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from luce.kvcache.disk import manifest as manifests
from luce.kvcache.disk.files import open_directory
from luce.kvcache.disk.part import PartReader
from luce.shard.sizes import mirrored
from tests.support.disk_models import ask, load, saved
from tests.support.reference import Reference


@pytest.mark.parametrize(
    "name", ["qwen3-a-F32", "qwen35-a-F32", "qwen35moe-b-Q4_K_M", "laguna-a-F32", "gemma4-e-F32", "gemma4-moe-F32"]
)
def test_any_placement_restores_what_any_other_one_saved(name: str, tmp_path: Path) -> None:
    reference = Reference(name)
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    layers = len(reference.spec.layers)
    splits: list[tuple[float, ...]] = [(), (1.0,) * layers, (2.0, layers - 2.0)]
    for i, before in enumerate(splits):
        copies = [tmp_path / f"{i}{j}" for j in range(len(splits))]
        for split, directory in zip((before, *splits), (tmp_path / f"{i}", *copies), strict=True):
            devices = tuple(f"cpu:{n}" for n in range(len(split) or 1))
            with load(reference.path, directory, target_devices=devices, target_layer_split=split) as model:
                known, tier = (saved(model, prompt), "disk") if directory in copies else (0, "none")
                assert ask(model, prompt, 32) == (expected, known, tier)
            if directory not in copies:
                # Each finds what this one saved, and nothing else.
                for copy in copies:
                    shutil.copytree(directory, copy)


def test_only_the_same_placement_restores_what_is_to_be_exact(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reference = Reference("qwen35-a-F32")
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    layers = len(reference.spec.layers)
    one, two = {"target_devices": "cpu:0"}, {"target_devices": "cpu:0,cpu:1", "target_layer_split": (1.0, layers - 1.0)}

    def tier(**more: Any) -> str:
        with load(reference.path, tmp_path, **more) as model:
            reply, _, tier = ask(model, prompt, 32)
            assert reply == expected
            return tier

    exact = {"kv_cache_placement": "exact"}
    assert [tier(**one, **exact), tier(**one, **exact)] == ["none", "disk"]
    assert tier(**two, **exact) == "none"
    here, there = f"cpu:0 0..0, cpu:1 1..{layers - 1} here", f"cpu:0 0..{layers - 1} there"
    assert f"snapshots of this model are not used: --kv-cache-placement exact is {here} and {there}" in caplog.text
    # Both have their own; what any placement may use is apart from these.
    assert [tier(**two, **exact), tier(**one, **exact)] == ["disk", "disk"]
    assert [tier(**one), tier(**two)] == ["none", "disk"]


@pytest.mark.parametrize("name", ["qwen3-a-F32", "qwen3-b-Q4_K_M"])
def test_diverging_prompts_resume_in_any_placement(name: str, tmp_path: Path) -> None:
    reference = Reference(name)
    prompt = reference.expected["prompt_long"].tolist()
    at = len(prompt) // 64 * 64 - 10
    others = [[*prompt[:at], *prompt[begin : begin + 20]] for begin in (3, 9)]
    known = at // 64 * 64
    with load(reference.path, tmp_path, kv_cache_dir="off", kv_cache_min_tokens=512, cache_ram=0) as model:
        expected = [ask(model, other, 16)[0] for other in others]
    with load(reference.path, tmp_path, target_devices="cpu:0,cpu:1") as model:
        ask(model, prompt, 4)
    for devices, other, reply in zip(("cpu:0", "cpu:0,cpu:1,cpu:2"), others, expected, strict=True):
        with load(reference.path, tmp_path, target_devices=devices) as model:
            assert ask(model, other, 16) == (reply, known, "disk")


@pytest.mark.parametrize("shards", ["one", "as many as layers"])
def test_borrowed_keys_and_values_are_stored_once(shards: str, tmp_path: Path) -> None:
    reference = Reference("gemma4-e-F32")
    layers = range(len(reference.spec.layers))
    prompt = reference.expected["prompt_long"].tolist()
    devices = [f"cpu:{n}" for n in (layers if shards != "one" else range(1))]
    assert any(mirrored(reference.spec, range(layer, layer + 1)) for layer in layers)
    with load(reference.path, tmp_path, target_devices=devices) as model:
        assert len(model.placement) == len(devices)
        ask(model, prompt, 4)
    stored: Counter[tuple[str, str, str, int]] = Counter()
    for path in tmp_path.rglob("manifest.json"):
        manifest = manifests.decode(path.read_bytes(), path.parent.parent.name, path.parent.name)
        for info in (*manifest.pages, *manifest.state):
            part = PartReader(partial(open_directory, path.parent), info)
            for frame in part.frames:
                if frame.name.startswith("blk."):
                    stored[manifest.id, info.name.split("-")[0], frame.name, frame.page] += 1
            part.close()
    owners = {f"blk.{layer}.{kind}" for layer in layers if reference.spec.donor(layer) is None for kind in "kv"}
    assert {name for _, _, name, _ in stored} == owners
    assert set(stored.values()) == {1}
