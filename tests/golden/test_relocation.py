"""A model moves to other devices while a reply is generated, which goes on with the same tokens."""

from __future__ import annotations

import dataclasses
import logging
import socket
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from luce.assembly import relocate
from luce.cluster.member_peer import MemberPeer
from luce.errors import DeviceError, LuceError
from luce.layers.kept_weights import KeptWeights
from luce.remote.daemon import serve
from tests.support.daemons import HERE
from tests.support.reference import Reference
from tests.support.relocation import load, moving

MODELS = ["qwen3-a-F32", "qwen35-a-F32", "qwen35moe-b-Q4_K_M", "laguna-a-F32", "gemma4-e-F32", "gemma4-moe-F32"]
#: tokens at which the model moves
AT = (2, 9, 17)


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


@pytest.mark.parametrize("weights", ["float32", "packed"])
@pytest.mark.parametrize("name", ["qwen35moe-b-Q4_K_M", "gemma4-e-F32"])
def test_layers_that_stay_on_their_device_are_not_read_again(name: str, weights: str) -> None:
    reference = Reference(name)
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    layers = len(reference.spec.layers)
    with load(reference, cluster="home", cluster_resume=5, cpu_weights=weights) as model:
        found = model.backend.loaded
        whole = found.read
        assert whole > 0 and found.kept == 0

        def moved(tokens: int, devices: tuple[str, ...], *split: float) -> tuple[int, int]:
            settings: dict[str, Any] = {"target_devices": devices, "target_layer_split": split}
            assert moving(model, prompt, len(expected), {tokens: settings}) == expected
            return model.backend.loaded.read, model.backend.loaded.kept

        # The last layers go elsewhere, with the head, and come back.
        read, kept = moved(3, ("cpu:0", "cpu:1"), layers - 1.0, 1.0)
        assert 0 < read < whole and 0 < kept < whole
        again, rest = moved(5, ("cpu:0",))
        assert 0 < again <= read and rest >= kept
        # Tables of per-layer embeddings are on both.
        assert read + kept >= again + rest == whole
        # Nothing moves: nothing is read, but a table of which a device has some columns.
        same, all_kept = moved(7, ("cpu:0",))
        assert same + all_kept == whole and all_kept > kept
        assert same == 0 or reference.spec.per_layer
        # All layers go.
        assert moved(9, ("cpu:1",))[1] == 0


class Member:
    """A member's daemon in threads of this process, one connection after another; its weights stay between them."""

    def __init__(self) -> None:
        self.weights = KeptWeights()
        self.threads: list[threading.Thread] = []

    def connect(self, label: str) -> MemberPeer:
        ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
        for thread in self.threads:
            thread.join()
        options: dict[str, Any] = {"can_share": False, "server_timeout": 30.0, "weights": self.weights}
        options["locate"] = lambda load, on_progress: Path(load.path)
        self.threads.append(threading.Thread(target=serve, args=theirs, kwargs=options))
        self.threads[-1].start()
        return MemberPeer(*cast("Any", ours))


def test_a_member_keeps_its_layers_between_connections(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "luce.remote")
    reference = Reference("qwen35moe-b-Q4_K_M")
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    box, layers = Member(), float(len(reference.spec.layers))

    def loads() -> list[tuple[int, int]]:
        own = [
            r for r in caplog.records if r.name == "luce.remote.daemon_layers" and r.getMessage() == "weights loaded"
        ]
        fields = [record.__dict__["fields"] for record in own]
        return [(each["read"], each["kept"]) for each in fields]

    with load(reference, cluster="home", cluster_resume=5, cpu_weights="packed") as model:
        connects = {"member://box/": box.connect}

        def move(*split: float) -> None:
            devices = ("cpu:0", "member://box/cpu:0")[: len(split)]
            there = dataclasses.replace(model.config, target_devices=devices, target_layer_split=split)
            model.engine.relocate(lambda: relocate(model, there, connects))
            assert moving(model, prompt, len(expected), {}) == expected

        move(layers - 2, 2)
        first, none = loads()[-1]
        assert first > 0 and none == 0
        move(layers - 1, 1)
        read, kept = loads()[-1]
        assert read == 0 and 0 < kept < first
        move(layers - 2, 2)
        assert loads()[-1] == (first - kept, kept)
        # What it holds while it has no layers counts as free for whoever connects, and goes when it is told so.
        move(1)
        box.weights.release()
        move(layers - 2, 2)
        assert loads()[-1] == (first, 0)


def test_the_old_placement_is_loaded_again_from_what_was_kept() -> None:
    reference = Reference("qwen35-a-F32")
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    with load(reference, cluster="home", cluster_resume=5, cpu_weights="packed") as model:
        bad = dataclasses.replace(model.config, target_devices=("cpu:0", "cpu:1"), target_layer_split=(1.0, 1.0, 1.0))

        def replace() -> None:
            with pytest.raises(LuceError):
                relocate(model, bad)
            with pytest.raises(DeviceError, match="would not be faster by enough"):
                relocate(model, model.config, worth=lambda plan: False)
            relocate(model, model.config)

        threads = []
        ids = []
        for token in model.generate(prompt, max_tokens=len(expected), temperature=0, ignore_eos=True):
            ids.append(token.id)
            if len(ids) == 3:
                threads.append(threading.Thread(target=model.engine.relocate, args=(replace,)))
                threads[-1].start()
        for thread in threads:
            thread.join()
        assert ids == expected
        assert model.backend.loaded.read == 0 and model.backend.loaded.kept > 0
        # Where nothing follows, nothing stays.
        model.backend.unload("box is missing")
        model.engine.relocate(lambda: relocate(model, model.config))
        assert model.backend.loaded.kept == 0
        assert moving(model, prompt, len(expected), {}) == expected


def test_what_cannot_move_says_why(tmp_path: Path) -> None:
    with load(Reference("qwen3-a-F32"), draft="ngram") as model:
        assert not model.immovable
    with load(Reference("qwen3-a-F32"), kv_cache_placement="exact", kv_cache_dir=str(tmp_path), kvflash="256") as model:
        assert model.immovable == "--kvflash, --kv-cache-placement exact"
