"""Device names, and what a machine without a usable GPU says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from luce.config.settings import Config
from luce.errors import DeviceError, UsageError
from luce.runtime import compiler, driver
from luce.runtime import open as opening
from luce.runtime.device import DeviceName
from luce.runtime.found import found
from luce.runtime.gpu import GpuDevice
from luce.runtime.host import HostDevice, host_memory
from luce.runtime.open import open_all, open_devices, total_memory
from tests.support.fake_cuda import fake_driver


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "load", lambda vendor: None)


@pytest.fixture
def two_fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with two CUDA devices as far as the driver knows."""
    fake = fake_driver(tmp_path)
    monkeypatch.setattr(driver, "load", {"cuda": fake, "hip": None}.get)


def opened(*names: str) -> list[str]:
    """Names of the devices that a list gives."""
    return [str(device.name) for device in open_devices(Config(target_devices=names))]


@pytest.mark.usefixtures("no_gpu")
def test_order_and_kinds() -> None:
    devices = open_devices(Config(target_devices=("cpu:3", "auto", "cpu:1")))
    assert [str(d.name) for d in devices] == ["cpu:3", "cpu:0", "cpu:1"]
    assert all(isinstance(d, HostDevice) for d in devices)


@pytest.mark.usefixtures("no_gpu")
def test_a_single_device() -> None:
    assert [str(d.name) for d in open_devices(Config())] == ["cpu:0"]
    assert [str(d.name) for d in open_devices(Config(target_device="cpu:7"))] == ["cpu:7"]
    assert [str(d.name) for d in open_devices(Config(target_device="auto:1"))] == ["cpu:1"]
    assert opened("auto:1") == ["cpu:1"]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("names", [("auto", "cpu:0"), ("auto:0", "cpu:0"), ("auto", "auto:0")])
def test_a_device_is_named_once(names: tuple[str, ...]) -> None:
    # The CPU is this process's own backend.
    with pytest.raises(
        UsageError, match=rf"^--target-devices cpu:0: named twice, as {','.join(names)} is cpu:0,cpu:0$"
    ) as caught:
        open_devices(Config(target_devices=names))
    assert caught.value.param == "target_devices"


@pytest.mark.usefixtures("no_gpu")
def test_without_a_driver() -> None:
    with pytest.raises(UsageError, match=r"^--target-device hip:1: no hip devices are available") as caught:
        open_devices(Config(target_device="hip:1"))
    assert caught.value.param == "target_device"
    assert found() == []


@pytest.mark.usefixtures("two_fakes")
def test_found_needs_no_cupy() -> None:
    assert [(str(f.name), f.properties.name) for f in found()] == [
        ("cuda:0", "Fake One"),
        ("cuda:1", "Fake Two"),
    ]


@pytest.mark.usefixtures("two_fakes")
def test_devices_that_do_not_exist_are_named_together() -> None:
    with pytest.raises(UsageError) as caught:
        opened("cuda:2", "cpu:0", "cuda:9", "cuda:1")
    assert str(caught.value).split("; ") == [
        f"--target-devices cuda:{index}: index {index} is out of range [0, 2)" for index in (2, 9)
    ]
    assert caught.value.exit_code == 2
    with pytest.raises(UsageError, match=r"^--target-device cuda:2: index 2 is out of range \[0, 2\)$"):
        open_devices(Config(target_device="cuda:2"))


def test_one_process_drives_one_vendor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = fake_driver(tmp_path)
    monkeypatch.setattr(driver, "load", {"cuda": fake, "hip": fake}.get)
    why = "one process drives GPUs of one vendor, cuda or hip; use"
    with pytest.raises(UsageError) as caught:
        opened("cuda:0", "cpu:0", "hip:0")
    assert str(caught.value) == f"--target-devices cuda:0,cpu:0,hip:0: {why} --target-shard-ipc-bin for the other"
    with pytest.raises(UsageError) as caught:
        open_all([DeviceName("hip", 1)], "draft_device", "packed", beside=[DeviceName("cuda", 1)])
    assert str(caught.value) == f"--draft-device cuda:1,hip:1: {why} --draft-ipc-bin for the other"
    assert (caught.value.param, caught.value.exit_code) == ("draft_device", 2)


@pytest.mark.usefixtures("two_fakes")
def test_missing_cupy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"cuda:1 needs CuPy: install luce-llm\[cuda13\]"):
        GpuDevice("cuda", 1)
    assert [str(d.name) for d in open_devices(Config())] == ["cpu:0"]


@pytest.mark.usefixtures("two_fakes")
def test_cupy_for_the_other_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("cupy")
    other.__dict__["cuda"] = SimpleNamespace(runtime=SimpleNamespace(is_hip=True))
    monkeypatch.setitem(sys.modules, "cupy", other)
    with pytest.raises(DeviceError, match="cuda:0: the CuPy of this environment is for HIP"):
        GpuDevice("cuda", 0)


@pytest.mark.usefixtures("two_fakes")
def test_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    fitting = ModuleType("cupy")
    fitting.__dict__["cuda"] = SimpleNamespace(runtime=SimpleNamespace(is_hip=False))
    monkeypatch.setitem(sys.modules, "cupy", fitting)
    asked: list[int | None] = []

    def load(vendor: driver.Vendor, major: int | None = None) -> None:
        asked.append(major)

    monkeypatch.setattr(compiler, "load", load)
    with pytest.raises(DeviceError, match=r"cuda:0: no run-time compiler found: install luce-llm\[cuda13\]"):
        GpuDevice("cuda", 0)
    assert asked == [12], "the driver runs CUDA 12.8"


class Closable(HostDevice):
    """Knows whether it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


def opener(made: list[Closable], broken: set[str]) -> Callable[[DeviceName], Closable]:
    def open_device(name: DeviceName, cpu_weights: str) -> Closable:
        if str(name) in broken:
            raise DeviceError(f"{name} is broken")
        device = Closable(name.index)
        device.name = name
        made.append(device)
        return device

    return open_device


@pytest.mark.usefixtures("two_fakes")
def test_auto_takes_the_first_gpu_that_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Closable] = []
    monkeypatch.setattr(opening, "open_device", opener(made, {"cuda:0"}))
    assert [str(d.name) for d in open_devices(Config())] == ["cuda:1"]


@pytest.mark.usefixtures("two_fakes")
@pytest.mark.parametrize(
    ("names", "devices"),
    [
        (("auto",), ["cuda:0", "cuda:1"]),
        (("auto", "cpu:0"), ["cuda:0", "cuda:1", "cpu:0"]),
        (("cpu:0", "auto:1"), ["cpu:0", "cuda:1"]),
        (("auto:1",), ["cuda:1"]),
    ],
)
def test_auto_in_a_list(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], devices: list[str]) -> None:
    made: list[Closable] = []
    monkeypatch.setattr(opening, "open_device", opener(made, set()))
    assert opened(*names) == devices
    assert [str(device.name) for device in made if not device.closed] == devices


@pytest.mark.usefixtures("two_fakes")
@pytest.mark.parametrize("names", [("auto:0", "cuda:0"), ("cuda:1", "auto")])
def test_auto_is_replaced_before_repeats_are_looked_for(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    monkeypatch.setattr(opening, "open_device", opener([], set()))
    meant = r"as (auto:0,cuda:0 is cuda:0,cuda:0|cuda:1,auto is cuda:1,cuda:0,cuda:1)"
    with pytest.raises(UsageError, match=rf"^--target-devices cuda:\d: named twice, {meant}$"):
        opened(*names)


@pytest.mark.usefixtures("two_fakes")
def test_nothing_stays_open_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Closable] = []
    monkeypatch.setattr(opening, "open_device", opener(made, {"cuda:0"}))
    with pytest.raises(DeviceError, match="cuda:0 is broken"):
        opened("cpu:0", "cuda:1", "cuda:0")
    assert len(made) == 2 and all(device.closed for device in made)


@pytest.mark.usefixtures("no_gpu")
def test_the_memory_of_the_cpu_counts_once() -> None:
    total = host_memory().total
    assert total_memory(Config()) == (total, ["cpu:0"])
    assert total_memory(Config(target_devices=("cpu:0", "cpu:1"))) == (total, ["cpu:0"])
    assert total_memory(Config(target_devices=("box/cpu:0", "box/cuda:1"))) == (0, [])
    # What does not exist is refused by the load.
    assert total_memory(Config(target_device="cuda:0")) == (0, [])


@pytest.mark.usefixtures("two_fakes")
def test_the_memory_of_gpus_adds_up() -> None:
    one = driver.load("cuda")
    assert one is not None
    sizes = [one.properties(index).memory for index in range(2)]
    assert total_memory(Config(target_devices=("cuda:0", "cuda:1", "cpu:0"))) == (
        sum(sizes) + host_memory().total,
        ["cuda:0", "cuda:1", "cpu:0"],
    )
    assert total_memory(Config(target_devices=("cuda:1", "cuda:7"))) == (sizes[1], ["cuda:1"])
