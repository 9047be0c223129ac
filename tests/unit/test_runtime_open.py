"""Device names, and what a machine without a usable GPU says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce.errors import DeviceError, UsageError
from luce.runtime import compiler, driver
from luce.runtime import open as opening
from luce.runtime.device import DeviceName
from luce.runtime.gpu import GpuDevice
from luce.runtime.host import HostDevice
from luce.runtime.open import open_devices, parse
from tests.support.fake_cuda import fake_driver


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "load", lambda vendor: None)


@pytest.fixture
def two_fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with two CUDA devices as far as the driver knows."""
    fake = fake_driver(tmp_path)
    monkeypatch.setattr(driver, "load", {"cuda": fake, "hip": None}.get)


@given(st.sampled_from(["cuda", "hip", "cpu"]), st.integers(0, 999))
def test_names_survive(kind: str, index: int) -> None:
    assert str(parse(f"{kind}:{index}")) == f"{kind}:{index}"


BAD_NAMES = (
    *("", "cuda", "cuda:", ":0", "cuda:-1", "cuda:+1", "cuda: 0", " cuda:0", "cuda:0 ", "cuda:01", "CUDA:0", "rocm:0"),
    *("cuda:0:0", "cuda:1000", "auto:0", "cpu:1.0", "cuda:0\n", "cuda:\u0663"),
)


@pytest.mark.parametrize("text", BAD_NAMES)
def test_bad_names_are_usage_errors(text: str) -> None:
    with pytest.raises(UsageError, match="--target-devices: expected auto, cuda:N, hip:N or cpu:N, got ") as caught:
        open_devices(("cpu:0", text))
    assert repr(text) in str(caught.value)
    assert caught.value.param == "target_devices"


@pytest.mark.usefixtures("no_gpu")
def test_order_and_kinds() -> None:
    devices = open_devices(("cpu:3", "auto", "cpu:1"))
    assert [str(d.name) for d in devices] == ["cpu:3", "cpu:0", "cpu:1"]
    assert all(isinstance(d, HostDevice) for d in devices)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("names", [("cpu:0", "cpu:0"), ("auto", "cpu:0"), ("auto", "auto"), ("cuda:5", "cuda:5")])
def test_a_device_is_named_once(names: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=r"--target-devices: c\w+:\d is named twice"):
        open_devices(names)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_driver() -> None:
    with pytest.raises(DeviceError, match="hip:1: no such device; hip devices found: 0"):
        open_devices(("hip:1",))
    assert opening.found() == []


@pytest.mark.usefixtures("two_fakes")
def test_found_needs_no_cupy() -> None:
    assert [(str(f.name), f.properties.name) for f in opening.found()] == [
        ("cuda:0", "Fake One"),
        ("cuda:1", "Fake Two"),
    ]


@pytest.mark.usefixtures("two_fakes")
def test_a_device_out_of_range_names_how_many_there_are() -> None:
    with pytest.raises(DeviceError, match="cuda:2: no such device; cuda devices found: 2"):
        open_devices(("cuda:2",))


@pytest.mark.usefixtures("two_fakes")
def test_missing_cupy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"cuda:1 needs CuPy: install luce-llm\[cuda13\]"):
        GpuDevice("cuda", 1)
    assert [str(d.name) for d in open_devices(("auto",))] == ["cpu:0"]


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
    def open_device(name: DeviceName) -> Closable:
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
    assert [str(d.name) for d in open_devices(("auto",))] == ["cuda:1"]


@pytest.mark.usefixtures("two_fakes")
@pytest.mark.parametrize(
    ("names", "error"), [(("cpu:0", "cuda:1", "cuda:0"), DeviceError), (("cuda:1", "cpu:4", "auto"), UsageError)]
)
def test_nothing_stays_open_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], error: type[Exception]
) -> None:
    made: list[Closable] = []
    monkeypatch.setattr(opening, "open_device", opener(made, {"cuda:0"}))
    with pytest.raises(error):
        open_devices(names)
    assert len(made) >= 2 and all(device.closed for device in made)
