"""Where a loaded model's layers are, by predicted speed: on CPU devices whose figures are invented."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import luce
from luce.backend import fastest_placement, measured_devices
from luce.backend.measured_devices import MeasuredDevices, ModelOnDevices
from luce.errors import DeviceError, OutOfMemoryError, UsageError
from luce.profiles.profile import DeviceProfile, FormatProfile, LinkProfile
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support.daemons import HERE
from tests.support.reference import Reference

REFERENCE = Reference("qwen3-a-F32")
PROMPT = REFERENCE.expected["prompt_17"].tolist()
GREEDY = REFERENCE.expected["greedy_17"][:8].tolist()
SPEEDS = {"cpu:0": 0.01, "cpu:1": 1.0, "cpu:2": 0.9}


def profile(device: Device) -> DeviceProfile:
    speed = SPEEDS[str(device.name)]
    figures = FormatProfile(1e9 * speed, {1: 1e9 * speed, 512: 1e10 * speed}, None, 0.1, False)
    return DeviceProfile(str(device.name), "x", 0.0, 1e-5, 1e-6, LinkProfile(1e-6, 1e9), {"F32": figures})


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The devices with stored figures."""
    names = set(SPEEDS)

    def stored(device: Device, types: Any, **how: Any) -> DeviceProfile | None:
        return profile(device) if str(device.name) in names else None

    monkeypatch.setattr(measured_devices, "stored_profile", stored)
    return names


def load(**settings: Any) -> luce.Model:
    return luce.load(REFERENCE.path, **{"max_ctx": 256, "kv_cache_dir": "off", **settings})


def devices(model: luce.Model) -> list[str]:
    return [part["device"] for part in model.placement]


def test_a_slow_device_is_left_out(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(HostDevice, "close", lambda self: closed.append(str(self.name)))
    with caplog.at_level(logging.INFO, "luce"), load(target_devices="cpu:0,cpu:1", optimize="decode") as model:
        assert devices(model) == ["cpu:1"]
        assert closed == ["cpu:0"]
        assert [token.id for token in model.generate(PROMPT, max_tokens=8, ignore_eos=True, temperature=0)] == GREEDY
        assert model.plan is not None
        assert model.plan.facts["left_out"] == ["cpu:0"]
    assert "left out: cpu:0" in caplog.text


def test_devices_by_name_keep_their_layers_unless_a_goal_is_given() -> None:
    with load(target_devices="cpu:0,cpu:1") as model:
        assert devices(model) == ["cpu:0", "cpu:1"]
        assert model.plan is not None
    with load(target_devices="cpu:0,cpu:1", optimize="memory") as model:
        assert devices(model) == ["cpu:0", "cpu:1"]


def test_pinned_devices_all_hold_layers() -> None:
    with load(target_devices="cpu:0,cpu:1", optimize="decode", pin_devices=True) as model:
        assert devices(model) == ["cpu:0", "cpu:1"]
        assert model.placement[0]["layers"] == [0, 0]
        assert [token.id for token in model.generate(PROMPT, max_tokens=8, ignore_eos=True, temperature=0)] == GREEDY


def test_the_prediction_is_for_the_load_of_the_settings() -> None:
    with load(target_device="cpu:1", optimize_prompt=100, optimize_reply=7) as model:
        assert model.plan is not None
        assert model.plan.facts["load"] == {"sequences": 1, "context": 256, "prompt": 100, "reply": 7}


def test_margins_are_left_free() -> None:
    with pytest.raises(OutOfMemoryError):
        load(target_devices="cpu:1", device_margin="1TiB")
    with pytest.raises(UsageError, match="--device-margin cpu:2: the model is not placed on it"):
        load(target_devices="cpu:0,cpu:1", device_margin="cpu:2=1GiB")


def test_layers_go_by_free_memory_where_nothing_is_measured(
    known: set[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    known.clear()
    with pytest.raises(DeviceError, match=r"cpu:0: not measured within 0 s \(--measure-budget\)") as caught:
        load(target_devices="cpu:0,cpu:1", optimize="decode", measure_budget=0)
    assert caught.value.exit_code == 4
    # For devices that `auto` stands for, this is a line of the log.
    named = fastest_placement.Goal.of
    monkeypatch.setattr(
        fastest_placement.Goal,
        "of",
        classmethod(lambda cls, config: named(config) or fastest_placement.Goal("balanced")),
    )
    with load(target_devices="cpu:0,cpu:1", measure_budget=0) as model:
        assert devices(model) == ["cpu:0", "cpu:1"]
        assert model.plan is None
    assert "layers go by free memory: cpu:0: not measured within 0 s" in caplog.text


def test_a_daemon_may_hold_layers_on_some_of_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """cpu:1 and cpu:2 are in a daemon, whose figures are invented."""
    monkeypatch.setitem(SPEEDS, "cpu:1", 0.02)
    monkeypatch.setitem(SPEEDS, "cpu:2", 1.0)

    def measured(model: ModelOnDevices, **how: Any) -> MeasuredDevices:
        return MeasuredDevices({str(device.name): profile(device) for device in model.devices})

    monkeypatch.setattr(fastest_placement, "measured", measured)
    given = {"target_devices": "cpu:0,cpu:1,cpu:2", "target_shard_ipc_bin": HERE, "optimize": "decode"}
    with load(**given) as model:
        assert devices(model) == ["cpu:2"]
        assert [token.id for token in model.generate(PROMPT, max_tokens=8, ignore_eos=True, temperature=0)] == GREEDY
