"""Power limits as NVML and the amdgpu driver say them."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from luce.runtime.power import power_limit


class Nvml:
    """NVML of one GPU, as ctypes calls it."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.open = failing, 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return int(self.failing == "init")

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, address: bytes, device: Any) -> int:
        return 0 if address == b"0000:C1:00.0" and self.failing != "handle" else 6

    def nvmlDeviceGetEnforcedPowerLimit(self, device: Any, milliwatts: Any) -> int:
        ctypes.cast(milliwatts, ctypes.POINTER(ctypes.c_uint)).contents.value = 350_400
        return int(self.failing == "limit")


def absent(name: str) -> Any:
    raise OSError(name)


def test_nvml_says_the_enforced_limit() -> None:
    library = Nvml()
    assert power_limit("cuda", "0000:C1:00.0", load=lambda name: library) == 350
    assert library.open == 0


@pytest.mark.parametrize("failing", ["init", "handle", "limit"])
def test_an_nvml_that_fails_says_nothing(failing: str) -> None:
    assert power_limit("cuda", "0000:C1:00.0", load=lambda name: Nvml(failing)) is None


def test_without_nvml_the_limit_is_not_known() -> None:
    assert power_limit("cuda", "0000:C1:00.0", load=absent) is None


def test_the_amdgpu_driver_says_the_limit_in_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "0000:c1:00.0" / "hwmon" / "hwmon3"
    folder.mkdir(parents=True)
    assert power_limit("hip", "0000:C1:00.0", devices=tmp_path) is None
    (folder / "power1_cap").write_text("315000000\n")
    assert power_limit("hip", "0000:C1:00.0", devices=tmp_path) == 315
    (folder / "power1_cap").write_text("unknown\n")
    assert power_limit("hip", "0000:C1:00.0", devices=tmp_path) is None
