"""What a server observes of a daemon's devices, and the layers on its devices in another order."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import luce
from luce.backend import observation
from luce.backend.layersplit import LayerSplitBackend
from luce.backend.measured_devices import ModelOnDevices, measured
from luce.backend.serving_options import ServingOptions
from luce.gguf.reader import open_gguf
from luce.profiles.profile import DeviceProfile, FormatProfile, LinkProfile, Observed
from luce.profiles.profile_cache import profile_path, read_profile
from luce.runtime.device import DeviceName
from luce.runtime.open import open_all
from luce.shard.timing import SequenceRows
from tests.support.daemons import HERE, devices, within
from tests.support.drive import Driver
from tests.support.reference import Reference

REFERENCE = Reference("qwen3-a-F32")
PROMPT = REFERENCE.expected["prompt_17"]
GREEDY = REFERENCE.expected["greedy_17"][:8].tolist()


@pytest.mark.parametrize("order", [(2, 1), (1, 2), (2,), (0, 2)])
def test_layers_lie_on_the_named_devices_of_a_daemon(order: tuple[int, ...]) -> None:
    with open_gguf(REFERENCE.path) as file, devices("cpu:0,cpu:1,cpu:2") as opened:
        own = [opened[number] for number in order]
        backend = LayerSplitBackend(file, REFERENCE.spec, own, ServingOptions(context=128))
        with contextlib.closing(backend):
            assert [part.device for part in backend.devices] == [str(device.name) for device in own]
            driver = Driver(backend)
            sequence = driver.start()
            logits = driver.feed((sequence, PROMPT.astype(np.int32)))[0]
            assert int(logits[-1].argmax()) == GREEDY[0]
            seen: dict[str, list[tuple[SequenceRows, float]]] = {str(device.name): [] for device in own}
            for name, steps in seen.items():
                backend.watch_rows(name, lambda rows, seconds, steps=steps: steps.append((rows, seconds)))
            for token in GREEDY[:5]:
                driver.feed((sequence, np.array([token], np.int32)))
            driver.feed((sequence, np.array(GREEDY[5:7], np.int32)))
            driver.feed((sequence, np.array([GREEDY[7]], np.int32)))
    for steps in seen.values():
        assert [rows for rows, _ in steps][:5] == [SequenceRows(position, 1, 1) for position in range(17, 22)]
        # Of the last step a device of this process may not be counted yet.
        assert [rows for rows, _ in steps][5:] in ([], [SequenceRows(24, 1, 1)])
        assert all(0 < seconds < 60 for _, seconds in steps)


def test_a_daemon_keeps_what_a_server_observes_of_its_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(observation, "STEPS", 20)
    (device,) = open_all([DeviceName("cpu", 0)], "target_device", "float32")
    with contextlib.closing(device):
        path = profile_path(device)
    figures = FormatProfile(1e9, {1: 1e9, 512: 1e10}, None, 0.1, False)
    known = DeviceProfile("cpu:0", "x", time.time(), 1e-5, 1e-9, LinkProfile(1e-6, 1e9), {"F32": figures})
    path.parent.mkdir(parents=True)
    path.write_bytes(msgspec.json.encode({"format": 3, "profile": known}))
    settings: dict[str, Any] = {"max_ctx": 256, "kv_cache_dir": "off", "target_devices": "cpu:0,cpu:1"}
    settings |= {"target_shard_ipc_bin": HERE, "cpu_weights": "float32"}
    # The link to the daemon is measured before a load that plans.
    with open_gguf(REFERENCE.path) as file, devices("cpu:0,cpu:1") as opened:
        measured(ModelOnDevices(file, REFERENCE.spec, opened, ServingOptions(context=256)))
    stored: list[Observed] = []
    monkeypatch.setattr(observation, "note_observed", lambda path, phase, observed: stored.append(observed))
    with luce.load(REFERENCE.path, **settings) as model:
        assert model.plan is not None
        before = model.plan.prediction.shards[1].decode.total
        list(model.generate(PROMPT.tolist(), max_tokens=60, ignore_eos=True, temperature=0))
        # Of this process's device the server itself keeps it, of the other one the daemon.
        assert within(60, lambda: (kept := read_profile(path)) is not None and bool(kept.observed))
    found = read_profile(path)
    assert stored and found is not None
    assert found.observed["decode"].steps in (20, 40)
    with luce.load(REFERENCE.path, **settings) as model:
        assert model.plan is not None
        ratio = min(2.0, max(0.5, found.observed["decode"].ratio))
        assert model.plan.prediction.shards[1].decode.total == pytest.approx(before * ratio, rel=0.1)
        assert model.plan.facts["profiles"]["cpu:1"]["observed"] == found.observed["decode"].ratio
