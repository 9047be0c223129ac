"""Measures the figures of a device in bounded time: medians of products, launches and copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from gguf import GGMLQuantizationType

from luce.errors import DeviceError
from luce.profiles.layer_parts import (
    ROW_HEADS,
    Part,
    attention_part,
    elementwise_part,
    recurrence_part,
    routing_part,
    small_kernel,
)
from luce.profiles.products import Products
from luce.profiles.profile import DeviceProfile, LinkProfile
from luce.profiles.timer import GPU_PROFILE, Measuring, ProfileSizes, Timed, Timer, median_of, replayed
from luce.runtime.device import Device

#: bytes of the row of hidden states that goes to the device and back
_ROW = 4 * 5120


def profile_device(device: Device, types: Iterable[GGMLQuantizationType], how: Measuring) -> DeviceProfile:
    """Measure a device of this process for weights of these types.

    Medians of 7 runs, of 3 where 7 take too long or the time is over; on a CPU of 14 where 7 disagree and the time
    allows. A matrix whose products take too long is cut, so a profile of three types takes 2 s on a GPU and 4 s on a
    CPU, and a few more on a slow one, with compiled kernels.
    Raises DeviceError naming the device and the figure that failed.
    """
    timer = Timer(device, how)
    try:
        return _measure(timer, types)
    except DeviceError as error:
        # A device without room for a matrix is not measured: nothing is known of what fits.
        raise DeviceError(f"{timer.figure}: {error}") from error


def _measure(timer: Timer, types: Iterable[GGMLQuantizationType]) -> DeviceProfile:
    device, how = timer.device, timer.how
    products = {type.name: Products(timer, type) for type in types}
    timer.tell("kernels")
    parts = _parts(timer)
    device.warm_up(lambda: _launch_all(timer, list(products.values()), list(parts.values())))
    timer.tell("launches")
    launches = _launch(timer)
    timer.tell("copies")
    way = _host_link(timer)
    timer.tell("attention")
    timed = {name: (part.amount, timer.runs(part.run, again=part.again)) for name, part in parts.items()}
    # On a GPU their arrays make room for the matrices.
    parts.clear()
    routing = _routing(timer) if how.experts and device.host else None
    for product in products.values():
        product.measure()
    for product in products.values():
        product.measure_layers()
    timer.finish()
    launch, step = launches()
    rates = {name: amount / own.median for name, (amount, own) in timed.items()}
    formats = {name: product.profile() for name, product in products.items()}
    name = str(device.describe()["name"])
    return DeviceProfile(
        str(device.name),
        name,
        time.time(),
        step,
        launch,
        way(),
        formats,
        state_read=rates["state_read"],
        attention=rates["attention"],
        elementwise=rates["elementwise"],
        recurrence=rates.get("recurrence"),
        recurrence_row=rates.get("recurrence_row"),
        routing=0.0 if routing is None else routing.median,
    )


def _launch_all(timer: Timer, products: Sequence[Products], parts: Sequence[Part]) -> None:
    """Launch all kernels, for `Device.warm_up`."""
    for part in (small_kernel(timer.device), *parts):
        part.run()
    for product in products:
        product.launch()


def _parts(timer: Timer) -> dict[str, Part]:
    """What a layer computes beside its products, by the figure that it gives."""
    device, sizes, how = timer.device, timer.sizes, timer.how
    parts = {
        "state_read": attention_part(device, 1, sizes.positions),
        "attention": attention_part(device, sizes.prompt, sizes.prompt),
        "elementwise": elementwise_part(device, sizes.prompt),
    }
    if how.recurrent:
        parts["recurrence"] = recurrence_part(device, sizes.prompt, sizes.recurrent_heads)
        if device.host:
            row = recurrence_part(device, 1, ROW_HEADS, sizes.recurrent_layers)
            parts["recurrence_row"] = replace(row, run=replayed(device, row.run))
    return parts


def _routing(timer: Timer) -> Timed:
    """Choosing a row's experts and adding their results."""
    sizes = timer.sizes.experts
    return timer.runs(routing_part(timer.device, sizes.count, sizes.used).run)


def _launch(timer: Timer) -> Callable[[], tuple[float, float]]:
    """Seconds of one of many small kernels, and of a step of one kernel on the host's clock."""
    device, launches = timer.device, timer.sizes.launches
    kernel = small_kernel(device).run

    def work(count: int) -> Callable[[], object]:
        def queue() -> None:
            for _ in range(count):
                kernel()

        return replayed(device, queue)

    def step() -> float:
        start = time.perf_counter()
        one()
        device.record().wait()
        return time.perf_counter() - start

    many = timer.runs(work(launches))
    # A graph is valid until the next one is captured.
    one = work(1)
    alone, stepped = timer.runs(one), timer.repeated(step)

    def figures() -> tuple[float, float]:
        launch = max(median_of(lambda many, alone: many - alone, many, alone), 0.0) / (launches - 1)
        return launch, max(stepped.median - launch, 0.0)

    return figures


def _host_link(timer: Timer) -> Callable[[], LinkProfile]:
    """Copies between the device and pinned host memory, through which activations pass."""
    device, stream = timer.device, timer.device.copy_stream()

    def there_and_back(size: int) -> Callable[[], float]:
        memory, array = device.pinned(size), device.zeros(size, np.uint8)
        memory[...] = 0
        device.synchronize()

        def once() -> float:
            start = time.perf_counter()
            stream.copy(array, memory)
            stream.copy(memory, array)
            stream.record().wait()
            return (time.perf_counter() - start) / 2

        return once

    return _link(timer, there_and_back)


def peer_link(before: Device, behind: Device, sizes: ProfileSizes = GPU_PROFILE) -> LinkProfile | None:
    """Copies from one GPU of this process to another one; None if they do not reach each other."""
    if before.host or behind.host or not before.reaches(behind):
        return None
    stream = behind.copy_stream()

    def there(size: int) -> Callable[[], float]:
        source, target = before.zeros(size, np.uint8), behind.zeros(size, np.uint8)
        before.synchronize()
        behind.synchronize()

        def once() -> float:
            start = time.perf_counter()
            stream.copy(target, source)
            stream.record().wait()
            return time.perf_counter() - start

        return once

    return _link(Timer(behind, Measuring(sizes)), there)()


def peer_links(devices: Sequence[Device]) -> dict[tuple[int, int], LinkProfile]:
    """Links between GPUs of this process that reach each other, by their places in `devices`. Measured in milliseconds
    each."""
    found = {}
    for before, first in enumerate(devices):
        for behind, second in enumerate(devices):
            link = None if before == behind else peer_link(first, second)
            if link is not None:
                found[before, behind] = link
    return found


def _link(timer: Timer, copy: Callable[[int], Callable[[], float]]) -> Callable[[], LinkProfile]:
    """The figures of a way from the seconds of copies of so many bytes."""
    row, large = timer.repeated(copy(_ROW)), timer.repeated(copy(timer.sizes.copied))

    def figures() -> LinkProfile:
        seconds = median_of(lambda row, large: large - row, row, large)
        return LinkProfile(row.median, timer.sizes.copied / max(seconds, 1e-9))

    return figures
