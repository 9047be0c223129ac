"""Profiles of devices: with an invented clock, where every figure has a known value, and on emulated GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from luce.bench.profile import DeviceProfile, ProfileSizes, profile_device
from luce.runtime.device import Device, Event
from luce.runtime.host import HostDevice
from tests.support.emulated import EmulatedDevice

SMALL = ProfileSizes(1 << 15, 256, None, (1, 16, 32), 8, 1 << 12, 0.0)
Q8_0, Q4_K = GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_K


class Ticks(Event):
    """A time of a clock that goes on by the product that was computed before."""

    def __init__(self, at: float) -> None:
        self.at = at

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def seconds_since(self, start: Event) -> float:
        assert isinstance(start, Ticks)
        return self.at - start.at


class Clocked(HostDevice):
    """A device on which a piece of work takes as many seconds as `pattern` says, in turn."""

    def __init__(self, pattern: list[float]) -> None:
        super().__init__()
        self.pattern, self.at, self.records = pattern, 0.0, 0

    def record(self, *, timing: bool = False) -> Event:
        if timing:
            self.records += 1
            if self.records % 2 == 0:
                self.at += self.pattern[self.records // 2 % len(self.pattern)]
        return Ticks(self.at)


def measure(device: Device, sizes: ProfileSizes = SMALL) -> DeviceProfile:
    return profile_device(device, [Q8_0], sizes)


def test_figures_are_work_by_median_seconds() -> None:
    profile = measure(Clocked([2.0]))
    found = profile.formats["Q8_0"]
    # Float32 on this device: 256 columns, and as many rows as 32 KiB of Q8_0 (272 bytes a row) have.
    elements = 256 * ((1 << 15) // 272)
    assert found.read == pytest.approx(4 * elements / 2)
    assert found.rates == pytest.approx({rows: 2 * rows * elements / 2 for rows in (1, 16, 32)})
    assert found.unpack is None
    assert (profile.device, profile.launch) == ("cpu:0", 0.0)


def test_few_features_make_the_products_of_many_rows_smaller() -> None:
    sizes = ProfileSizes(1 << 15, 256, 64, (1, 16, 32), 8, 1 << 12, 0.0)
    rates = measure(Clocked([2.0]), sizes).formats["Q8_0"].rates
    assert rates[32] == pytest.approx(2 * 32 * 256 * 64 / 2)


@pytest.mark.parametrize(
    ("pattern", "budget", "noisy"), [([1.0], 1e9, False), ([1.0, 3.0], 1e9, True), ([1.0], 0, True)]
)
def test_wide_quartiles_and_too_few_runs_are_noisy(pattern: list[float], budget: float, noisy: bool) -> None:
    sizes = ProfileSizes(1 << 15, 256, None, (1,), 8, 1 << 12, budget)
    assert measure(Clocked(pattern), sizes).formats["Q8_0"].noisy is noisy


@pytest.mark.parametrize("type", [Q8_0, Q4_K])
def test_an_emulated_gpu_is_measured(type: GGMLQuantizationType, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    launch = EmulatedDevice.launch

    def watched(self: EmulatedDevice, source: str, kernel: str, *args: Any, **options: Any) -> None:
        seen.append(source)
        launch(self, source, kernel, *args, **options)

    monkeypatch.setattr(EmulatedDevice, "launch", watched)
    device = EmulatedDevice()
    try:
        profile = profile_device(device, [type], ProfileSizes(1 << 13, 256, 32, (1, 32), 4, 1 << 12, 0.0))
    finally:
        device.close()
    found = profile.formats[type.name]
    values = [found.read, *found.rates.values(), profile.latency, profile.bandwidth]
    assert np.isfinite(values).all()
    assert min(values) > 0
    # Its own kernels: a product of few rows, and one of many from unpacked weights.
    assert {"norm", "dequant"} <= set(seen)
