"""What every Device promises: one suite over the host, the emulated device and, where there is one, a GPU."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.errors import DeviceError, OutOfMemoryError
from luce.runtime.device import Device
from luce.runtime.gpu import GpuDevice
from luce.runtime.host import HostDevice
from tests.support.emulated import EmulatedDevice


def _make(kind: str, request: pytest.FixtureRequest) -> Device:
    if kind == "host":
        return HostDevice()
    if kind == "gpu":
        device: Device = request.getfixturevalue("gpu")
        return device
    return EmulatedDevice(int(kind.removeprefix("emulated")))


@pytest.fixture(params=["host", "emulated32", "emulated64", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    return _make(request.param, request)


@pytest.fixture(params=["emulated32", "emulated64", pytest.param("gpu", marks=pytest.mark.gpu)])
def launcher(request: pytest.FixtureRequest) -> Device:
    """A device that runs kernels."""
    return _make(request.param, request)


def fill(device: Device, out: Any, value: float, **changes: Any) -> None:
    names = {"float32": "float", "int32": "i32", "float16": "f16_t"}
    call: dict[str, Any] = {"source": "fill", "kernel": "fill", "defines": {"TYPE": names[str(out.dtype)]}} | changes
    grid = (max(1, (out.size + 127) // 128),)
    device.launch(grid=grid, block=(128,), args=(out, np.int64(out.size), np.float32(value)), **call)


def test_facts(device: Device) -> None:
    assert device.lanes in ((1,) if device.host else (32, 64))
    assert device.kv_dtype == (np.float32 if device.host else np.float16)
    memory = device.memory()
    assert 0 < memory.free <= memory.total
    facts = device.describe()
    assert facts["name"] and all(isinstance(value, str | int) for value in facts.values())


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.uint8, np.int64, np.bool_])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (7, 5), (2, 3, 129)])
def test_values_survive_the_way_there_and_back(device: Device, shape: tuple[int, ...], dtype: Any) -> None:
    bits = np.random.default_rng(1).integers(0, 2, (*shape, np.dtype(dtype).itemsize), np.uint8)
    array = (bits * 37).view(dtype)[..., 0] if dtype is not np.bool_ else bits.astype(dtype)[..., 0]
    there = device.upload(array)
    assert there.shape == shape and there.dtype == dtype
    back = device.download(there)
    assert type(back) is np.ndarray and back.dtype == dtype
    np.testing.assert_array_equal(back, array)


def _mapped() -> NDArray[Any]:
    """Read-only and not aligned to its type, as tensors in a mapped file are."""
    area = mmap.mmap(-1, 8192)
    area[3:4003] = bytes(range(250)) * 16
    return np.frombuffer(area, np.uint8)[3:4003].view(np.float32)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(60.0).reshape(5, 12)[::2, 1::3],
        np.arange(12).reshape(3, 4).T,
        np.broadcast_to(np.float32(3), (4, 5)),
        _mapped(),
    ],
    ids=["strided", "transposed", "broadcast", "mapped"],
)
def test_uploads_any_layout(device: Device, array: NDArray[Any]) -> None:
    there = device.upload(array)
    assert there.dtype == array.dtype
    assert device.download(there).tobytes() == array.tobytes()


def test_downloads_a_view(device: Device) -> None:
    array = np.arange(120, dtype=np.int32).reshape(10, 12)
    np.testing.assert_array_equal(device.download(device.upload(array)[2:7, 3:9]), array[2:7, 3:9])


@pytest.mark.parametrize(("shape", "expected"), [(5, (5,)), ((2, 3), (2, 3)), ([4, 1], (4, 1)), (0, (0,))])
def test_new_arrays(device: Device, shape: Any, expected: tuple[int, ...]) -> None:
    assert device.empty(shape).shape == expected
    assert device.empty(shape).dtype == np.float32
    zeros = device.zeros(shape, np.int32)
    assert zeros.flags.c_contiguous
    np.testing.assert_array_equal(device.download(zeros), np.zeros(expected, np.int32))


@pytest.mark.parametrize("size", [1, 1 << 20, (11 << 20) + 3])
def test_loaded_arrays(device: Device, size: int) -> None:
    arrays = [np.random.default_rng(seed).integers(0, 256, size, np.uint8) for seed in range(5)]
    there = [device.load(array) for array in arrays]
    device.synchronize()
    for array, loaded in zip(arrays, there, strict=True):
        np.testing.assert_array_equal(device.download(loaded), array)


def test_work_comes_after_what_was_loaded_before(launcher: Device) -> None:
    there = launcher.load(np.ones(1 << 20, np.float32))
    fill(launcher, there[:7], 3.0)
    assert launcher.download(there[:9]).tolist() == [3] * 7 + [1] * 2


def test_written_values(device: Device) -> None:
    there = device.zeros((3, 4), np.int32)
    device.write(there, np.arange(12, dtype=np.int32).reshape(3, 4))
    assert device.download(there).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_copied_values(device: Device) -> None:
    source, target = device.upload(np.arange(12, dtype=np.float32).reshape(3, 4)), device.zeros((3, 4))
    device.copy(target, source)
    device.write(source, np.zeros((3, 4), np.float32))
    assert device.download(target).ravel().tolist() == list(range(12))


def test_rehearsed_work_does_not_run(launcher: Device) -> None:
    out = launcher.zeros(4)
    launcher.warm_up(lambda: fill(launcher, out, 5.0))
    assert launcher.download(out).tolist() == [0, 0, 0, 0]
    fill(launcher, out, 5.0)
    assert launcher.download(out).tolist() == [5, 5, 5, 5]


def test_zeros_after_other_values(device: Device) -> None:
    # The memory of the dropped array is likely to be handed out again.
    for _ in range(3):
        device.upload(np.full(100_000, 7, np.float32))
        assert not device.download(device.zeros(100_000)).any()


def test_out_of_memory(device: Device) -> None:
    with pytest.raises(OutOfMemoryError, match=rf"{device.name}: {1 << 50} bytes asked, \d+ bytes free"):
        device.empty((1 << 20, 1 << 28), np.float32)
    assert device.download(device.zeros(3)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.float16])
def test_launch(launcher: Device, dtype: Any) -> None:
    out = launcher.zeros(1000, dtype)
    fill(launcher, out[:777], 3.0)
    np.testing.assert_array_equal(launcher.download(out), np.repeat(np.array([3, 0], dtype), [777, 223]))


def test_work_is_done_in_order(launcher: Device) -> None:
    out = launcher.empty(10_000)
    for value in range(50):
        fill(launcher, out, value)
    launcher.synchronize()
    assert (launcher.download(out) == 49).all()


def test_defines_pick_the_variant(launcher: Device) -> None:
    out = launcher.zeros(4)
    fill(launcher, out.view(np.int32), 1.0)
    assert launcher.download(out).view(np.int32).tolist() == [1, 1, 1, 1]
    fill(launcher, out, 1.0)
    assert launcher.download(out).tolist() == [1, 1, 1, 1]


def test_failed_launches_name_source_and_kernel(launcher: Device) -> None:
    out = launcher.zeros(4)
    with pytest.raises(DeviceError, match=r"kernels/nowhere\.cu"):
        fill(launcher, out, 1.0, source="nowhere")
    with pytest.raises(DeviceError, match=r"(?s)kernels/fill.cu.*nothing|nothing.*kernels/fill.cu"):
        fill(launcher, out, 1.0, kernel="nothing")
    with pytest.raises(DeviceError, match="fill"):
        fill(launcher, out, 1.0, defines={"TYPE": "unheard_of"})
    with pytest.raises(DeviceError, match=r"fill"):
        launcher.launch("fill", "fill", (1,), (2048,), (out, np.int64(4), np.float32(1)), defines={"TYPE": "float"})
    fill(launcher, out, 2.0)
    assert launcher.download(out).tolist() == [2, 2, 2, 2]


def test_events_happen_in_order(device: Device) -> None:
    start = device.record(timing=True)
    array = device.upload(np.arange(1000, dtype=np.float32))
    end = device.record(timing=True)
    end.wait()
    assert start.done() and end.done()
    assert 0 <= end.seconds_since(start) < 60
    device.wait_for(start)
    assert device.download(array).sum() == 499500


def test_copies_to_pinned_memory_and_back(device: Device) -> None:
    values = np.random.default_rng(2).normal(size=(50, 24)).astype(np.float32)
    there, back, stream = device.upload(values), device.zeros((50, 24)), device.copy_stream()
    stream.wait_for(device.record())
    pinned = device.pinned(4 * values.size).view(np.float32).reshape(values.shape)
    stream.copy(pinned, there)
    stream.copy(back, pinned)
    done = stream.record(timing=True)
    device.wait_for(done)
    np.testing.assert_array_equal(device.download(back), values)
    np.testing.assert_array_equal(pinned, values)


def test_copies_rows_of_a_wider_array(device: Device) -> None:
    values = np.arange(60 * 24, dtype=np.float32).reshape(60, 24)
    there, stream = device.upload(values), device.copy_stream()
    parts = [device.zeros((60, 7)), device.pinned(60 * 7 * 4).view(np.float32).reshape(60, 7)]
    stream.wait_for(device.record())
    for part in parts:
        stream.copy(part, there[:, 5:12])
    stream.record().wait()
    np.testing.assert_array_equal(device.download(parts[0]), values[:, 5:12])
    np.testing.assert_array_equal(parts[1], values[:, 5:12])


def test_copies_between_two_devices_of_a_kind(device: Device, request: pytest.FixtureRequest) -> None:
    if device.host or not isinstance(device, GpuDevice):
        assert not device.reaches(HostDevice())
        return
    other = GpuDevice(device.name.kind, device.name.index)
    request.addfinalizer(other.close)
    assert device.reaches(other) and not device.reaches(HostDevice())
    there, landing, stream = device.upload(np.arange(99, dtype=np.float32)), other.zeros(99), device.copy_stream()
    stream.wait_for(device.record())
    stream.wait_for(other.record())
    stream.copy(landing, there)
    other.wait_for(stream.record())
    assert (other.download(landing) == np.arange(99)).all()


@pytest.mark.parametrize(
    ("dtype", "result"), [(np.float32, np.float32), (np.float16, np.float32), (np.float16, np.float16)]
)
@pytest.mark.parametrize(("n", "rows", "cols"), [(1, 1, 8), (5, 3, 24), (130, 70, 264)])
def test_gemm(device: Device, n: int, rows: int, cols: int, dtype: Any, result: Any) -> None:
    if not device.blas:
        pytest.skip("no BLAS library")
    rng = np.random.default_rng(n)
    x, w = (rng.standard_normal((size, cols + 8)).astype(dtype) for size in (n, rows))
    wide = device.zeros((n, rows + 5), result)
    device.gemm(device.upload(x)[:, :cols], device.upload(w)[:, 8:], wide[:, 2 : 2 + rows])
    actual = device.download(wide)
    x64, w64 = x[:, :cols].astype(np.float64), w[:, 8:].astype(np.float64)
    # Products of halves are exact in float32; of two float32 they are not.
    limit = (4 + np.sqrt(cols)) * 2.0**-24 * (np.abs(x64) @ np.abs(w64).T)
    if result == np.float16:
        # One rounding.
        limit += 2.0**-11 * np.abs(x64 @ w64.T) + 2.0**-25
    assert (np.abs(actual[:, 2 : 2 + rows] - x64 @ w64.T) <= limit).all()
    assert not actual[:, :2].any()
    assert not actual[:, 2 + rows :].any()


def test_the_host_launches_nothing() -> None:
    host = HostDevice()
    with pytest.raises(DeviceError, match=r"fill of kernels/fill.cu"):
        fill(host, host.zeros(4), 1.0)


def test_close_twice(request: pytest.FixtureRequest) -> None:
    for make in (HostDevice, EmulatedDevice):
        device = make()
        device.close()
        device.close()
