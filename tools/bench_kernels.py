#!/usr/bin/env python3
"""Speed of the kernels on a GPU, relative to the rate at which the same GPU reads memory.

    tools/bench_kernels.py                    every case
    tools/bench_kernels.py matvec --json      one family, for another program

A case is one op on one shape, as the models call it, with copies of its data that together are larger than the
second-level cache. A captured graph holds its calls, each on another copy, so that launches from Python do not count;
the rest of a launch, about 1 us, does. Calls of a BLAS library are not captured but queued one by one. Times are
medians of `--repeat` graphs, by device events. The share is the least bytes that the op has to move, divided by its
time and by the bytes per second of a kernel that only reads.

A family is a generator of cases below, under `@family`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from rich.console import Console
from rich.table import Table

from luce.bench.limits import limits
from luce.ops.attention import attention
from luce.ops.attention_mma import AttentionInputs
from luce.ops.block_sparse import BlockSparse
from luce.ops.deltanet import RECURRENT_ROWS, DeltaWeights, RecurrentState, gated_delta_net
from luce.ops.matmul import FEW_ROWS, matmul
from luce.ops.matmul_prefill import BLAS_ROWS
from luce.ops.moe import RoutingOptions, expert_matmul, route
from luce.ops.moe_int8 import ExpertWeights, expert_mlp
from luce.ops.moe_rows import expert_mlp_rows
from luce.ops.norm import add_rms_norm
from luce.ops.quantise import SECTION, quantise
from luce.ops.sample import argmax
from luce.ops.weight import Weight, WeightPart
from luce.runtime.device import Array, Device
from luce.runtime.found import found
from luce.runtime.gpu import GpuDevice
from luce.runtime.step import PAGE, PageView, SpanArrays

# Larger than any second-level cache so far (50 MB on H100, 126 MB on B200, 256 MB on MI300).
_COLD = 512 << 20
_MOST_COPIES = 64
_MIN_SECONDS = 2e-3


@dataclass(frozen=True)
class Case:
    """One op on one shape."""

    name: str
    #: the same work on different copies of the data
    calls: Sequence[Callable[[], object]]
    #: least bytes that a call has to move
    nbytes: int
    #: floating-point operations of a call
    flops: int = 0
    #: whether a graph can hold the calls
    captured: bool = True


Family = Callable[[Device], Iterator[Case]]
FAMILIES: dict[str, Family] = {}


def family(make: Family) -> Family:
    """Register a generator of cases under its name."""
    FAMILIES[make.__name__] = make
    return make


def copies(nbytes: int) -> int:
    """The number of copies of `nbytes` that push the first out of the caches."""
    return min(_MOST_COPIES, max(2, -(-_COLD // nbytes)))


def random_blocks(device: Device, rows: int, cols: int, type: GGMLQuantizationType, rng: np.random.Generator) -> Array:
    """uint8 [rows, row bytes] of a type: random bits, with finite scales (fp16 numbers below 2^-5)."""
    elements, size = gguf.GGML_QUANT_SIZES[type]
    data = rng.integers(0, 256, (rows, cols // elements, size), np.uint8)
    for at in _SCALES.get(type.name, ()):
        data[:, :, at + 1] &= 0x1F
    if type.name == "MXFP4":
        data[:, :, 0] = 120
    if type.name in ("F32", "F16", "BF16"):
        data[:, :, elements_high(type)] = 0x3C
    return device.upload(data.reshape(rows, -1))


#: byte offsets of the fp16 fields of a quant block
_SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "IQ1_S": (0,), "IQ2_XXS": (0,),
    "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
}  # fmt: skip


def elements_high(type: GGMLQuantizationType) -> int:
    """Offset of the byte with sign and exponent in an element of a plain type."""
    return 3 if type.name == "F32" else 1


def normal(device: Device, *shape: int) -> Array:
    """float32 activations."""
    return device.upload(np.random.default_rng(len(shape)).standard_normal(shape, np.float32))


@family
def matvec(device: Device) -> Iterator[Case]:
    """Products of few rows: the matrices of qwen35 27B and of the dense parts of qwen35moe 35B-A3B."""
    shapes = (
        ("Q4_K", 34816, 5120), ("Q4_K", 5120, 17408), ("Q6_K", 5120, 17408), ("Q5_K", 10240, 5120),
        ("Q4_K", 6144, 5120), ("Q4_K", 5120, 6144), ("Q6_K", 248320, 5120), ("Q8_0", 34816, 5120),
        ("Q4_0", 34816, 5120), ("Q5_K", 8192, 2048), ("Q4_K", 2048, 4096), ("F32", 257, 2048),
        ("IQ2_XXS", 34816, 5120), ("IQ2_S", 34816, 5120), ("IQ3_XXS", 34816, 5120), ("IQ3_S", 34816, 5120),
    )  # fmt: skip
    for name, rows, cols in shapes:
        weights = random_weights(device, name, rows, cols)
        for n in (1, 2, 4, 8, 16):
            x = normal(device, n, cols)
            calls = [partial(matmul, device, x, weight) for weight in weights]
            moved = weights[0].nbytes + 4 * n * (rows + cols)
            yield Case(f"matmul {name} {rows}x{cols} n={n}", calls, moved, 2 * n * rows * cols)


@family
def experts_few(device: Device) -> Iterator[Case]:
    """Experts of few rows and of many sequences, shared one included: shapes of qwen35moe 35B-A3B."""
    rng, type = np.random.default_rng(0), GGMLQuantizationType.Q4_K
    count, used, hidden, inner = 256, 8, 2048, 512
    for down in (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K):
        gates, ups = (random_blocks(device, count * inner, hidden, type, rng) for _ in range(2))
        downs = WeightPart(random_blocks(device, count * hidden, inner, down, rng), down, 0, count * hidden)
        chosen = ExpertWeights(count, gates, ups, inner, inner, type, hidden, downs)
        own = WeightPart(downs.data[:hidden], down, 0, hidden)
        shared = ExpertWeights(1, gates[:inner], ups[:inner], inner, inner, type, hidden, own)
        one = 2 * int(gates[:inner].nbytes) + int(own.data.nbytes)
        for n in (1, 4, 16, 64):
            x = normal(device, n, hidden)
            if n <= FEW_ROWS:
                multiply = partial(expert_mlp, device, quantise(device, x, SECTION))
            else:
                multiply = partial(expert_mlp_rows, device, x)
            weight, gate = normal(device, n, used), normal(device, n, 1)
            # Other experts in each call: together they exceed every cache.
            picks = [np.stack([rng.permutation(count)[:used] for _ in range(n)]) for _ in range(16)]
            ids = [device.upload(pick.astype(np.int32)) for pick in picks]
            calls = [partial(multiply, i, weight, chosen, "silu", shared, gate) for i in ids]
            read = int(np.mean([len(np.unique(pick)) for pick in picks])) + 1
            yield Case(f"experts Q4_K {down.name} n={n}", calls, read * one, 6 * n * (used + 1) * hidden * inner)


@family
def deltanet(device: Device) -> Iterator[Case]:
    """Gated DeltaNet between its products: the layers of qwen35 27B (48 value heads) and of qwen35moe 35B-A3B (32)."""
    key_heads, d, taps = 16, 128, 4
    for heads in (48, 32):
        channels = (2 * key_heads + heads) * d
        decay, dt_bias, norm = (normal(device, size) for size in (heads, heads, d))
        weights = DeltaWeights(normal(device, channels, taps), -abs(decay), dt_bias, norm, 1e-6, key_heads)
        plain = [(spans, rows, 0) for spans, rows in ((1, 1), (1, 4), (1, 16), (16, 1), (64, 1))]
        # Rows accepted of the speculative span before.
        verify = [(1, 4, 4), (1, 16, 1), (1, 16, 8), (1, 16, 16)]
        for spans, rows, accepted in (*plain, *verify, (1, 512, 0), (1, 2048, 0), (1, 8192, 0)):
            x = normal(device, spans * rows, channels + heads * (d + 2))
            table = np.array([(slot, slot * rows, rows, 1) for slot in range(spans)], np.int32)
            row_span = np.repeat(np.arange(spans, dtype=np.int32), rows)
            pending = device.upload(np.array([[accepted, 1]] * spans, np.int32)) if accepted else None
            step = SpanArrays(device.upload(table), device.upload(row_span), spans, rows, pending)
            size = 8 * spans * heads * d * (d + 3 * (taps - 1))
            memory, past = normal(device, spans, heads, d, d), normal(device, spans, heads, taps - 1, 3, d)
            drafted = normal(device, spans, heads, RECURRENT_ROWS, 5, d), normal(device, spans, heads, RECURRENT_ROWS)
            calls = [
                partial(gated_delta_net, device, x, weights, RecurrentState(memory.copy(), past.copy(), *drafted), step)
                for _ in range(copies(size + x.nbytes))
            ]
            # Three products with the state per row, and one each with the chunk's rows and with their inverse.
            flops = 2 * spans * rows * heads * d * (3 * d + 2 * 64) if rows > RECURRENT_ROWS else 0
            moved = size + x.nbytes + 4 * spans * rows * heads * d
            accepting = f" after {accepted} accepted" if accepted else ""
            yield Case(f"{heads} heads, {spans} x {rows} rows{accepting}", calls, moved, flops)


@family
def attend(device: Device) -> Iterator[Case]:
    """Attention over f16 pages: layers of qwen35 27B, of qwen35moe 35B-A3B and of an 8B Llama."""
    rng = np.random.default_rng(0)
    for heads, kv_heads, d in ((24, 4, 256), (16, 2, 256), (32, 8, 128)):
        for spans, rows, past in (
            (1, 1, 600), (1, 1, 4096), (1, 1, 32767), (1, 16, 32752), (16, 1, 4096), (64, 1, 600),
            (1, 512, 0), (1, 2048, 0), (1, 2048, 8192), (1, 2048, 32768),
        ):  # fmt: skip
            count = (past + rows - 1) // PAGE + 1
            table = rng.permutation(spans * count).astype(np.int32).reshape(spans, count)
            first = np.tile(np.arange(count, dtype=np.int32) * PAGE, (spans, 1))
            places = np.array([(slot, slot * rows, rows, past) for slot in range(spans)], np.int32)
            positions = np.tile(np.arange(past, past + rows, dtype=np.int32), spans)
            up = device.upload
            step = SpanArrays(up(places), up(np.repeat(np.arange(spans, dtype=np.int32), rows)), spans, rows)
            view = PageView(up(table), up(first), up(np.full(spans, count, np.int32)), up(positions))
            q, at = normal(device, spans * rows, heads, d), up(positions)
            pool = up(rng.standard_normal((spans * count * PAGE, kv_heads, d), np.float32).astype(np.float16))
            calls = [
                partial(attention, device, AttentionInputs(q, pool.copy(), pool.copy(), step, view, at, d**-0.5, None))
                for _ in range(copies(2 * pool.nbytes))
            ]
            seen = spans * rows * (2 * past + rows + 1) // 2
            nbytes = 4 * spans * (past + rows) * kv_heads * d + 2 * q.nbytes
            yield Case(f"{heads}/{kv_heads} x {d}, {spans} x {rows} at {past}", calls, nbytes, 4 * seen * heads * d)


@family
def block_sparse(device: Device) -> Iterator[Case]:
    """A layer of a 0.6B model at the end of a long text: attention over all keys, and over some blocks."""
    heads, kv_heads, d, rows = 16, 8, 128, 2048
    for length in (32768, 131072):
        past, pages = length - 2 * rows, length // PAGE
        table = np.arange(pages, dtype=np.int32)[None]
        places = np.array([(0, 0, rows, past)], np.int32)
        up = device.upload
        step = SpanArrays(up(places), up(np.zeros(rows, np.int32)), 1, rows)
        count = up(np.array([(past + rows) // PAGE], np.int32))
        at = up(np.arange(past, past + rows, dtype=np.int32))
        view = PageView(up(table), up(table * PAGE), count, at)
        q, pool = normal(device, rows, heads, d), normal(device, pages * PAGE, kv_heads, d).astype(np.float16)
        inputs = AttentionInputs(q, pool, pool.copy(), step, view, at, d**-0.5, None)
        nbytes, flops = 4 * (past + rows) * kv_heads * d + 2 * q.nbytes, 4 * rows * (past + rows // 2) * heads * d
        yield Case(f"{length} tokens, all blocks", [partial(attention, device, inputs)], nbytes, flops)
        # Random queries and keys: blocks have equal scores, so alpha 1 leaves those that are always read.
        for alpha in (1.0, 1e-9):
            text = BlockSparse(device, alpha, length)
            for begin in range(0, past, rows):
                text.step(begin, rows)(inputs)
            yield Case(
                f"{length} tokens, alpha {alpha:g}",
                [partial(text.step(past, rows), inputs)],
                nbytes,
                flops,
                captured=False,
            )


@family
def rows(device: Device) -> Iterator[Case]:
    """Ops on whole rows between the products: norms, and the choice of a token."""
    for n, d in ((1, 5120), (16, 5120), (2048, 5120), (1, 2048), (2048, 2048)):
        weight = normal(device, d)
        pairs = [(normal(device, n, d), normal(device, n, d)) for _ in range(copies(8 * n * d))]
        calls = [partial(add_rms_norm, device, x, y, weight, 1e-6) for x, y in pairs]
        yield Case(f"add_rms_norm {n} x {d}", calls, 16 * n * d)
    for n in (1, 16):
        logits = [normal(device, n, 248320) for _ in range(copies(4 * n * 248320))]
        yield Case(f"argmax {n} x 248320", [partial(argmax, device, x) for x in logits], 4 * n * 248320)


def random_weights(device: Device, name: str, rows: int, cols: int) -> list[Weight]:
    """Copies of a matrix."""
    type = GGMLQuantizationType[name]
    first = random_blocks(device, rows, cols, type, np.random.default_rng(0))
    count = copies(int(first.nbytes)) if first.nbytes < _COLD else 1
    matrices = [first, *(first.copy() for _ in range(count - 1))]
    return [Weight(rows, cols, (WeightPart(data, type, 0, rows),)) for data in matrices]


@family
def matmul_prefill(device: Device) -> Iterator[Case]:
    """Products of many rows: matrices of qwen35 27B."""
    for name, rows, cols in (("Q4_K", 34816, 5120), ("Q4_K", 5120, 17408), ("Q6_K", 5120, 17408), ("Q8_0", 5120, 6144)):
        weights = random_weights(device, name, rows, cols)
        for n in (17, 32, 64, 128, 256, 512, 2048):
            x = normal(device, n, cols)
            calls = [partial(matmul, device, x, weight) for weight in weights]
            moved = weights[0].nbytes + 4 * n * (rows + cols)
            captured = n < BLAS_ROWS or not device.blas
            yield Case(f"{name} {rows}x{cols} n={n}", calls, moved, 2 * n * rows * cols, captured)


@family
def experts(device: Device) -> Iterator[Case]:
    """Products of many rows with 8 of 256 experts: qwen35moe 35B-A3B."""
    count, k = 256, 8
    for name, rows, cols, shared in (("Q4_K", 512, 2048, True), ("Q4_K", 2048, 512, False), ("Q6_K", 2048, 512, False)):
        weights = random_weights(device, name, count * rows, cols)
        for n in (32, 512, 2048, 8192):
            x = normal(device, n, cols) if shared else normal(device, n, k, cols)
            logits = normal(device, n, count)
            routing = route(device, logits, RoutingOptions(k, "softmax"))
            calls = [partial(expert_matmul, device, x, weight, count, routing) for weight in weights]
            moved = weights[0].nbytes + int(x.nbytes) + 4 * n * k * rows
            yield Case(f"{name} {rows}x{cols} n={n}", calls, moved, 2 * n * k * rows * cols)


@dataclass(frozen=True)
class Timer:
    """Times work on a device's stream."""

    device: GpuDevice
    repeat: int

    def seconds(self, calls: Sequence[Callable[[], object]], *, captured: bool = True) -> float:
        """Median seconds of one call, from graphs of enough calls to fill a few milliseconds, or from queued calls."""
        import cupy

        device = self.device
        for call in calls:
            call()
        device.synchronize()
        stream = cupy.cuda.ExternalStream(device.stream)
        if not captured:
            every = [self._once(stream, lambda: [call() for call in calls]) for _ in range(self.repeat)]
            return statistics.median(every) / len(calls)
        rounds = 1
        while True:
            with stream:
                stream.begin_capture()
                for _ in range(rounds):
                    for call in calls:
                        call()
                graph = stream.end_capture()
            times = [self._once(stream, partial(graph.launch, stream)) for _ in range(self.repeat + 1)][1:]
            if statistics.median(times) >= _MIN_SECONDS or rounds >= 64:
                return statistics.median(times) / (rounds * len(calls))
            rounds *= 4

    def _once(self, stream: Any, work: Callable[[], object]) -> float:
        import cupy

        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3


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
    if not gpus or gpus[0].name.vendor is None:
        print("bench_kernels: no CUDA or HIP device on this machine", file=sys.stderr)
        return 2
    device = GpuDevice(gpus[0].name.vendor, gpus[0].name.index)
    timer = Timer(device, options.repeat)
    rate = limits(device, ()).read
    results: list[dict[str, Any]] = []
    for name in options.family or FAMILIES:
        for case in FAMILIES[name](device):
            if options.only not in case.name:
                continue
            seconds = timer.seconds(case.calls, captured=case.captured)
            results.append({
                "family": name, "case": case.name, "us": seconds * 1e6, "bytes_per_s": case.nbytes / seconds,
                "share_of_reads": case.nbytes / seconds / rate, "flops_per_s": case.flops / seconds,
            })  # fmt: skip
    if options.json:
        print(json.dumps({"device": device.describe()["name"], "read_bytes_per_s": rate, "cases": results}))
        return 0
    table = Table("case", "us", "GB/s", f"of reads ({rate / 1e12:.2f} TB/s)", "TFLOP/s")
    for column in table.columns[1:]:
        column.justify = "right"
    for r in results:
        numbers = (f"{r['us']:.1f}", f"{r['bytes_per_s'] / 1e9:.0f}", f"{r['share_of_reads']:.0%}")
        table.add_row(r["case"], *numbers, f"{r['flops_per_s'] / 1e12:.1f}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
