#!/usr/bin/env python3
"""Speed of the kernels on a GPU, each beside the rate at which the same GPU copies memory.

    tools/bench_kernels.py                    every case
    tools/bench_kernels.py matvec --json      one family, for another program

A case is one op on one shape, as the models call it, with copies of its data that together are larger than the
second-level cache. Its calls go round the copies in a captured graph, so that launches from Python do not count; what
is left of a launch, about 1 us, does. Times are medians of `--repeat` graphs, by device events. The share is the bytes
that the op must move at least, divided by its time and by the bytes per second of a device copy (read and written).

A family is a generator of cases below, under `@family`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from rich.console import Console
from rich.table import Table

from luce.ops.deltanet import RECURRENT_ROWS, DeltaWeights, gated_delta_net
from luce.ops.matmul import matmul
from luce.ops.norm import add_rms_norm
from luce.ops.sample import argmax
from luce.ops.weight import Weight, WeightPart
from luce.runtime.device import Array, Device
from luce.runtime.gpu import GpuDevice
from luce.runtime.open import found
from luce.runtime.step import SpanArrays

# Larger than any second-level cache so far (50 MB on H100, 126 MB on B200, 256 MB on MI300).
_COLD = 512 << 20
_MOST_COPIES = 64
_MIN_SECONDS = 2e-3


@dataclass(frozen=True)
class Case:
    """`calls` do the same work on different copies of the data; one moves at least `nbytes` and does `flops`."""

    name: str
    calls: list[Callable[[], object]]
    nbytes: int
    flops: int = 0


Family = Callable[[Device], Iterator[Case]]
FAMILIES: dict[str, Family] = {}


def family(make: Family) -> Family:
    """Register a generator of cases under its name."""
    FAMILIES[make.__name__] = make
    return make


def copies(nbytes: int) -> int:
    """How many copies of `nbytes` leave nothing of the first in a cache when the last was used."""
    return min(_MOST_COPIES, max(2, -(-_COLD // nbytes)))


def random_blocks(device: Device, rows: int, cols: int, type: GGMLQuantizationType, rng: np.random.Generator) -> Array:
    """uint8 [rows, row bytes] of a format: any bits, with scales that stay finite (their high bytes are those of
    halves below 2^-5)."""
    elements, size = gguf.GGML_QUANT_SIZES[type]
    data = rng.integers(0, 256, (rows, cols // elements, size), np.uint8)
    for at in _SCALES.get(type.name, ()):
        data[:, :, at + 1] &= 0x1F
    if type.name in ("F32", "F16", "BF16"):
        data[:, :, elements_high(type)] = 0x3C
    return device.upload(data.reshape(rows, -1))


#: byte offsets of the half-precision fields of a block
_SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip


def elements_high(type: GGMLQuantizationType) -> int:
    """Offset of the byte with sign and exponent of an element of a plain format."""
    return 3 if type.name == "F32" else 1


def normal(device: Device, *shape: int) -> Array:
    """float32 activations."""
    return device.upload(np.random.default_rng(len(shape)).standard_normal(shape, np.float32))


@family
def matvec(device: Device) -> Iterator[Case]:
    """Products of few rows: the matrices of qwen35 27B and of the dense parts of qwen35moe 35B-A3B."""
    rng = np.random.default_rng(0)
    shapes = (
        ("Q4_K", 34816, 5120), ("Q4_K", 5120, 17408), ("Q6_K", 5120, 17408), ("Q5_K", 10240, 5120),
        ("Q4_K", 6144, 5120), ("Q4_K", 5120, 6144), ("Q6_K", 248320, 5120), ("Q8_0", 34816, 5120),
        ("Q4_0", 34816, 5120), ("Q5_K", 8192, 2048), ("Q4_K", 2048, 4096), ("F32", 257, 2048),
    )  # fmt: skip
    for name, rows, cols in shapes:
        type = GGMLQuantizationType[name]
        first = random_blocks(device, rows, cols, type, rng)
        size = int(first.nbytes)
        weights = [Weight(rows, cols, (WeightPart(first, type, 0, rows),))]
        weights += [Weight(rows, cols, (WeightPart(first.copy(), type, 0, rows),)) for _ in range(copies(size) - 1)]
        for n in (1, 2, 4, 8, 16):
            x = normal(device, n, cols)
            calls = [lambda w=w, x=x: matmul(device, x, w) for w in weights]
            yield Case(f"matmul {name} {rows}x{cols} n={n}", calls, size + 4 * n * (rows + cols), 2 * n * rows * cols)


@family
def deltanet(device: Device) -> Iterator[Case]:
    """Gated DeltaNet between its products: the layers of qwen35 27B (48 value heads) and of qwen35moe 35B-A3B (32)."""
    key_heads, d, taps = 16, 128, 4
    for heads in (48, 32):
        channels = (2 * key_heads + heads) * d
        vectors = (normal(device, size) for size in (heads, heads, d))
        weights = DeltaWeights(normal(device, channels, taps), -abs(next(vectors)), *vectors, 1e-6, key_heads)
        for spans, rows in ((1, 1), (1, 4), (1, 16), (16, 1), (64, 1), (1, 512), (1, 2048), (1, 8192)):
            x = normal(device, spans * rows, channels + heads * (d + 2))
            table = np.array([(slot, slot * rows, rows, 1) for slot in range(spans)], np.int32)
            row_span = np.repeat(np.arange(spans, dtype=np.int32), rows)
            step = SpanArrays(device.upload(table), device.upload(row_span), spans, rows)
            size = 8 * spans * heads * d * (d + 3 * (taps - 1))
            memory, past = normal(device, spans, heads, d, d), normal(device, spans, heads, taps - 1, 3, d)
            calls = [
                partial(gated_delta_net, device, x, weights, memory.copy(), past.copy(), step)
                for _ in range(copies(size + x.nbytes))
            ]
            # Three products with the state per row, and one each with the chunk's rows and with their inverse.
            flops = 2 * spans * rows * heads * d * (3 * d + 2 * 64) if rows > RECURRENT_ROWS else 0
            moved = size + x.nbytes + 4 * spans * rows * heads * d
            yield Case(f"{heads} heads, {spans} x {rows} rows", calls, moved, flops)


@family
def rows(device: Device) -> Iterator[Case]:
    """What goes over whole rows between the products: norms, and the choice of a token."""
    for n, d in ((1, 5120), (16, 5120), (2048, 5120), (1, 2048), (2048, 2048)):
        weight = normal(device, d)
        pairs = [(normal(device, n, d), normal(device, n, d)) for _ in range(copies(8 * n * d))]
        calls = [partial(add_rms_norm, device, x, y, weight, 1e-6) for x, y in pairs]
        yield Case(f"add_rms_norm {n} x {d}", calls, 16 * n * d)
    for n in (1, 16):
        logits = [normal(device, n, 248320) for _ in range(copies(4 * n * 248320))]
        yield Case(f"argmax {n} x 248320", [partial(argmax, device, x) for x in logits], 4 * n * 248320)


@dataclass(frozen=True)
class Timer:
    """Times work on a device's stream."""

    device: GpuDevice
    repeat: int

    def seconds(self, calls: list[Callable[[], object]]) -> float:
        """Median seconds of one call, from graphs of enough calls to fill a few milliseconds."""
        import cupy

        device = self.device
        for call in calls:
            call()
        device.synchronize()
        stream = cupy.cuda.ExternalStream(device.stream)
        rounds = 1
        while True:
            with stream:
                stream.begin_capture()
                for _ in range(rounds):
                    for call in calls:
                        call()
                graph = stream.end_capture()
            times = [self._once(stream, graph) for _ in range(self.repeat + 1)][1:]
            if statistics.median(times) >= _MIN_SECONDS or rounds >= 64:
                return statistics.median(times) / (rounds * len(calls))
            rounds *= 4

    def _once(self, stream: Any, graph: Any) -> float:
        import cupy

        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3


def copy_rate(device: GpuDevice, timer: Timer) -> float:
    """Bytes per second of a device copy, read and written."""
    size = 1 << 30
    source, target = device.zeros(size, np.uint8), device.empty(size, np.uint8)
    return 2 * size / timer.seconds([lambda: target.data.copy_from_device_async(source.data, size)])


def main(arguments: list[str] | None = None) -> int:
    """Print a table, or JSON; 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", help=f"of {', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--repeat", type=int, default=15, help="graphs per case (default: 15)")
    parser.add_argument("--json", action="store_true", help="one object with every case")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.family if name not in FAMILIES]
    if unknown:
        parser.error(f"no family {unknown[0]!r}: there are {', '.join(FAMILIES)}")
    gpus = found()
    if not gpus or gpus[0].name.kind == "cpu":
        print("bench_kernels: no CUDA or HIP device on this machine", file=sys.stderr)
        return 2
    device = GpuDevice(gpus[0].name.kind, gpus[0].name.index)
    timer = Timer(device, options.repeat)
    rate = copy_rate(device, timer)
    results = []
    for name in options.family or FAMILIES:
        for case in FAMILIES[name](device):
            if options.only not in case.name:
                continue
            seconds = timer.seconds(case.calls)
            results.append({
                "family": name, "case": case.name, "us": seconds * 1e6, "bytes_per_s": case.nbytes / seconds,
                "share_of_copy": case.nbytes / seconds / rate, "flops_per_s": case.flops / seconds,
            })  # fmt: skip
    if options.json:
        print(json.dumps({"device": device.describe()["name"], "copy_bytes_per_s": rate, "cases": results}))
        return 0
    table = Table("case", "us", "GB/s", f"of copy ({rate / 1e12:.2f} TB/s)", "TFLOP/s")
    for column in table.columns[1:]:
        column.justify = "right"
    for r in results:
        numbers = (f"{r['us']:.1f}", f"{r['bytes_per_s'] / 1e9:.0f}", f"{r['share_of_copy']:.0%}")
        table.add_row(r["case"], *numbers, f"{r['flops_per_s'] / 1e12:.1f}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
