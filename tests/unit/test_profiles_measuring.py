"""Profiles of devices: with an invented clock, where every figure has a known value, and on emulated GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from luce.errors import DeviceError, OutOfMemoryError
from luce.ops.matmul import matmul
from luce.ops.weight import Weight
from luce.profiles import products
from luce.profiles.layer_parts import Part, layers_part
from luce.profiles.measuring import peer_link, profile_device
from luce.profiles.profile import DeviceProfile
from luce.profiles.timer import ExpertSizes, Measuring, ProfileSizes, Timer
from luce.runtime.device import Device, Event
from luce.runtime.host import HostDevice
from tests.support.emulated import EmulatedDevice

EXPERTS = ExpertSizes(4, 2, 1 << 13, (1, 16))


def small(**changes: Any) -> ProfileSizes:
    own: dict[str, Any] = {"matrix_bytes": 1 << 15, "columns": 256, "features": 1 << 20, "rows": (1, 16, 32)}
    own |= {"launches": 8, "copied": 1 << 12, "seconds": 0.0, "positions": 64, "prompt": 32}
    own |= {"experts": EXPERTS, "recurrent_layers": 3}
    return ProfileSizes(**(own | changes))


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
        self.pattern, self.at, self.records, self.after = pattern, 0.0, 0, 0

    def record(self, *, timing: bool = False) -> Event:
        if timing:
            self.records += 1
            if self.records % 2 == 0:
                self.at += self.pattern[self.records // 2 % len(self.pattern)]
        return Ticks(self.at)


def measure(device: Device, *, experts: bool = False, recurrent: bool = False, **sizes: Any) -> DeviceProfile:
    return profile_device(device, [Q8_0], Measuring(small(**sizes), experts, recurrent))


def test_figures_are_work_by_median_seconds() -> None:
    profile = measure(Clocked([2.0]))
    found = profile.formats["Q8_0"]
    # Float32 on this device: 256 columns, and as many whole tiles of 16 rows as 32 KiB of Q8_0 (272 bytes a row) have.
    elements = 256 * 112
    assert found.read == pytest.approx(4 * elements / 2)
    assert found.rates == pytest.approx({rows: 2 * rows * elements / 2 for rows in (1, 16, 32)})
    assert found.unpack is None
    assert (profile.device, profile.launch) == ("cpu:0", 0.0)


class Counting(EmulatedDevice):
    """An emulated device that notes how many launches came before each timed event."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.counts = 0, list[int]()

    def launch(self, *args: Any, **options: Any) -> None:
        self.launches += 1
        super().launch(*args, **options)

    def record(self, *, timing: bool = False) -> Event:
        if timing:
            self.counts.append(self.launches)
        return super().record(timing=timing)


@pytest.mark.emulated
def test_a_gpu_works_while_what_is_timed_is_queued() -> None:
    device = Counting()
    measure(device, rows=(1,))
    ends = [0, *device.counts[1::2]]
    for before, start, end in zip(ends, device.counts[::2], ends[1:], strict=False):
        assert start - before >= end - start > 0


def test_products_that_take_too_long_have_fewer_features() -> None:
    elements = 256 * 112
    found = measure(Clocked([2.0]), features=64, seconds=1.0).formats["Q8_0"]
    assert found.rates == pytest.approx({rows: 2 * rows * 256 * 64 / 2 for rows in (1, 16, 32)})
    # A run may take a fifth of the time: with 20 seconds there is time for twice the features, and more are tried.
    found = measure(Clocked([2.0]), features=64, seconds=1000.0).formats["Q8_0"]
    assert found.rates[1] == pytest.approx(2 * elements / 2)


@pytest.mark.parametrize(
    ("pattern", "seconds", "noisy"), [([1.0], 1e9, False), ([1.0, 3.0], 1e9, True), ([1.0], 0, True)]
)
def test_wide_quartiles_and_too_few_runs_are_noisy(pattern: list[float], seconds: float, noisy: bool) -> None:
    assert measure(Clocked(pattern), rows=(1,), seconds=seconds).formats["Q8_0"].noisy is noisy


@pytest.mark.parametrize(("pattern", "runs"), [([1.0], 7), ([1.0, 3.0, 9.0], 14)])
def test_figures_after_the_end_get_the_fewest_runs(pattern: list[float], runs: int) -> None:
    """With time there are seven runs, and twice as many where they disagree."""

    def records(end: float) -> int:
        device = Clocked(pattern)
        profile_device(device, [Q8_0], Measuring(small(rows=(1,), seconds=1e9), end=end))
        return device.records

    # Seven figures: many launches, one, attention of one row and of a prompt, an activation, the product, and layers.
    assert records(float("inf")) - records(0.0) == 2 * 7 * (runs - 3)


@pytest.mark.parametrize(("host", "order"), [(True, "aabb" + 7 * "ab"), (False, 9 * "a" + 9 * "b")])
def test_figures_of_a_host_are_timed_in_turn_those_of_a_gpu_by_themselves(host: bool, order: str) -> None:
    device, ran = Clocked([1.0]), list[str]()
    device.host = host  # type: ignore[misc]  # no GPU is here
    timer = Timer(device, Measuring(small(seconds=1e9)))

    def once(name: str, seconds: float) -> float:
        ran.append(name)
        return seconds

    first, second = timer.repeated(lambda: once("a", 1.0)), timer.repeated(lambda: once("b", 2.0))
    timer.finish()
    assert "".join(ran) == order
    assert (first.median, second.median, first.noisy) == (1.0, 2.0, False)


def test_a_host_that_becomes_slow_has_the_same_ratios_and_differences() -> None:
    class Slowing(Clocked):
        """Takes three times as long from a record on."""

        def record(self, *, timing: bool = False) -> Event:
            self.pattern = [6.0 if self.records >= self.after else 2.0]
            return super().record(timing=timing)

    found = measure(Clocked([2.0]), experts=True, seconds=1e9)
    for after in range(0, 200, 10):
        device = Slowing([2.0])
        device.after = after
        slow = measure(device, experts=True, seconds=1e9)
        assert slow.formats["Q8_0"].gather == pytest.approx(found.formats["Q8_0"].gather)
        assert (slow.launch, slow.formats["Q8_0"].layer) == (0.0, 0.0)


def test_experts_reach_a_share_of_the_speed_of_a_matrix() -> None:
    found = measure(Clocked([2.0]), experts=True).formats["Q8_0"]
    # Every product takes two seconds. The matrix has 112 features of 256 columns in float32, the four experts 16 each.
    features, experts = 112, 16
    touched = 4 * experts * (1 - 0.5**1)
    assert found.gather[1] == pytest.approx(touched / features)
    assert found.gather[16] == pytest.approx(max(4 * experts * (1 - 0.5**16), 2 * experts) / features)
    assert measure(Clocked([2.0])).formats["Q8_0"].gather == {}


def test_routing_is_measured_with_experts_alone() -> None:
    assert measure(Clocked([2.0]), experts=True).routing == 2.0
    assert measure(Clocked([2.0])).routing == 0.0


def test_attention_reads_keys_and_values() -> None:
    # 64 positions, 8 heads of 128 keys and values, 4 bytes each.
    assert measure(Clocked([2.0])).state_read == pytest.approx(64 * 8 * 128 * 2 * 4 / 2)


def test_rows_of_a_prompt_attend_to_those_before_them() -> None:
    # 32 heads of 128; row i of 64 sees i + 1 positions; two products, a multiply-add counts as two.
    assert measure(Clocked([2.0]), prompt=64).attention == pytest.approx(4 * 32 * 128 * (64 * 65 / 2) / 2)


def test_activations_are_read_and_written() -> None:
    # 32 rows of a gate, of what it scales, and of the result: 8192 float32 each.
    assert measure(Clocked([2.0])).elementwise == pytest.approx(3 * 32 * 8192 * 4 / 2)


def test_recurrences_are_measured_where_a_model_has_them() -> None:
    # 32 rows read and write 32 states of 128 x 128 and 3 inputs of q, k and v, in float32.
    moved = 2 * 32 * 32 * (128 * 128 + 3 * 3 * 128) * 4
    assert measure(Clocked([2.0]), recurrent=True).recurrence == pytest.approx(moved / 2)
    assert measure(Clocked([2.0])).recurrence is None
    # On the host also those of one row in three layers, with 16 states each.
    moved = 3 * 2 * 16 * (128 * 128 + 3 * 3 * 128) * 4
    assert measure(Clocked([2.0]), recurrent=True).recurrence_row == pytest.approx(moved / 2)
    assert measure(Clocked([2.0])).recurrence_row is None


def test_what_a_row_takes_in_layers_beside_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layers(Clocked):
        """Takes five seconds for layers, and one for all else."""

        def record(self, *, timing: bool = False) -> Event:
            found = super().record(timing=timing)
            self.pattern = [1.0]
            return found

    def layers(device: Device, weight: Any) -> tuple[Part, int]:
        part, count = layers_part(device, weight)
        assert isinstance(device, Clocked)

        def run() -> None:
            part.run()
            if isinstance(device, Layers):
                device.pattern = [5.0]

        return Part(run, part.amount), count

    monkeypatch.setattr(products, "layers_part", layers)
    # 112 features are one layer of four products of 28, which read as much as the matrix does in a second.
    found = measure(Layers([1.0]), rows=(1,)).formats["Q8_0"]
    assert found.layer == pytest.approx(4.0)
    # 1920 features are three layers of 512, of four fifths of the matrix.
    found = measure(Layers([1.0]), rows=(1,), matrix_bytes=1 << 19).formats["Q8_0"]
    assert found.layer == pytest.approx((5.0 - 3 * 512 / 1920) / 3)
    # Where the layers take no longer than the matrix, they take nothing beside.
    assert measure(Clocked([2.0])).formats["Q8_0"].layer == 0.0


def test_other_matrices_are_read_between_a_row_and_layers_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[tuple[str, int]]()

    def product(device: Device, x: Any, weight: Weight) -> Any:
        if len(x) == 1:
            read.append(("row", weight.parts[0].data.ctypes.data))
        return matmul(device, x, weight)

    def layers(device: Device, weight: Weight) -> tuple[Part, int]:
        part, count = layers_part(device, weight)

        def run() -> None:
            read.append(("layers", weight.parts[0].data.ctypes.data))
            part.run()

        return replace(part, run=run), count

    monkeypatch.setattr(products, "matmul", product)
    monkeypatch.setattr(products, "layers_part", layers)
    profile_device(Clocked([1.0]), [Q8_0, Q4_K], Measuring(small(rows=(1,), seconds=1e9)))
    (_, first), (_, second) = read[-2:]
    assert read[-28:] == 7 * [("row", first), ("row", second), ("layers", first), ("layers", second)]
    assert first != second


def test_each_figure_is_told_before_it_is_measured() -> None:
    told: list[str] = []
    profile_device(Clocked([1.0]), [Q8_0], Measuring(small(), experts=True, on_figure=told.append))
    expected = ["kernels", "launches", "copies", "attention", "Q8_0, 1 row", "Q8_0, 16 rows"]
    expected += ["Q8_0, 32 rows", "Q8_0, experts", "Q8_0, layers", "all in turn"]
    assert told == [f"cpu:0: {figure}" for figure in expected]


def test_devices_of_the_host_have_no_link_of_their_own() -> None:
    assert peer_link(HostDevice(), HostDevice(1), small()) is None


@pytest.mark.emulated
@pytest.mark.parametrize("type", [Q8_0, Q4_K])
def test_an_emulated_gpu_is_measured(type: GGMLQuantizationType, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    launch = EmulatedDevice.launch

    def watched(self: EmulatedDevice, source: str, kernel: str, *args: Any, **options: Any) -> None:
        seen.append(source)
        launch(self, source, kernel, *args, **options)

    monkeypatch.setattr(EmulatedDevice, "launch", watched)
    device = EmulatedDevice()
    experts = ExpertSizes(4, 2, 1 << 12, (1, 32))
    sizes = small(matrix_bytes=1 << 13, features=32, rows=(1, 32), launches=4, experts=experts, recurrent_heads=1)
    try:
        profile = profile_device(device, [type], Measuring(sizes, experts=True, recurrent=True))
    finally:
        device.close()
    found = profile.formats[type.name]
    values = [
        found.read,
        *found.rates.values(),
        *found.gather.values(),
        profile.state_read,
        profile.attention,
        profile.elementwise,
        profile.recurrence,
        *vars(profile.way).values(),
    ]
    # Of one row a GPU has launches.
    assert (found.layer, profile.recurrence_row) == (0.0, None)
    assert np.isfinite(values).all()
    assert min(values) > 0
    # Its own kernels: a product of many rows from unpacked weights is one of them.
    assert {"norm", "attention_mma", "dequant", "moe_matmul"} <= set(seen)


@pytest.mark.emulated
def test_an_emulated_gpu_is_measured_in_int8_on_request() -> None:
    sizes = small(matrix_bytes=1 << 13, rows=(1, 160))
    device = EmulatedDevice()
    try:
        found = profile_device(device, [Q8_0], Measuring(sizes, int8=True)).formats["Q8_0"]
        plain = profile_device(device, [Q8_0], Measuring(sizes)).formats["Q8_0"]
    finally:
        device.close()
    # Products of one row are the same in both.
    assert list(found.int8) == [160]
    assert found.int8_unpack is not None
    assert min(found.int8[160], found.int8_unpack) > 0
    assert (plain.int8, plain.int8_unpack) == ({}, None)


def test_the_cpu_has_no_products_in_int8_to_measure() -> None:
    found = profile_device(Clocked([2.0]), [Q8_0], Measuring(small(), int8=True)).formats["Q8_0"]
    assert (found.int8, found.int8_unpack) == ({}, None)


def test_a_failure_names_the_device_and_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (DeviceError("it is gone"), OutOfMemoryError("no room")):
        calls: list[int] = []

        def failing(device: Device, x: Any, weight: Any, error: DeviceError = error, calls: list[int] = calls) -> Any:
            calls.append(len(x))
            # The first one compiles.
            if calls.count(16) > 1:
                raise error
            return matmul(device, x, weight)

        monkeypatch.setattr(products, "matmul", failing)
        with pytest.raises(DeviceError, match=f"cpu:0: Q8_0, 16 rows: {error}") as caught:
            measure(Clocked([1.0]))
        # Nothing is known of what fits: it is no error of a model.
        assert caught.value.exit_code == 4
