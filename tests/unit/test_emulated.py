"""The emulated device: what it computes, and that it reports what a GPU would let pass."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luce.errors import DeviceError
from luce.runtime.device import Array, TensorMap
from tests.support.emulated import SHARED_LIMIT, EmulatedDevice

pytestmark = pytest.mark.emulated

SOURCE = Path(__file__).parents[1] / "support" / "checks.cu"
LINES = {}
for _number, _line in enumerate(SOURCE.read_text(encoding="utf-8").splitlines(), 1):
    if "//! " in _line:
        LINES[_line.split("//! ")[1]] = _number


class Checks:
    """Launches of these kernels."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device

    def __call__(self, kernel: str, grid: Any, block: Any, *args: Any, shared: int = 0, barriers: int = 0) -> None:
        defines: dict[str, int | str] = {"FACTOR": 10, "BARRIERS": barriers}
        self.device.launch("checks", kernel, grid, block, args, defines=defines, shared=shared)

    def fails(self, kernel: str, grid: Any, block: Any, *args: Any, shared: int = 0, barriers: int = 0) -> str:
        with pytest.raises(DeviceError) as caught:
            self(kernel, grid, block, *args, shared=shared, barriers=barriers)
        message = str(caught.value)
        assert message.startswith(f"{kernel} of kernels/checks.cu: ")
        assert "\n" not in message
        return message


@pytest.fixture(params=[32, 64], ids="{} lanes".format)
def checks(request: pytest.FixtureRequest) -> Iterator[Checks]:
    device = EmulatedDevice(request.param, SOURCE.parent)
    yield Checks(device)
    device.close()


def test_block_sums(checks: Checks) -> None:
    x = np.random.default_rng(0).standard_normal((5, 1000)).astype(np.float32)
    device = checks.device
    for threads in (64, 128, 1024):
        out = device.empty(5)
        checks("block_sums", (5,), (threads,), device.upload(x), out, np.int32(1000))
        np.testing.assert_allclose(device.download(out), x.sum(1, dtype=np.float64), rtol=0, atol=1e-4)


def test_lane_operations(checks: Checks) -> None:
    device, lanes = checks.device, checks.device.lanes
    x = np.random.default_rng(1).integers(0, 1000, 128).astype(np.int32)
    out = [device.empty(128, dtype) for dtype in (np.int32, np.int32, np.uint64, np.float64)]
    checks("lanes", (1,), (128,), device.upload(x), *out)
    xor1, first, votes, rotated = map(device.download, out)
    index = np.arange(128)
    wave = index // lanes * lanes
    np.testing.assert_array_equal(xor1, x[index ^ 1])
    np.testing.assert_array_equal(first, x[wave])
    np.testing.assert_array_equal(rotated, x[wave + (index - wave + 5) % lanes] / 3)
    expected = [sum(int(x[w + lane] % 3 == 0) << lane for lane in range(lanes)) for w in range(0, 128, lanes)]
    np.testing.assert_array_equal(votes, np.repeat(np.array(expected, np.uint64), lanes))


def test_indices(checks: Checks) -> None:
    grid, block = (3, 2, 2), (5, 3, 2)
    out = checks.device.empty((12, 30, 4), np.int32)
    checks("indices", grid, block, out)
    got = checks.device.download(out)
    np.testing.assert_array_equal(got[..., 3], np.repeat(np.arange(12)[:, None], 30, 1))
    z, y, x = np.unravel_index(np.arange(30), block[::-1])
    for axis, expected in enumerate((x, y, z)):
        np.testing.assert_array_equal(got[..., axis], np.repeat(expected[None], 12, 0))


@pytest.mark.parametrize("threads", [1, 33, 1000])
def test_dynamic_shared_memory(checks: Checks, threads: int) -> None:
    x = np.random.default_rng(2).standard_normal((4, threads)).astype(np.float32)
    out = checks.device.empty((4, threads))
    checks("reverse", (4,), (threads,), checks.device.upload(x), out, shared=4 * threads)
    np.testing.assert_array_equal(checks.device.download(out), x[:, ::-1])


def test_atomics(checks: Checks) -> None:
    device = checks.device
    x = np.random.default_rng(3).integers(0, 10**6, 700).astype(np.int32)
    bins, largest = device.zeros(4, np.int32), device.zeros(1, np.uint32)
    checks("count", (6,), (128,), device.upload(x), bins, largest, np.int32(700))
    np.testing.assert_array_equal(device.download(bins), np.bincount(x % 4, minlength=4))
    assert device.download(largest)[0] == x.max()


def test_all_halves(checks: Checks) -> None:
    x = np.arange(65536, dtype=np.uint16).view(np.float16)
    out = checks.device.empty(65536)
    checks("from_halves", (256,), (256,), checks.device.upload(x), out)
    np.testing.assert_array_equal(checks.device.download(out), x.astype(np.float32))


def test_rounding_to_halves(checks: Checks) -> None:
    device = checks.device
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[1:] + halves[:-1]) / 2
    bits = np.random.default_rng(4).integers(0, 2**32, 20000, dtype=np.uint32)
    edges = np.array([65519.9, 65520, 65536, 1e30, np.inf, np.nan, 1e-40, 0], np.float32)
    parts = (halves, middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(9e9)), edges)
    x = np.concatenate([bits.view(np.float32), *parts, *(-part for part in parts)])
    half, brain = device.empty(len(x), np.float16), device.empty(len(x), np.uint16)
    checks("to_halves", (-(-len(x) // 256),), (256,), device.upload(x), half, brain, np.int32(len(x)))
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(np.float16)
    np.testing.assert_array_equal(device.download(half), expected)
    np.testing.assert_array_equal(np.signbit(device.download(half)), np.signbit(expected))
    back = (device.download(brain).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(np.isnan(back), np.isnan(x))
    # To the nearest of the two bfloat16 beside the value; at equal distance to the one with an even last bit.
    finite = np.isfinite(x) & (np.abs(x) < 3e38)
    low = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)[finite].astype(np.float64)
    high = ((x.view(np.uint32) & 0xFFFF0000) + np.uint32(0x10000)).view(np.float32)[finite].astype(np.float64)
    exact = x[finite].astype(np.float64)
    odd = (x.view(np.uint32)[finite] >> 16 & 1).astype(bool)
    up = np.abs(high - exact) < np.abs(exact - low)
    up |= (np.abs(high - exact) == np.abs(exact - low)) & odd
    np.testing.assert_array_equal(back[finite], np.where(up, high, low))


def test_defines_constants_and_vectors(checks: Checks) -> None:
    out = checks.device.empty(4, np.int32)
    checks("defined", (1,), (4,), out)
    dot = 100 + 1 * 5 + -1 * 4 + -128 * 3 + 127 * 2
    np.testing.assert_array_equal(checks.device.download(out), np.array([2, 3, 5, 7]) * 10 + dot)


def test_orders_are_no_races(checks: Checks) -> None:
    device, lanes = checks.device, checks.device.lanes
    out = device.empty(192)
    checks("ordered", (1,), (192,), out)
    t = np.arange(192)
    s = t + t // lanes * lanes + (t % lanes + 1) % lanes
    np.testing.assert_array_equal(device.download(out), s + s[::-1] + 1)


@pytest.mark.parametrize("at", [40, 41, -1, 10**6])
def test_out_of_bounds(checks: Checks, at: int) -> None:
    device = checks.device
    x, out = device.zeros((4, 10)), device.empty(8)
    message = checks.fails("reads_at", (1,), (8,), x, out, np.int64(at))
    assert "block (0, 0, 0), thread (0, 0, 0)" in message
    assert f"checks.cu:{LINES['reads_at']}: read of 4 bytes outside of all arrays" in message
    if at < 42:
        assert f"byte {4 * at} of argument 1 (x): float32 [4, 10], 160 bytes" in message
        message = checks.fails("writes_at", (2,), (8,), x, np.int32(at))
        assert f"block (1, 0, 0), thread (2, 0, 0), checks.cu:{LINES['writes_at']}: write" in message


def test_gaps_between_rows_are_out_of_bounds(checks: Checks) -> None:
    device = checks.device
    fused, out = device.zeros((4, 10)), device.empty(1)
    part = fused[:, 2:5]
    for at in range(33):
        if at % 10 < 3:
            checks("reads_at", (1,), (1,), part, out, np.int64(at))
        else:
            assert "outside of all arrays" in checks.fails("reads_at", (1,), (1,), part, out, np.int64(at))
    grid = device.zeros((3, 4, 5, 6))[:, 1:3, :, 2:]
    inside = {np.ravel_multi_index((a, b, c, d), (3, 4, 5, 6)) for a, b, c, d in np.ndindex(3, 2, 5, 4)}
    for at in range(360):
        if at in inside:
            checks("reads_at", (1,), (1,), grid, out, np.int64(at))
        else:
            assert "outside of all arrays" in checks.fails("reads_at", (1,), (1,), grid, out, np.int64(at))


def test_const_arrays(checks: Checks) -> None:
    x = checks.device.zeros(8)
    assert f"checks.cu:{LINES['writes_const']}: write of 4 bytes in a const" in checks.fails(
        "writes_const", (1,), (8,), x
    )


def test_misaligned(checks: Checks) -> None:
    x, out = checks.device.zeros(8), checks.device.empty(1)
    message = checks.fails("misaligned", (1,), (1,), x, out)
    assert f"checks.cu:{LINES['misaligned']}: misaligned read of 8 bytes (byte 4 of argument 1 (x)" in message
    checks("misaligned", (1,), (1,), x[1:], out)


def test_reads_of_unwritten_arrays(checks: Checks) -> None:
    device = checks.device
    x, out = device.empty(8), device.empty(1)
    read = "reads_at", (1,), (1,), x, out
    message = checks.fails(*read, np.int64(5))
    assert (
        f"checks.cu:{LINES['reads_at']}: read of 4 bytes that nothing was written to (byte 20 of argument 1" in message
    )
    checks("writes_at", (2,), (8,), x, np.int32(5))
    checks(*read, np.int64(5))
    assert device.download(out)[0] == 1
    checks.fails(*read, np.int64(4))
    x[4] = 3  # the host writes as well
    checks(*read, np.int64(4))
    assert device.download(out)[0] == 3
    checks("reads_at", (1,), (1,), x[:3] * 0, out, np.int64(0))  # NumPy's results hold values
    assert np.isnan(device.download(x[:1]))[0]


def test_unwritten_shared_memory(checks: Checks) -> None:
    # The first block writes all of it; what the second one would find there is no value of its own.
    message = checks.fails("unwritten_shared", (2,), (64,), checks.device.empty(128), np.int32(60))
    place = f"block (1, 0, 0), thread (3, 0, 0), checks.cu:{LINES['unwritten_shared']}"
    assert f"{place}: read of 4 bytes of shared memory that nothing was written to" in message


def test_shared_memory_bounds(checks: Checks) -> None:
    out = checks.device.zeros(33)
    message = checks.fails("shared_past_end", (1,), (33,), out, shared=128)
    assert f"thread (32, 0, 0), checks.cu:{LINES['shared_past_end']}: write of 4 bytes outside of all" in message
    message = checks.fails("shared_past_end", (1,), (33,), out, shared=SHARED_LIMIT + 4)
    assert f"{SHARED_LIMIT + 4} bytes of dynamic shared memory; a block has at most {SHARED_LIMIT}" in message


def test_missing_barriers(checks: Checks) -> None:
    device = checks.device
    x, out = device.upload(np.arange(256, dtype=np.float32)), device.empty(512)
    launch = "missing_barrier", (1,), (256,), x, out
    message = checks.fails(*launch, barriers=0b10)
    assert f"checks.cu:{LINES['read_after_write']}: read of 4 bytes of shared memory races with thread" in message
    # Thread 0 is already at the next round's write; the slower thread's read meets it.
    message = checks.fails(*launch, barriers=0b01)
    assert f"thread (1, 0, 0), checks.cu:{LINES['read_after_write']}: read of 4 bytes of shared memory races" in message
    checks(*launch, barriers=0b11)
    np.testing.assert_array_equal(device.download(out), np.r_[np.arange(256) // 2, np.arange(256) // 2 + 1])


def test_gates(checks: Checks) -> None:
    device, lanes = checks.device, checks.device.lanes
    x, out = device.upload(np.arange(lanes, dtype=np.float32)), device.empty((3, lanes))
    launch = "gates", (1,), (2 * lanes,), x, out
    expected = np.arange(lanes) + np.arange(3)[:, None]
    checks(*launch, barriers=0b11111)
    np.testing.assert_array_equal(device.download(out), expected)
    for barriers in (0b11110, 0b11101, 0b10111):  # turns that pass unseen, or that do not end
        assert "divergent barrier: thread" in checks.fails(*launch, barriers=barriers)
    message = checks.fails(*launch, barriers=0b11011)
    assert f"checks.cu:{LINES['gate_read']}: read of 4 bytes of shared memory that nothing was written to" in message
    message = checks.fails(*launch, barriers=0b01111)
    assert f"checks.cu:{LINES['gate_arrival']}: the thread arrives at a gate, but did not share" in message


def test_boxes() -> None:
    device = EmulatedDevice(32, SOURCE.parent)
    device.products |= {"WGMMA"}
    checks = Checks(device)
    values = np.arange(30 * 3 * 72, dtype=np.uint16).reshape(30, 3, 72)
    x, out = device.upload(values), device.empty((8, 64), np.uint16)
    boxes = TensorMap(x, 8)

    def launch(column: int, head: int, row: int, expected: int = 1024) -> tuple[Any, ...]:
        place = (np.int32(number) for number in (column, head, row, expected))
        return "boxes", (1,), (64,), boxes, x, out, *place

    for column, head, row in ((0, 0, 0), (0, 2, 22), (8, 1, 5), (64, 1, 5)):
        checks(*launch(column, head, row), shared=1024, barriers=0b111)
        inside = values[row : row + 8, head, column : column + 64]
        np.testing.assert_array_equal(device.download(out), np.pad(inside, ((0, 0), (0, 64 - inside.shape[1]))))
    message = checks.fails(*launch(0, 0, 0), shared=1024, barriers=0b101)
    assert f"checks.cu:{LINES['box_read']}: read of 2 bytes of shared memory races" in message
    for barriers, expected in ((0b110, 1024), (0b111, 1040)):  # no arrival, and more bytes than come
        assert "divergent barrier: thread" in checks.fails(*launch(0, 0, 0, expected), shared=1024, barriers=barriers)
    message = checks.fails(*launch(0, 0, 0), shared=1024, barriers=0b001)
    assert f"checks.cu:{LINES['box_load']}: the block ended before this box had come" in message
    message = checks.fails(*launch(0, 0, 23), shared=1024, barriers=0b111)
    assert "read of 16 bytes outside of all arrays" in message
    for wrong in (TensorMap(device.upload(values.astype(np.float32)), 8), TensorMap(x[:, :, 8:], 8)):
        with pytest.raises(DeviceError, match=r"is a TensorMap of .*, not of 16-bit numbers in three dimensions"):
            checks("boxes", (1,), (64,), wrong, x, out, *launch(0, 0, 0)[6:], shared=1024, barriers=0b111)
    with pytest.raises(DeviceError, match="is a TensorMap, the kernel takes something else"):
        checks("boxes", (1,), (64,), boxes, boxes, out, *launch(0, 0, 0)[6:], shared=1024, barriers=0b111)


def test_work_before_the_kernels_ahead_have_ended(checks: Checks) -> None:
    device = checks.device
    x, out = device.upload(np.arange(64, dtype=np.float32)), device.empty(64)

    def arguments(x: Array, read: int, write: int, stay: int) -> tuple[Any, ...]:
        return "awaits", (1,), (64,), x, out, np.int32(read), np.int32(write), np.int32(stay)

    checks(*arguments(x, 1, 0, 64))
    np.testing.assert_array_equal(device.download(out), 2 * np.arange(64))
    message = checks.fails(*arguments(out, 1, 0, 64))
    assert f"checks.cu:{LINES['early_read']}: read of 4 bytes before luce_await (byte 0 of argument 1" in message
    device.upload(np.zeros(1, np.float32))
    checks(*arguments(out, 1, 0, 64))
    message = checks.fails(*arguments(x, 0, 1, 64))
    assert f"checks.cu:{LINES['early_write']}: write of 4 bytes before luce_await (byte 0 of argument 2" in message
    message = checks.fails(*arguments(x, 0, 0, 40))
    assert "thread (40, 0, 0)" in message and message.endswith("the thread ended without luce_await")


def test_a_write_while_all_read(checks: Checks) -> None:
    for threads in (2, 64, 256):
        message = checks.fails("all_read_one_writes", (1,), (threads,), checks.device.empty(threads))
        assert f"thread ({threads - 1}, 0, 0), checks.cu:{LINES['one_writes']}: write" in message


def test_lanes_do_not_run_in_step(checks: Checks) -> None:
    lanes = checks.device.lanes
    message = checks.fails("lanes_race", (1,), (lanes,), checks.device.empty(lanes))
    assert f"checks.cu:{LINES['lanes_race']}: " in message


def test_plain_and_atomic_accesses_race(checks: Checks) -> None:
    message = checks.fails("atomic_race", (1,), (4,), checks.device.zeros(1, np.int32))
    assert f"checks.cu:{LINES['atomic_race']}: write of 4 bytes races with block (0, 0, 0), thread (0, 0, 0)" in message


def test_races_in_global_memory(checks: Checks) -> None:
    device = checks.device
    message = checks.fails("in_place", (2,), (8,), device.zeros(16))
    assert f"thread (1, 0, 0), checks.cu:{LINES['in_place']}: read of 4 bytes races with block (0, 0, 0)" in message
    message = checks.fails("shift_blocks", (2, 1), (1,), device.zeros(2))
    assert f"block (1, 0, 0), thread (0, 0, 0), checks.cu:{LINES['shift_blocks']}: write of 4 bytes races" in message
    checks("in_place", (1,), (1,), device.zeros(1))


def test_neighbouring_halves_do_not_race(checks: Checks) -> None:
    device = checks.device
    x = device.zeros(10)
    checks("to_halves", (1,), (16,), x, device.empty(10, np.float16), device.empty(10, np.uint16), np.int32(10))


def test_divergent_barriers(checks: Checks) -> None:
    device = checks.device
    message = checks.fails("some_leave", (1,), (96,), device.empty(96), np.int32(70))
    assert (
        f"thread (0, 0, 0), checks.cu:{LINES['some_leave']}: divergent barrier: thread (70, 0, 0) has ended" in message
    )
    message = checks.fails("two_barriers", (1,), (96,), device.empty(96))
    assert f"checks.cu:{LINES['first_barrier']}: divergent barrier: thread (8, 0, 0) is at checks.cu:" in message
    assert f"is at checks.cu:{LINES['second_barrier']}" in message
    checks("some_leave", (1,), (96,), device.empty(96), np.int32(96))


def test_divergent_lanes(checks: Checks) -> None:
    message = checks.fails("half_shuffles", (1,), (64,), checks.device.empty(64))
    assert f"from checks.cu:{LINES['half_shuffles']}: divergent lanes: thread (8, 0, 0)" in message
    assert f"is at checks.cu:{LINES['half_waits']}" in message


def test_lanes_that_do_not_exist(checks: Checks) -> None:
    lanes = checks.device.lanes
    message = checks.fails("fixed_width", (1,), (lanes,), checks.device.empty(lanes))
    assert f"checks.cu:{LINES['fixed_width']}: shuffle from lane {lanes}, which does not exist" in message
    x, out = checks.device.zeros(48), checks.device.empty(1)
    message = checks.fails("block_sums", (1,), (lanes + 16,), x, out, np.int32(48))
    assert f"thread ({lanes}, 0, 0), reduce.h:" in message
    assert "not a whole number of waves" in message


def test_arguments(checks: Checks) -> None:
    device = checks.device
    x, out, n = device.zeros(8), device.empty(8), np.int64(0)
    assert "2 arguments, the kernel has 3" in checks.fails("reads_at", (1,), (8,), x, out)
    assert "argument 3 (at) is int, the kernel takes int64" in checks.fails("reads_at", (1,), (8,), x, out, 0)
    message = checks.fails("reads_at", (1,), (8,), x, out, np.int32(0))
    assert "argument 3 (at) is int32, the kernel takes int64" in message
    message = checks.fails("reads_at", (1,), (8,), np.zeros(8, np.float32), out, n)
    assert "argument 1 (x) is ndarray of float32, not an array of this device" in message
    message = checks.fails("reads_at", (1,), (8,), device.zeros(8, np.float64), out, n)
    assert "argument 1 (x) has dtype float64, the kernel takes float32" in message
    message = checks.fails("reads_at", (1,), (8,), x[::-1], out, n)
    assert "argument 1 (x) has strides (-4,) for shape (8,)" in message
    assert "argument 1 (x) has strides" in checks.fails(
        "reads_at", (1,), (8,), np.broadcast_to(x, (3, 8), True), out, n
    )
    assert "argument 2 (out) is NoneType" not in checks.fails("reads_at", (1,), (8,), x, None, n)
    out.flags.writeable = False
    assert "argument 2 (out) is read-only" in checks.fails("reads_at", (1,), (8,), x, out, n)


def test_kernels_and_sizes(checks: Checks) -> None:
    device = checks.device
    assert "no such kernel" in checks.fails("absent", (1,), (1,))
    with pytest.raises(DeviceError, match=r"kernels/absent\.cu: no such kernel source"):
        device.launch("absent", "x", (1,), (1,), [])
    for grid, block in (((0,), (1,)), ((1,), (1025,)), ((1, 65536), (1,)), ((1,), (1, 1, 1, 1)), ((1,), (1, 1, 65))):
        checks.fails("indices", grid, block, device.empty(4, np.int32))


def test_launch_bounds(checks: Checks) -> None:
    out = checks.device.empty(33, np.int32)
    checks("bounded", (1,), (8, 4), out)
    message = checks.fails("bounded", (1,), (33,), out)
    assert "block (33, 1, 1) has more threads than its __launch_bounds__(32)" in message


def test_a_source_that_does_not_compile(tmp_path: Path) -> None:
    (tmp_path / "broken.cu").write_text(
        '#include "gpu.h"\nextern "C" __global__ void k(int* x) { luce_await(); *x = nothing; }\n'
    )
    with pytest.raises(DeviceError, match="nothing"):
        EmulatedDevice(32, tmp_path).launch("broken", "k", (1,), (1,), [None])


def test_an_edited_header_is_compiled_again(tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text(
        '#include "gpu.h"\n#include "own.h"\nextern "C" __global__ void k(int* x) { luce_await(); *x = ANSWER; }\n'
    )
    for answer in (1, 2):
        (tmp_path / "own.h").write_text(f"#define ANSWER {answer}\n")
        device = EmulatedDevice(32, tmp_path)
        out = device.empty(1, np.int32)
        device.launch("k", "k", (1,), (1,), [out])
        assert device.download(out)[0] == answer


def test_a_launch_after_a_fault_is_unharmed(checks: Checks) -> None:
    device = checks.device
    for _ in range(3):
        checks.fails("some_leave", (1,), (1024,), device.empty(1024), np.int32(7))
        test_block_sums(checks)


def test_copies_between_the_wrong_memories() -> None:
    """NumPy would let them pass; CuPy takes the one for the other, or the bytes as they lie."""
    device, here = EmulatedDevice(), np.ones((2, 4), np.float32)
    there = device.upload(here)
    for what, work in {
        "upload of an array of this device": lambda: device.upload(there),
        "write of an array of this device": lambda: device.write(there, there),
        r"write of ndarray of float32 \[2, 4\] to ndarray of": lambda: device.write(here, here),
        r"write of ndarray of float64 \[2, 4\] to": lambda: device.write(there, here.astype(np.float64)),
        r"write of ndarray of float32 \[4\] to": lambda: device.write(there, here[0]),
        r"write of .* to DeviceArray of float32 \[2, 2\]": lambda: device.write(there[:, :2], here[:, :2]),
        "copy of ndarray of float32, which is no whole array of this device": lambda: device.copy(there, here),
        "copy of DeviceArray of float32, which": lambda: device.copy(there[:, 0], there[:, 1]),
        r"copy of DeviceArray of float32 \[4\] to DeviceArray of float32 \[2, 4\]": lambda: device.copy(
            there, there[0]
        ),
        "download of ndarray": lambda: device.download(here),
    }.items():
        with pytest.raises(DeviceError, match=what):
            work()
    device.copy(there[0], there[1])
    device.write(there[1], here[0])


def test_memory_is_counted_and_released() -> None:
    device = EmulatedDevice()
    array = device.empty((10, 10))[2:5]
    assert device.describe()["allocated"] == 400
    del array
    gc.collect()
    assert device.describe()["allocated"] == 0
