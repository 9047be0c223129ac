"""A model moves to other devices while a reply is generated, which goes on with the same tokens."""

from __future__ import annotations

import dataclasses
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

import luce
from luce.api import Model
from luce.assembly import relocate
from luce.errors import DeviceError, LuceError
from tests.support.daemons import HERE
from tests.support.reference import Reference

MODELS = ["qwen3-a-F32", "qwen35-a-F32", "qwen35moe-b-Q4_K_M", "laguna-a-F32", "gemma4-e-F32", "gemma4-moe-F32"]
#: tokens at which the model moves
AT = (2, 9, 17)


def load(reference: Reference, **settings: Any) -> Model:
    return luce.load(reference.path, cpu_weights="float32", max_ctx=512, **{"kv_cache_dir": "off", **settings})


def moving(model: Model, prompt: list[int], tokens: int, moves: dict[int, dict[str, Any]]) -> list[int]:
    """The tokens of a greedy reply. Behind each number of tokens the model moves to the devices of these settings."""
    ids, errors = list[int](), list[Exception]()
    threads = []
    for token in model.generate(prompt, max_tokens=tokens, temperature=0, ignore_eos=True):
        ids.append(token.id)
        if (settings := moves.get(len(ids))) is not None:
            config = dataclasses.replace(model.config, **settings)

            def move(config: Any = config) -> None:
                try:
                    model.engine.relocate(lambda: relocate(model, config))
                except Exception as error:
                    errors.append(error)

            threads.append(threading.Thread(target=move))
            threads[-1].start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return ids


@pytest.mark.parametrize("name", MODELS)
def test_a_reply_goes_on_with_its_tokens(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reference = Reference(name)
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    layers = len(reference.spec.layers)
    all_apart = tuple(f"cpu:{n}" for n in range(layers)), (1.0,) * layers
    two = ("cpu:1", "cpu:0"), (1.0, layers - 1.0)
    names = "target_devices", "target_layer_split"
    places = [dict[str, Any](zip(names, each, strict=True)) for each in (all_apart, two, (("cpu:0",), ()))]
    moves = dict(zip(AT, places, strict=True))
    with load(reference) as model:
        assert not model.immovable
        assert moving(model, prompt, len(expected), moves) == expected
        assert [shard["device"] for shard in model.placement] == ["cpu:0"]
        assert caplog.text.count("replies go on") == len(AT)
        assert model.engine.stats().resumed == 0
        # A later reply reads everything on the devices that there are now.
        assert moving(model, prompt, len(expected), {}) == expected


@pytest.mark.parametrize("name", ["qwen35-a-F32", "gemma4-e-F32"])
def test_to_a_daemon_and_back(name: str) -> None:
    reference = Reference(name)
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    with load(reference) as model:
        there: dict[str, Any] = {"target_devices": ("cpu:0", "cpu:1"), "target_shard_ipc_bin": (("", HERE),)}
        back: dict[str, Any] = {"target_devices": ("cpu:0",), "target_shard_ipc_bin": ()}
        assert moving(model, prompt, len(expected), {3: there, 9: back, 12: there}) == expected
        assert [daemon.device for daemon in model.daemons()] == ["cpu:1"]
        assert moving(model, prompt, len(expected), {}) == expected


def test_a_placement_that_fails_leaves_a_model_that_can_move_again() -> None:
    reference = Reference("qwen35-a-F32")
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    with load(reference) as model:
        bad = dataclasses.replace(model.config, target_devices=("cpu:0", "cpu:1"), target_layer_split=(1.0, 1.0, 1.0))
        with pytest.raises(LuceError):
            model.engine.relocate(lambda: relocate(model, bad))
        with pytest.raises(LuceError, match="the backend is closed"):
            moving(model, prompt, 2, {})
        seen: list[Any] = []

        def worth(plan: Any) -> bool:
            seen.append(plan)
            return False

        with pytest.raises(DeviceError, match="would not be faster by enough"):
            model.engine.relocate(lambda: relocate(model, model.config, worth=worth))
        assert len(seen) == 1 and model.placement == []
        model.backend.unload("box is missing")
        assert model.down() == "box is missing"
        model.engine.relocate(lambda: relocate(model, model.config))
        assert not model.down()
        assert moving(model, prompt, len(expected), {}) == expected


def test_what_cannot_move_says_why(tmp_path: Path) -> None:
    with load(Reference("qwen3-a-F32"), draft="ngram") as model:
        assert not model.immovable
    with load(Reference("qwen3-a-F32"), kv_cache_placement="exact", kv_cache_dir=str(tmp_path), kvflash="256") as model:
        assert model.immovable == "--kvflash, --kv-cache-placement exact"
