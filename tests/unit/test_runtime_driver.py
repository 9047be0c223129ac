"""The driver table: the HIP library without a GPU, a CUDA library without hardware, and no library at all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from luce.errors import DeviceError
from luce.runtime import driver
from luce.runtime.device import Memory
from luce.runtime.driver import Driver, Properties
from tests.support.fake_cuda import fake_driver

HIP_HEADER = Path("/usr/include/hip/hip_runtime_api.h")


@pytest.fixture
def fake(tmp_path: Path) -> Driver:
    return fake_driver(tmp_path)


@pytest.fixture
def hip() -> Driver:
    """The real HIP library. These tests are about a machine without an AMD GPU."""
    loaded = driver.load("hip")
    if loaded is None:
        pytest.skip("no libamdhip64")
    if loaded.count():
        pytest.skip("this machine has a HIP device")
    return loaded


def test_an_absent_library_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(driver._LIBRARIES, "cuda", ("libnowhere.so.1",))
    assert driver.load.__wrapped__("cuda") is None


def test_properties(fake: Driver) -> None:
    assert fake.count() == 2
    assert fake.version == "12.8"
    assert fake.properties(0) == Properties("Fake One", "sm_86", 32, 49152, 101376, 108, 1 << 33)
    assert fake.properties(1) == Properties("Fake Two", "sm_120a", 32, 49152, 101376, 109, 1 << 34)


def test_a_failing_call_names_itself(fake: Driver) -> None:
    with pytest.raises(DeviceError, match=r"cuda: cuDeviceGetName: unknown error \(101\)"):
        fake.properties(2)
    with pytest.raises(DeviceError, match=r"cuda: cuMemGetInfo_v2: invalid device context \(201\)"):
        fake.memory()


def test_memory_is_of_the_device_in_use(fake: Driver) -> None:
    for index in (1, 0):
        fake.use(index)
        assert fake.memory() == Memory(1 << (32 + index), 1 << (33 + index))


def test_peer_access(fake: Driver) -> None:
    assert not fake.enable_peer(0, 0)
    assert fake.enable_peer(0, 1)
    assert fake.enable_peer(0, 1), "enabled before is enabled"


def test_events_that_have_not_happened_are_no_errors(fake: Driver) -> None:
    assert not fake.happened(1)
    assert fake.happened(3)
    with pytest.raises(DeviceError, match="an illegal access"):
        fake.happened(2)


def test_a_library_without_a_call(fake: Driver) -> None:
    with pytest.raises(DeviceError, match=r"libfake_cuda\.so is too old: it has no call for stream_create"):
        fake.stream()


def test_hip_without_a_gpu(hip: Driver) -> None:
    assert hip.count() == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+", hip.version)
    assert "libamdhip64" in hip.path and Path(hip.path).is_file()
    assert hip.error(100) == "hipErrorNoDevice (100)"
    with pytest.raises(DeviceError, match="hip: hipDeviceGetName: hipError"):
        hip.properties(0)
    with pytest.raises(DeviceError, match="hip: hipMemGetInfo: hipError"):
        hip.memory()
    with pytest.raises(DeviceError, match="hip: hipSetDevice: hipError"):
        hip.use(0)


def test_hip_has_every_call(hip: Driver) -> None:
    assert set(hip._functions) == set(driver._CALLS)


def test_hip_numbers_are_those_of_the_header() -> None:
    if not HIP_HEADER.is_file():
        pytest.skip("no HIP headers")
    text = re.sub(r"//[^\n]*", "", HIP_HEADER.read_text(errors="replace"))
    body = re.search(r"typedef enum hipDeviceAttribute_t \{(.*?)\}", text, re.DOTALL)
    assert body is not None
    numbers: dict[str, int] = {}
    following = 0
    for entry in filter(None, (part.strip() for part in body.group(1).split(","))):
        name, _, value = (part.strip() for part in entry.partition("="))
        following = numbers.get(value, following) if not value.isdigit() else int(value)
        numbers[name] = following
        following += 1
    names = {
        "lanes": "WarpSize",
        "shared": "MaxSharedMemoryPerBlock",
        "shared_optin": "SharedMemPerBlockOptin",
        "multiprocessors": "MultiprocessorCount",
        "major": "ComputeCapabilityMajor",
        "minor": "ComputeCapabilityMinor",
    }
    expected = {ours: numbers[f"hipDeviceAttribute{theirs}"] for ours, theirs in names.items()}
    assert {ours: hip for ours, (_, hip) in driver._ATTRIBUTES.items()} == expected


@pytest.mark.parametrize(
    ("major", "minor", "arch"), [(7, 5, "sm_75"), (8, 9, "sm_89"), (9, 0, "sm_90a"), (12, 1, "sm_121a")]
)
def test_cuda_arch(major: int, minor: int, arch: str) -> None:
    assert driver.cuda_arch(major, minor) == arch
