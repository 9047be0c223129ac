"""The driver table: the HIP library without a GPU, a CUDA library without hardware, and no library at all."""

from __future__ import annotations

import os
import re
import struct
from ctypes import Structure, c_float, c_int, c_longlong, c_ubyte, c_uint, c_ulonglong, c_void_p
from pathlib import Path

import pytest

from luce.errors import DeviceError
from luce.runtime import driver
from luce.runtime.device import Memory
from luce.runtime.driver import TENSOR_MAP, Driver, Properties
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


def test_an_absent_library_is_a_fact() -> None:
    assert driver.open_driver("cuda", ("libnowhere.so.1",)) is None


def test_properties(fake: Driver) -> None:
    assert fake.count() == 2
    assert fake.version == "12.8"
    assert fake.properties(0) == Properties("Fake One", "sm_86", 32, 49152, 101376, 108, 1 << 33)
    assert fake.properties(1) == Properties("Fake Two", "sm_120a", 32, 49152, 101376, 109, 1 << 34)


def test_registered_memory_has_the_address_of_the_host(fake: Driver) -> None:
    assert fake.maps_registered(0) and not fake.maps_registered(1)


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


def test_a_library_without_a_call(fake: Driver) -> None:
    with pytest.raises(DeviceError, match=r"libfake_cuda\.so is too old: it has no call for host_unregister"):
        fake.unregister_host(0)


class _Launched(Structure):
    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", c_uint),
        ("attribute", c_uint),
        ("value", c_uint),
        ("pointer", c_void_p),
        ("number", c_int),
        ("wide", c_longlong),
        ("real", c_float),
    )


@pytest.mark.parametrize("early", [False, True])
def test_a_launch(fake: Driver, early: bool) -> None:
    launch = fake.launcher(7, "Piqf", early=early)
    for grid, values in (((5, 6, 1), (1 << 60, -3, 1 << 40, 0.5)), ((9, 1, 2), (0, 4, -5, -1.5))):
        launch(grid, (32, 2, 1), 1024, 99, values)
        seen = _Launched.in_dll(fake.library, "launched")
        assert (tuple(seen.grid), tuple(seen.block), seen.shared, seen.stream) == (grid, (32, 2, 1), 1024, 99)
        assert (seen.pointer or 0, seen.number, seen.wide, seen.real) == values
        # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed.
        assert (seen.attributes, seen.attribute, seen.value) == ((1, 6, 1) if early else (0, 0, 0))
    with pytest.raises(struct.error):
        launch((1, 1, 1), (1, 1, 1), 0, 99, (0, 1, 2))
    with pytest.raises(DeviceError, match=r"cuda: cuLaunchKernelEx: unknown error \(400\)"):
        fake.launcher(8, "Piqf", early=early)((1, 1, 1), (1, 1, 1), 0, 99, (0, 1, 2, 3.0))


class _Encoded(Structure):
    _fields_ = (
        *((name, c_uint) for name in ("skew", "type", "dimensions")),
        ("choices", c_uint * 4),
        ("box", c_uint * 3),
        ("steps", c_uint * 3),
        ("address", c_ulonglong),
        ("sizes", c_ulonglong * 3),
        ("strides", c_ulonglong * 2),
    )


def test_a_tensor_map(fake: Driver) -> None:
    made = fake.tensor_map(1 << 40, (640, 4, 80), 32)
    assert made == bytes(range(1, 129))
    seen = _Encoded.in_dll(fake.library, "encoded")
    # CU_TENSOR_MAP_DATA_TYPE_UINT16, without interleaving, permuted within 128 bytes, zeros outside.
    assert (seen.skew, seen.type, seen.dimensions, seen.address) == (0, 1, 3, 1 << 40)
    assert (list(seen.choices)[:2], seen.choices[3]) == ([0, 3], 0)
    assert (list(seen.sizes), list(seen.strides)) == ([80, 4, 640], [160, 640])
    assert (list(seen.box), list(seen.steps)) == ([64, 1, 32], [1, 1, 1])
    with pytest.raises(DeviceError, match=r"cuda: cuTensorMapEncodeTiled: unknown error \(1\)"):
        fake.tensor_map(0, (640, 4, 80), 257)


def test_a_launch_with_a_tensor_map(fake: Driver) -> None:
    made = bytes(reversed(range(128)))
    fake.launcher(9, ["i", TENSOR_MAP, "i"], early=False)((1, 1, 1), (1, 1, 1), 0, 99, (1, made, 5))
    assert bytes((c_ubyte * 128).in_dll(fake.library, "launched_map")) == made


def test_where_kernels_start_early(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [fake.starts_early(arch) for arch in ("sm_75", "sm_89", "sm_90a", "sm_120a")] == [False, False, True, True]
    for version, early in (("11.8", False), ("12.2", False), ("12.3", True), ("13.0", True)):
        monkeypatch.setattr(Driver, "version", version)
        assert fake.starts_early("sm_90a") is early


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


def test_why_there_are_no_devices(hip: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    node = tmp_path / "kfd"
    monkeypatch.setitem(driver.SIGNS, "hip", ("ROCm", str(node), "join the club", "rocminfo"))
    assert driver.absence("hip") == (
        f"{hip.path} is there, but not {node}: load the kernel driver of ROCm, or pass it to the container"
    )
    node.touch()
    assert driver.absence("hip") == f"{hip.path} reports no device: see the output of rocminfo"
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(node))
    assert driver.absence("hip") == f"this user may not open {node}: join the club"
    monkeypatch.setattr(driver, "load", lambda vendor: None)
    assert driver.absence("hip") == "libamdhip64.so.7 is not found: install ROCm"


def test_hip_has_every_call(hip: Driver) -> None:
    assert set(hip.functions) == set(driver.CALLS)


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
    assert {ours: hip for ours, (_, hip) in driver.ATTRIBUTES.items()} == expected


@pytest.mark.parametrize(
    ("major", "minor", "arch"), [(7, 5, "sm_75"), (8, 9, "sm_89"), (9, 0, "sm_90a"), (12, 1, "sm_121a")]
)
def test_cuda_arch(major: int, minor: int, arch: str) -> None:
    assert driver.cuda_arch(major, minor) == arch
