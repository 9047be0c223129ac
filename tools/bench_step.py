#!/usr/bin/env python3
"""Where the time of one step goes: launch by launch, on one GPU.

    tools/bench_step.py 27b.gguf
    tools/bench_step.py 27b.gguf --sequences 16 --trace step.json
    tools/bench_step.py 27b.gguf --prompt 2048

The step is a graph that the engine's own shard captured: one row of each of `--sequences` sequences, or the first
`--prompt` tokens of a prompt, which one GPU else queues launch by launch. It is replayed by itself between device
events. Four figures for each kind of launch (one kernel on one shape, or a product of the library):

    without    what a step takes less if these launches are missing from it (the others run on stale values): their
               cost with all overlaps
    alone      one launch in a graph of these launches only, one after another, each with its layer's weights
    traced     one launch from start to end as CUPTI sees it, if PyTorch is there; kernels that start early overlap
    gap        from the end of the launch before it to its start, traced; below 0 where it starts early

Bytes are those of the arrays that a launch gets, without pools of pages and the embedding. The share compares them, in
the time `alone`, with a kernel that only reads; a library's product has TFLOP/s instead. Medians of `--repeat` replays.
With experts, whose numbers a missing launch would leave open, only the trace is there. A prompt has no `without`: its
products take less power, and so less time, on the stale numbers that a missing launch leaves.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import operator
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from luce.assembly import serving_options
from luce.backend.layersplit import LayerSplitBackend
from luce.bench.limits import limits
from luce.bench.measure import Stepper
from luce.config.settings import Config
from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.runtime.device import Array
from luce.runtime.gpu import GpuDevice

# Replays before those that count, and greedy tokens that the report shows, to compare builds by.
_WARM, _TOKENS = 3, 8
# What the table calls a product of the library.
_GEMM = "gemm"


@dataclass(frozen=True)
class Launch:
    """One launch of a step."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    defines: str
    nbytes: int
    flops: int = 0

    @property
    def kind(self) -> tuple[str, str, tuple[int, ...], int]:
        """Launches of a kind do the same work on other data."""
        return self.kernel, self.defines, self.grid, self.nbytes


class Recorder:
    """Stands between a step's ops and the device: writes launches down, and drops those that are not wanted."""

    def __init__(self, device: GpuDevice) -> None:
        self._launch = device.launch
        self._capture = device.capture
        self._gemm = device.gemm
        self.launches: list[Launch] = []
        self.works: list[tuple[Callable[[], tuple[Array, ...]], list[Launch]]] = []
        self.wanted: Callable[[Any], bool] = lambda kind: True
        device.launch = self.launch  # type: ignore[method-assign]
        device.capture = self.capture  # type: ignore[method-assign]
        device.gemm = self.gemm  # type: ignore[method-assign]

    def launch(
        self,
        source: str,
        kernel: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        *,
        defines: Mapping[str, int | str] | None = None,
        shared: int = 0,
    ) -> None:
        """As GpuDevice.launch."""
        arrays = {arg.data.ptr: arg for arg in args if hasattr(getattr(arg, "data", None), "ptr")}
        nbytes = 0 if source == "embedding" else sum(int(a.nbytes) for a in arrays.values() if not _pool(a))
        words = " ".join(str(value) for value in (defines or {}).values())
        launch = Launch(kernel, tuple(grid), tuple(block), shared, words, nbytes)
        self.launches.append(launch)
        if self.wanted(launch.kind):
            self._launch(source, kernel, grid, block, args, defines=defines, shared=shared)

    def gemm(self, x: Array, weight: Array, out: Array) -> None:
        """As GpuDevice.gemm: a launch of `_GEMM`, with rows, features and columns for a grid."""
        (n, cols), rows = x.shape, weight.shape[0]
        nbytes = int(x.nbytes) + int(weight.nbytes) + int(out.nbytes)
        launch = Launch(_GEMM, (n, rows, cols), (), 0, str(weight.dtype), nbytes, 2 * n * rows * cols)
        self.launches.append(launch)
        if self.wanted(launch.kind):
            self._gemm(x, weight, out)

    def capture(self, work: Callable[[], tuple[Array, ...]]) -> tuple[Any, tuple[Array, ...]]:
        """As GpuDevice.capture; keeps the work, to capture it in part."""
        self.launches = []
        result = self._capture(work)
        self.works.append((work, self.launches))
        return result

    def part(self, work: Callable[[], tuple[Array, ...]], wanted: Callable[[Any], bool]) -> Any:
        """A graph of those launches of a captured step that are wanted."""
        self.wanted, self.launches = wanted, []
        try:
            graph, _ = self._capture(work)
        finally:
            self.wanted = lambda kind: True
        return graph


def _pool(array: Array) -> bool:
    """Whether an array is a pool of pages, of which a step reads a part."""
    return bool(array.ndim == 4 and array.dtype != np.float32)


def replayed(device: GpuDevice, graph: Any, repeat: int) -> float:
    """Median seconds of a replay, by device events."""
    import cupy

    stream = cupy.cuda.ExternalStream(device.stream)
    times = []
    for number in range(repeat + _WARM):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        graph.launch()
        end.record(stream)
        end.synchronize()
        if number >= _WARM:
            times.append(float(cupy.cuda.get_elapsed_time(start, end)) / 1000)
    return statistics.median(times)


def traced(device: GpuDevice, graph: Any) -> list[dict[str, Any]]:
    """The kernels of a replay as CUPTI sees them, in order: name, start and duration in us. Empty without PyTorch."""
    try:
        import torch
        from torch.profiler import ProfilerActivity, profile
    except ImportError:
        return []
    torch.cuda.init()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(2):
                graph.launch()
                device.synchronize()
        found.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") == "kernel"]
    events.sort(key=lambda e: e["ts"])
    # The second replay.
    return events[len(events) // 2 :]


def kinds(
    device: GpuDevice, recorder: Recorder, work: Any, launches: Sequence[Launch], repeat: int
) -> list[dict[str, Any]]:
    """The figures of each kind of launch, of those of a prompt without `without`."""
    routed = any(launch.kernel in ("route", "norm_route") for launch in launches)
    found: dict[Any, list[int]] = {}
    for number, launch in enumerate(launches):
        found.setdefault(launch.kind, []).append(number)
    lines = []
    whole = replayed(device, recorder.part(work, lambda kind: True), repeat)
    for kind, numbers in found.items():
        without = alone = None
        if not routed:
            if not any(launch.flops for launch in launches):
                without = whole - replayed(device, recorder.part(work, partial(operator.ne, kind)), repeat)
            alone = replayed(device, recorder.part(work, partial(operator.eq, kind)), repeat) / len(numbers)
        first = launches[numbers[0]]
        lines.append(
            {
                "kernel": first.kernel,
                "defines": first.defines,
                "grid": first.grid,
                "block": first.block,
                "shared": first.shared,
                "launches": len(numbers),
                "bytes": first.nbytes,
                "flops": first.flops,
                "without": without,
                "alone": alone,
                "numbers": numbers,
            }
        )
    return lines


def matched(events: Sequence[Mapping[str, Any]], launches: Sequence[Launch]) -> list[Sequence[Mapping[str, Any]]]:
    """The traced kernels of each launch: one, or as many as the library makes of a product. Empty if they differ."""
    found, at = list[Sequence[Mapping[str, Any]]](), 0
    for launch, following in zip(launches, [*launches[1:], None], strict=True):
        end = at + 1
        if launch.kernel == _GEMM and following is not None and following.kernel != _GEMM:
            while end < len(events) and following.kernel not in events[end]["name"]:
                end += 1
        elif at == len(events) or (launch.kernel != _GEMM and launch.kernel not in events[at]["name"]):
            return []
        found.append(events[at:end])
        at = end
    return found if at == len(events) else []


def add_trace(lines: list[dict[str, Any]], events: Sequence[Mapping[str, Any]], launches: Sequence[Launch]) -> bool:
    """Add the medians of traced times and gaps; False if the trace has other kernels than the step."""
    found = matched(events, launches)
    if not found:
        return False
    starts = [own[0]["ts"] for own in found]
    stops = [own[-1]["ts"] + own[-1]["dur"] for own in found]
    before = [starts[0], *stops]
    for line in lines:
        line["traced"] = statistics.median(stops[n] - starts[n] for n in line["numbers"]) / 1e6
        line["gap"] = statistics.median(starts[n] - before[n] for n in line["numbers"]) / 1e6
    return True


def show(report: Mapping[str, Any]) -> None:
    """Print the table."""
    us = 1e6
    table = Table("kernel", "grid", "n", "MB", "without ms", "alone us", "rate", "traced us", "gap us")
    for column in table.columns[1:]:
        column.justify = "right"
    for line in sorted(report["kinds"], key=lambda line: -line["launches"] * (line["alone"] or line["bytes"])):
        cells = [f"{line['kernel']} {line['defines']}", "x".join(map(str, line["grid"])), str(line["launches"])]
        cells.append(f"{line['bytes'] / 1e6:.2f}")
        if line["alone"] is None:
            cells += [""] * 3
        else:
            rate = f"{line['bytes'] / line['alone'] / report['limits']['read']:.0%}"
            if line["flops"]:
                rate = f"{line['flops'] / line['alone'] / 1e12:.0f} TFLOP/s"
            without = "" if line["without"] is None else f"{line['without'] * 1e3:.3f}"
            cells += [without, f"{line['alone'] * us:.2f}", rate]
        table.add_row(*cells, *(f"{line[key] * us:.2f}" if key in line else "" for key in ("traced", "gap")))
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    print(f"tokens {report['tokens']}")
    total = sum(line["bytes"] * line["launches"] for line in report["kinds"])
    print(
        f"step {report['step'] * 1e3:.3f} ms, {report['launches']} launches; {total / 1e9:.2f} GB, read at "
        f"{report['limits']['read'] / 1e12:.3f} TB/s {total / report['limits']['read'] * 1e3:.3f} ms"
    )


def main() -> int:
    """Print a table; with --trace, everything as JSON to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--sequences", type=int, default=1, help="sequences with one row each (default: 1)")
    parser.add_argument("--prompt", type=int, default=0, metavar="N", help="instead N rows of a prompt, in one step")
    parser.add_argument("--prompt-precision", choices=["fp16", "int8"], default="fp16", help="as for luce serve")
    parser.add_argument("--depth", type=int, help="tokens of context (default: 16; of a prompt 0)")
    parser.add_argument("--repeat", type=int, default=15, help="replays that count (default: 15)")
    parser.add_argument("--no-kinds", action="store_true", help="only the whole step")
    parser.add_argument("--trace", type=Path, help="a file for every figure, with the launches in order")
    given = parser.parse_args()
    if given.prompt < 0 or (given.prompt and given.sequences > 1):
        parser.error("--prompt: a step has the rows of one prompt")
    depth = (0 if given.prompt else 16) if given.depth is None else given.depth
    config = Config(
        target_devices=(given.device,),
        max_ctx=depth + given.prompt + 64,
        parallel=given.sequences,
        prompt_precision=given.prompt_precision,
    )
    with contextlib.ExitStack() as opened, open_gguf(given.model) as file:
        spec = read_spec(Source(str(file.paths[0]), file.metadata, file.tensors))
        device = GpuDevice("cuda", int(given.device.partition(":")[2]))
        opened.callback(device.close)
        reached = limits(device, ())
        options = serving_options(config, spec, [device])
        if given.prompt:
            options = replace(options, chunk=given.prompt, long_graphs=True)
        backend = LayerSplitBackend(file, spec, [device], options)
        opened.callback(backend.close)
        recorder = Recorder(device)
        stepper = Stepper(backend, options.chunk)
        slots = range(given.sequences)
        stepper.prefill(slots, depth)
        recorder.works.clear()
        tokens: list[int] = []
        while len(tokens) < _TOKENS:
            if given.prompt:
                stepper.move_to(0, depth)
                stepper.read(0, given.prompt)
            else:
                stepper.decode(slots)
            tokens.append(stepper.newest(0))
        if not recorder.works:
            print("bench_step: the step was not captured", file=sys.stderr)
            return 1
        work, launches = recorder.works[-1]
        whole_graph = recorder.part(work, lambda kind: True)
        whole = replayed(device, whole_graph, given.repeat)
        report: dict[str, Any] = {"step": whole, "launches": len(launches), "limits": {"read": reached.read}}
        report["tokens"] = tokens
        report["kinds"] = [] if given.no_kinds else kinds(device, recorder, work, launches, given.repeat)
        events = [] if given.no_kinds else traced(device, whole_graph)
        if events and not add_trace(report["kinds"], events, launches):
            print(f"the trace has {len(events)} kernels, the step {len(launches)}", file=sys.stderr)
        if given.trace is not None:
            keys = ("ts", "dur", "name")
            report["trace"] = [{key: event[key] for key in keys} for event in events]
            report["order"] = [launch.kind for launch in launches]
            given.trace.write_text(json.dumps(report))
        show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
