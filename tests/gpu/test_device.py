"""GpuDevice and the driver on a real GPU: facts, gpu.h and reduce.h, shared memory, events, graphs, pinned memory."""

from __future__ import annotations

import mmap
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.errors import DeviceError, OutOfMemoryError
from luce.runtime import compiler, kernels
from luce.runtime.found import found
from luce.runtime.gpu import GpuDevice
from luce.runtime.kernels import KernelBuild

pytestmark = pytest.mark.gpu

SOURCE = r"""
#include "reduce.h"

extern "C" __global__ void halves(const f16_t* x, float* wide, const float* y, f16_t* narrow, bf16_t* brain, int n) {
    luce_await();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    wide[i] = luce_f32(x[i]);
    narrow[i] = luce_f16(y[i]);
    brain[i] = luce_bf16(y[i]);
}

extern "C" __global__ void lanes(const i32* x, i32* xor1, i32* next, u64* votes, double* wide, float* sums,
                                 float* most) {
    luce_await();
    int t = luce_thread();
    xor1[t] = luce_shfl_xor(x[t], 1);
    next[t] = luce_shfl(x[t], (luce_lane() + 1) % LUCE_LANES);
    votes[t] = luce_ballot(x[t] % 3 == 0);
    wide[t] = luce_shfl_xor((double)x[t] / 3, LUCE_LANES / 2);
    sums[t] = luce_lane_sum<8>((float)x[t]);
    most[t] = luce_lane_max((float)-x[t]);
}

extern "C" __global__ void dots(const i32* a, const i32* b, i32* out) {
    luce_await();
    int t = threadIdx.x;
    out[t] = luce_dot4(a[t], b[t], t);
}

extern "C" __global__ void block(const float* x, float* sums, float* most, int cols) {
    luce_await();
    float sum = 0, top = -LUCE_INF;
    for (int i = luce_thread(); i < cols; i += luce_threads()) {
        sum += x[(i64)blockIdx.x * cols + i];
        top = fmaxf(top, x[(i64)blockIdx.x * cols + i]);
    }
    sum = luce_block_sum(sum);
    top = luce_block_max(top);
    if (luce_thread() == luce_threads() - 1) sums[blockIdx.x] = sum, most[blockIdx.x] = top;
}

extern "C" __global__ void arithmetic(const float* a, const float* b, float* out) {
    luce_await();
    int t = threadIdx.x;
    out[4 * t] = a[t] * b[t];
    out[4 * t + 1] = a[t] / b[t];
    out[4 * t + 2] = sqrtf(fabsf(a[t]));
    out[4 * t + 3] = a[t] + b[t];
}

extern "C" __global__ void unaligned(const u8* x, u32* words, float* halves) {
    luce_await();
    int t = threadIdx.x;
    words[t] = luce_u32_at2(x + 18 * t);
    halves[t] = luce_f16_at2(x + 18 * t + 4);
}

extern "C" __global__ void reverse(const i32* x, i32* out, int n) {
    luce_await();
    LUCE_DYNAMIC_SHARED(i32, tile);
    for (int i = luce_thread(); i < n; i += luce_threads()) tile[i] = x[i];
    luce_sync();
    for (int i = luce_thread(); i < n; i += luce_threads()) out[i] = tile[n - 1 - i];
}

extern "C" __global__ void wait(i64 cycles) {
    luce_await();
    i64 start = clock64();
    while (clock64() - start < cycles) {}
}

extern "C" __global__ void crash(i32* x) { luce_await(); x[1ll << 40] = 1; }
"""


@pytest.fixture(scope="module")
def own(gpu: GpuDevice, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuDevice]:
    """The GPU with a source `own` beside the real ones."""
    folder = tmp_path_factory.mktemp("kernels")
    shutil.copytree(kernels.directory(), folder, dirs_exist_ok=True)
    (folder / "own.cu").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "directory", lambda: folder)
        patch.setattr(kernels, "fingerprint", kernels.hash_sources)
        yield gpu


def random_floats(n: int) -> NDArray[np.float32]:
    """Every exponent, both signs, denormals, infinities and NaN, and values half way between two halves."""
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 1 << 32, n, dtype=np.uint32)
    bits[: n // 2] &= 0xFFFFF000
    with np.errstate(over="ignore"):
        near = np.float16(rng.normal(size=n // 4)).astype(np.float32)
    bits[n // 2 : n // 2 + n // 4] = near.view(np.uint32) + rng.choice(
        np.array([0, 4096, 4095, 4097], np.uint32), n // 4
    )
    return bits.view(np.float32)


def test_facts_agree_with_cupy(gpu: GpuDevice) -> None:
    import cupy

    facts = cupy.cuda.runtime.getDeviceProperties(gpu.name.index)
    ours = gpu.properties
    assert ours.name == facts["name"].decode()
    assert ours.lanes == gpu.lanes == facts["warpSize"]
    assert ours.multiprocessors == facts["multiProcessorCount"]
    assert ours.shared == facts["sharedMemPerBlock"]
    assert ours.shared_optin == facts.get("sharedMemPerBlockOptin", ours.shared)
    assert ours.memory == facts["totalGlobalMem"]
    if gpu.name.kind == "cuda":
        assert ours.arch.rstrip("a") == f"sm_{facts['major']}{facts['minor']}"
    else:
        assert ours.arch == facts["gcnArchName"].decode()


def test_every_variant_compiles_and_loads(gpu: GpuDevice) -> None:
    for build in kernels.builds("hip" if gpu.name.kind == "hip" else "cuda"):
        gpu.prepare(build)


def test_conversions(own: GpuDevice) -> None:
    torch = pytest.importorskip("torch")
    n = 1 << 16
    every_half = np.arange(n, dtype=np.uint16)
    values = random_floats(n)
    wide, narrow, brain = own.empty(n), own.empty(n, np.uint16), own.empty(n, np.uint16)
    args = (own.upload(every_half), wide, own.upload(values), narrow, brain, np.int32(n))
    own.launch("own", "halves", (n // 256,), (256,), args)
    expected = every_half.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(own.download(wide), expected)
    number = ~np.isnan(expected)
    assert (own.download(wide).view(np.uint32) == expected.view(np.uint32))[number].all(), "signs of zero too"
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(own.download(narrow).view(np.float16), values.astype(np.float16))
    got = torch.from_numpy(own.download(brain).astype(np.int32) << 16).view(torch.float32)
    assert torch.equal(torch.nan_to_num(got), torch.nan_to_num(torch.from_numpy(values).bfloat16().float()))
    assert torch.equal(torch.isnan(got), torch.from_numpy(np.isnan(values)))


def test_lanes(own: GpuDevice) -> None:
    n, lanes = 256, own.lanes
    x = np.random.default_rng(4).permutation(n).astype(np.int32)
    xor1, following = own.empty(n, np.int32), own.empty(n, np.int32)
    votes, wide, sums, most = own.empty(n, np.uint64), own.empty(n, np.float64), own.empty(n), own.empty(n)
    own.launch("own", "lanes", (1,), (32, 8), (own.upload(x), xor1, following, votes, wide, sums, most))
    waves = x.reshape(-1, lanes)
    np.testing.assert_array_equal(own.download(xor1), x[np.arange(n) ^ 1])
    np.testing.assert_array_equal(own.download(following), np.roll(waves, -1, axis=1).ravel())
    expected = [sum(1 << i for i, value in enumerate(wave) if value % 3 == 0) for wave in waves]
    np.testing.assert_array_equal(own.download(votes), np.repeat(np.array(expected, np.uint64), lanes))
    np.testing.assert_array_equal(own.download(wide), x[np.arange(n) ^ (lanes // 2)] / 3)
    np.testing.assert_array_equal(own.download(sums), np.repeat(x.reshape(-1, 8).sum(1), 8))
    np.testing.assert_array_equal(own.download(most), np.repeat(-waves.min(1), lanes))


def test_dot4(own: GpuDevice) -> None:
    rng = np.random.default_rng(5)
    a, b = (rng.integers(-128, 128, (256, 4), np.int8) for _ in range(2))
    a[0], b[0] = -128, -128
    out = own.empty(256, np.int32)
    own.launch("own", "dots", (1,), (256,), (own.upload(a.view(np.int32)), own.upload(b.view(np.int32)), out))
    expected = (a.astype(np.int64) * b).sum(1) + np.arange(256)
    np.testing.assert_array_equal(own.download(out), expected)


@pytest.mark.parametrize("threads", [64, 128, 1024])
def test_block_reductions_do_not_depend_on_other_rows(own: GpuDevice, threads: int) -> None:
    x = np.random.default_rng(6).normal(size=(300, 5000)).astype(np.float32)

    def reduce(rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        sums, most = own.empty(len(rows)), own.empty(len(rows))
        own.launch("own", "block", (len(rows),), (threads,), (own.upload(rows), sums, most, np.int32(rows.shape[1])))
        return own.download(sums), own.download(most)

    sums, most = reduce(x)
    np.testing.assert_allclose(sums, x.sum(1, dtype=np.float64), atol=1e-2)
    np.testing.assert_array_equal(most, x.max(1))
    for row in (0, 7, 299):
        assert reduce(x[row : row + 1])[0] == sums[row]


def test_arithmetic_is_exact_and_keeps_denormals(own: GpuDevice) -> None:
    a = np.array([1e-30, 3e-39, 1.0, 1e-20, 2.0, 1e-44], np.float32).repeat(32)
    b = np.array([1e-10, 2.0, 3e-39, 3.0, 1e38, 1e-44], np.float32).repeat(32)
    out = own.empty((len(a), 4))
    own.launch("own", "arithmetic", (1,), (len(a),), (own.upload(a), own.upload(b), out))
    with np.errstate(all="ignore"):
        expected = np.stack([a * b, a / b, np.sqrt(a), a + b], axis=1)
    assert ((expected != 0) & (np.abs(expected) < np.finfo(np.float32).tiny)).sum() >= 4 * 32
    np.testing.assert_array_equal(own.download(out), expected)


def test_unaligned_reads(own: GpuDevice) -> None:
    x = np.random.default_rng(7).integers(0, 120, 64 * 18, np.uint8)
    words, halves = own.empty(64, np.uint32), own.empty(64)
    own.launch("own", "unaligned", (1,), (64,), (own.upload(x), words, halves))
    blocks = x.reshape(64, 18)
    np.testing.assert_array_equal(own.download(words), blocks[:, :4].copy().view(np.uint32)[:, 0])
    np.testing.assert_array_equal(own.download(halves), blocks[:, 4:6].copy().view(np.float16)[:, 0].astype(np.float32))


def reverse(device: GpuDevice, size: int) -> None:
    x = np.arange(size // 4, dtype=np.int32)
    out = device.empty(len(x), np.int32)
    device.launch("own", "reverse", (1,), (256,), (device.upload(x), out, np.int32(len(x))), shared=size)
    np.testing.assert_array_equal(device.download(out), x[::-1])


def test_dynamic_shared_memory_up_to_the_limit(own: GpuDevice) -> None:
    for size in (1024, 48 * 1024, own.properties.shared_optin, 2048):
        reverse(own, size)
    with pytest.raises(DeviceError, match=r"kernels/own\.cu: reverse: "):
        reverse(own, own.properties.shared_optin + 1024)
    reverse(own, 4096)


def test_wrong_argument_types_are_device_errors(own: GpuDevice) -> None:
    with pytest.raises(DeviceError, match=r"kernels/own\.cu: wait: "):
        own.launch("own", "wait", (1,), (1,), ("not a number",))


def test_built_modules_come_from_the_cache(gpu: GpuDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build = KernelBuild.of("fill", {"TYPE": "float"})
    arch, lanes = gpu.properties.arch, gpu.lanes
    rtc = compiler.load(gpu.driver.vendor)
    assert rtc is not None
    first = compiler.cached(rtc, build, arch, lanes, tmp_path)

    def refuse(*_: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(rtc, "compile", refuse)
    assert compiler.cached(rtc, build, arch, lanes, tmp_path) == first


def test_memory_is_counted(gpu: GpuDevice) -> None:
    size = 1 << 30
    before = gpu.memory()
    array = gpu.empty(size, np.uint8)
    assert before.free - gpu.memory().free >= size - (1 << 24)
    del array
    # The pool keeps it, and it counts as free.
    assert gpu.memory().free >= before.free - (1 << 24)
    assert before.total == gpu.properties.memory or before.total == pytest.approx(gpu.properties.memory, rel=0.05)


def test_the_next_arrays_are_cut_from_reserved_memory(gpu: GpuDevice) -> None:
    pool = gpu.cupy.get_default_memory_pool()
    pool.free_all_blocks()
    gpu.reserve(16 << 24)
    held = pool.total_bytes()
    arrays = [gpu.empty(1 << 24, np.uint8) for _ in range(16)]
    assert pool.total_bytes() == held >= 16 << 24
    assert len({int(array.data.ptr) for array in arrays}) == 16
    # More than there is: nothing happens.
    gpu.reserve(2 * gpu.memory().total)
    assert pool.total_bytes() == held


def test_out_of_memory_is_survived(gpu: GpuDevice) -> None:
    chunk = gpu.memory().total // 3
    with pytest.raises(OutOfMemoryError, match=rf"{gpu.name}: {chunk} bytes asked, \d+ bytes free"):
        [gpu.empty(chunk, np.uint8) for _ in range(4)]
    gpu.empty(chunk, np.uint8)


def fill(gpu: GpuDevice, out: Any, value: float) -> None:
    args = (out, np.int64(out.size), np.float32(value))
    gpu.launch("fill", "fill", ((out.size + 255) // 256,), (256,), args, defines={"TYPE": "float"})


def test_graphs(gpu: GpuDevice) -> None:
    out = gpu.zeros(1000)
    fill(gpu, out, 1)
    gpu.synchronize()
    driver, stream = gpu.driver, gpu.stream
    driver.begin_capture(stream)
    fill(gpu, out[:500], 2)
    fill(gpu, out[250:750], 3)
    graph = driver.end_capture(stream)
    assert (gpu.download(out) == 1).all(), "captured, not run"
    for _ in range(2):
        driver.launch_graph(graph, stream)
        np.testing.assert_array_equal(gpu.download(out), np.repeat(np.array([2, 3, 1], np.float32), [250, 500, 250]))
        fill(gpu, out, 1)
    driver.destroy_graph(graph)


def test_pinned_shared_memory(gpu: GpuDevice) -> None:
    area = mmap.mmap(-1, 1 << 20)
    host = np.frombuffer(area, np.float32)
    address = host.__array_interface__["data"][0]
    gpu.driver.use(gpu.name.index)
    gpu.driver.register_host(address, len(area))
    try:
        host[:] = np.arange(len(host))
        np.testing.assert_array_equal(gpu.download(gpu.upload(host)), np.arange(len(host)))
        with pytest.raises(DeviceError, match="HostRegister"):
            gpu.driver.register_host(address, len(area))
    finally:
        gpu.driver.unregister_host(address)
    with pytest.raises(DeviceError, match="HostUnregister"):
        gpu.driver.unregister_host(address)


def test_peer_access(gpu: GpuDevice) -> None:
    assert not gpu.driver.enable_peer(gpu.name.index, gpu.name.index)
    others = [other.name.index for other in found() if other.name.kind == gpu.name.kind and other.name != gpu.name]
    for other in others:
        if gpu.driver.enable_peer(gpu.name.index, other):
            assert gpu.driver.enable_peer(gpu.name.index, other)


def test_work_on_several_devices_of_one_thread() -> None:
    names = [other.name for other in found()]
    if len(names) < 2:
        pytest.skip("one GPU")
    devices = [GpuDevice(name.kind, name.index) for name in names if name.kind != "cpu"]
    outs = [device.zeros(1000) for device in devices]
    for value in range(10):
        for device, out in zip(devices, outs, strict=True):
            fill(device, out, value + device.name.index / 8)
    for device, out in zip(devices, outs, strict=True):
        assert (device.download(out) == 9 + device.name.index / 8).all()
        device.close()


def test_closed_devices_refuse(gpu: GpuDevice) -> None:
    assert gpu.name.kind != "cpu"
    device = GpuDevice(gpu.name.kind, gpu.name.index)
    out = device.zeros(4)
    device.close()
    device.close()
    calls: list[Callable[[], Any]] = [
        device.synchronize,
        device.memory,
        lambda: device.empty(1),
        lambda: device.download(out),
        lambda: fill(device, out, 1),
    ]
    for call in calls:
        with pytest.raises(DeviceError, match="is closed"):
            call()


def test_cost_of_a_launch(gpu: GpuDevice, capsys: pytest.CaptureFixture[str]) -> None:
    out = gpu.zeros(1)
    count = 5000
    fill(gpu, out, 0)
    gpu.synchronize()
    start = time.perf_counter()
    for value in range(count):
        fill(gpu, out, value)
    queued = time.perf_counter() - start
    gpu.synchronize()
    assert gpu.download(out)[0] == count - 1
    start = time.perf_counter()
    for _ in range(1000):
        gpu.upload(np.zeros(16, np.int32))
    uploads = time.perf_counter() - start
    with capsys.disabled():
        print(f"\nlaunch {queued / count * 1e6:.1f} us, upload of 64 bytes {uploads * 1e3:.1f} us (host)")


def test_a_crashed_kernel_is_a_device_error(gpu: GpuDevice, tmp_path: Path) -> None:
    """In a process of its own: the context is lost with it."""
    import subprocess
    import sys

    shutil.copytree(kernels.directory(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "own.cu").write_text(SOURCE)
    program = f"""
import pathlib
from luce.errors import DeviceError
from luce.runtime import kernels
from luce.runtime.gpu import GpuDevice
kernels.directory = lambda: pathlib.Path({str(tmp_path)!r})
device = GpuDevice({gpu.name.kind!r}, {gpu.name.index})
device.launch("own", "crash", (1,), (1,), (device.zeros(1),))
try:
    device.synchronize()
except DeviceError as error:
    print(error)
import os
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.startswith(f"{gpu.name}: "), done.stderr


def test_captured_work_shares_its_memory_with_other_graphs(gpu: GpuDevice) -> None:
    source = gpu.upload(np.arange(1000, dtype=np.float32))

    def work() -> tuple[Any, ...]:
        between = gpu.empty(1000)
        gated(between, source)
        out = gpu.empty(1000)
        gated(out, between)
        return between, out

    def gated(out: Any, gate: Any) -> None:
        args = (out, gate, np.int64(1000), source, np.int64(1000), np.int32(1000))
        gpu.launch("activation", "gated_silu", (1, 4), (256,), args)

    eager, expected = work()
    first, (between, one) = gpu.capture(work)
    second, (again, two) = gpu.capture(work)
    # Which of two arrays of one size comes first is the memory pool's choice.
    places = {between.data.ptr, one.data.ptr}
    assert places == {again.data.ptr, two.data.ptr}
    assert places.isdisjoint({eager.data.ptr, expected.data.ptr})
    for graph, out in ((first, one), (second, two), (first, one)):
        one[...] = 0
        graph.launch()
        assert (gpu.download(out) == gpu.download(expected)).all()
    gpu.write(source, np.zeros(1000, np.float32))
    second.launch()
    assert not gpu.download(two).any(), "a graph reads what is there when it runs"


def test_captured_products(gpu: GpuDevice) -> None:
    random = np.random.default_rng(0)
    x, weight = (gpu.upload(random.standard_normal((n, 512)).astype(np.float16)) for n in (300, 640))

    def work() -> tuple[Any, ...]:
        out = gpu.empty((300, 640))
        gpu.gemm(x, weight, out)
        return (out,)

    expected = gpu.download(work()[0])
    graph, (out,) = gpu.capture(work)
    free = gpu.memory().free
    for _ in range(3):
        out[...] = 0
        graph.launch()
        np.testing.assert_array_equal(gpu.download(out), expected)
    assert gpu.memory().free == free, "a replay takes no memory"
    exact = gpu.download(x).astype(np.float64) @ gpu.download(weight).astype(np.float64).T
    assert np.abs(expected - exact).max() < 1e-3


def test_work_that_cannot_be_captured(gpu: GpuDevice) -> None:
    array = gpu.zeros(4)
    with pytest.raises(DeviceError, match="captur"):
        gpu.capture(lambda: (gpu.synchronize(), array)[1:])
    assert (gpu.download(array) == 0).all(), "the device works on"
