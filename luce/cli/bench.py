"""`luce bench MODEL`: the speed of prompts, decoding, verification and batches, beside the limits of the devices."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from luce import __version__
from luce.assembly import Scorers, open_backend, open_kvflash, place
from luce.backend.placement import default_chunk
from luce.bench.cost import Cost, ShardCost
from luce.bench.limits import Limits, limits
from luce.bench.measure import Run, Stepper, Workload, seconds
from luce.cli import progress
from luce.cli.arguments import add_json, add_model, add_settings, settings
from luce.cli.console import output
from luce.cli.progress import Wait
from luce.cli.pull import fetch
from luce.config import values
from luce.config.settings import Config
from luce.errors import UsageError
from luce.gguf.reader import GGUFFile, open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.models.spec import ModelSpec
from luce.ops.kvtype import KVTypes
from luce.remote.open import open_placement
from luce.runtime.cores import limit_threads
from luce.runtime.device import Device
from luce.runtime.step import PAGE
from luce.text.tokenizer import Tokenizer

# Tokens that each sequence of a batch generates if -n is 0.
_STEPS = 32
#: groups of settings that this verb takes
SETTINGS = ("placement", "planning", "peer copies", "daemons", "engine", "KVFlash", "KVFlash policy")
#: by flag, the default and the help text of a list of sizes
_SIZES = {
    ("-p", "--prompt"): ("512", "prompt tokens to read"),
    ("-n", "--generate"): ("128", "tokens to generate"),
    ("-d", "--depth"): ("0", "tokens of context before each test"),
    ("--rows",): ("", "rows of one sequence to verify in a step"),
    ("--sequences",): ("", "sequences to decode as a batch, at the first depth"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, the sizes of the tests, --json and the flags of the settings."""
    add_model(parser)
    for flags, (default, text) in _SIZES.items():
        shown = f"{text} (default: {default})" if default else text
        parser.add_argument(*flags, metavar="N[,N...]", default=default, help=shown)
    parser.add_argument("-r", "--repeat", metavar="N", type=int, default=5, help="runs of each test (default: 5)")
    add_json(parser)
    add_settings(parser, SETTINGS)


def run(arguments: argparse.Namespace) -> int:
    """Print one table, or one JSON object."""
    config = settings(arguments)
    limit_threads(config.threads)
    single, many = _tests(arguments)
    path = fetch(arguments.model, config)
    with open_gguf(path) as file, progress.shown("measuring the devices", lines=True) as wait:
        spec = read_spec(Source(str(file.paths[0]), file.metadata, file.tensors))
        _check_contexts((*single, *many), spec.longest_context)
        with contextlib.ExitStack() as opened:
            devices = [opened.enter_context(contextlib.closing(d)) for d in open_placement(config)]
            report = _facts(file, spec, devices)
            # The wire protocol has no request for a measurement, and simulated devices have nothing to measure.
            rows = _prompt_rows(single, default_chunk(devices, config.chunk))
            unknown = {device.name for device in devices if device.remote or device.name.simulated}
            reached = {str(d.name): None if d.name in unknown else limits(d, rows) for d in devices}
        for device in report["devices"]:
            limit = reached[device["device"]]
            device["limits"] = None if limit is None else dataclasses.asdict(limit)
        # A batch needs slots and a long context needs pages: each has a load of its own.
        for tests in filter(None, (single, many)):
            load = dataclasses.replace(
                config,
                max_ctx=max(config.max_ctx, *(test.context for test in tests)),
                parallel=max([config.parallel, *(test.size for test in tests if test.kind == "batch")]),
            )
            _measure(file, spec, load, tests, reached, arguments.repeat, report, wait)
    if arguments.json:
        print(json.dumps(report))
    else:
        show(output(), report)
    return 0


def _tests(arguments: argparse.Namespace) -> tuple[list[Workload], list[Workload]]:
    """Tests of one sequence, and tests of batches. Raises UsageError naming the flag of a bad list."""
    prompts, generated = _sizes("-p", arguments.prompt, 0), _sizes("-n", arguments.generate, 0)
    depths, rows = _sizes("-d", arguments.depth, 0), _sizes("--rows", arguments.rows, 1)
    sequences = _sizes("--sequences", arguments.sequences, 1)
    if not depths:
        raise UsageError("-d: name at least one depth", param="depth")
    if arguments.repeat < 1:
        raise UsageError(f"--repeat: expected an integer from 1 on, got {arguments.repeat}", param="repeat")
    single = []
    for depth in depths:
        single += [Workload("prompt", n, depth) for n in prompts if n]
        single += [Workload("decode", n, depth) for n in generated if n]
        single += [Workload("verify", n, depth) for n in rows]
    steps = max(generated, default=0) or _STEPS
    many = [Workload("batch", n, depths[0], steps) for n in sequences]
    if not single and not many:
        raise UsageError("-p, -n, --rows, --sequences: nothing to measure", param="prompt")
    return single, many


def _check_contexts(tests: Sequence[Workload], trained: int) -> None:
    """Raise UsageError for a test of more tokens than the model was trained for."""
    flags = {"prompt": "-p", "decode": "-n", "verify": "--rows", "batch": "-n"}
    for test in tests:
        if test.context > trained:
            asked = flags[test.kind] + (", -d" if test.depth else "")
            raise UsageError(f"{asked}: {test.context} tokens: the model was trained for {trained}")


def _prompt_rows(tests: Sequence[Workload], chunk: int) -> list[int]:
    """The numbers of rows that steps of prompts have: their limits are products of as many."""
    steps = [spans for test in tests if test.kind == "prompt" for spans, _ in test.plan(chunk)]
    return sorted({span.rows for spans in steps for span in spans})


def _sizes(flag: str, text: str, low: int) -> list[int]:
    """The integers of `512,2048`, from `low` on."""
    try:
        return [values.tokens(low)(part) for part in text.split(",") if part]
    except ValueError:
        raise UsageError(
            f"{flag}: expected integers from {low} on separated by commas, got {text!r}", param=flag.strip("-")
        ) from None


def _facts(file: GGUFFile, spec: ModelSpec, devices: Sequence[Device]) -> dict[str, Any]:
    return {
        "luce": __version__,
        "model": file.name,
        "family": spec.family,
        "bytes": sum(tensor.nbytes for tensor in file.tensors.values()),
        "devices": [{"device": str(device.name), **device.describe()} for device in devices],
        "loads": [],
        "prefills": [],
        "results": [],
    }


def _measure(
    file: GGUFFile,
    spec: ModelSpec,
    config: Config,
    tests: Sequence[Workload],
    reached: Mapping[str, Limits | None],
    repeat: int,
    report: dict[str, Any],
    wait: Wait,
) -> None:
    """Load the model and run tests. Adds to `loads`, `prefills` and `results` of the report."""
    wait.step(f"loading {Path(file.paths[0]).name} for {config.parallel} x {config.max_ctx} tokens")
    with contextlib.ExitStack() as opened:
        started = time.perf_counter()
        placed = place(opened, config, file, spec, wait.step)
        devices = placed.devices
        backend = open_backend(opened, file, spec, devices, placed.config, wait.share, layers=placed.layers)
        loaded = time.perf_counter() - started
        kvflash = open_kvflash(
            opened, backend, config, Scorers(opened, config, devices, lambda: _tokenizer(file, spec))
        )
        resident = backend.capacity.max_resident_pages
        max_resident = None if resident is None else resident * PAGE
        kv = KVTypes(config.cache_type_k, config.cache_type_v)
        costs = [
            ShardCost(file, spec, part.layers, device, kv, max_resident)
            for part, device in zip(backend.devices, devices, strict=True)
        ]
        # A shard whose experts are on the CPU reads the memory of two devices, one after the other.
        limits_of = [None if part.offloaded else reached[part.device] for part in backend.devices]
        stepper = Stepper(backend, backend.options.chunk, kvflash)
        stepper.move_to(0, 0)
        first = seconds(lambda: stepper.read(0, 1))
        report["loads"].append(
            {
                "context": config.max_ctx,
                "sequences": config.parallel,
                "seconds": loaded,
                "first_token_seconds": first,
                "max_resident_tokens": max_resident,
                "policy": None if kvflash is None else kvflash.policy.name,
                "plan": None if placed.plan is None else placed.plan.facts,
                "shards": [
                    {
                        "device": part.device,
                        "layers": [part.layers.start, part.layers.stop - 1],
                        "experts_on_cpu": list(part.offloaded),
                    }
                    for part in backend.devices
                ],
            }
        )
        prefilled = 0
        for test in tests:
            wait.step(f"measuring {test.name}")
            if test.depth and test.depth != prefilled:
                report["prefills"].append(_prefill(stepper, max_resident, config.parallel, test.depth))
                prefilled = test.depth
            # The first runs load kernels and capture CUDA graphs.
            for _ in range(2):
                stepper.run(test)
            runs = []
            for number in range(repeat):
                wait.update(number, repeat)
                runs.append(stepper.run(test))
            plan = test.plan(backend.options.chunk)
            steps = [[(sum(span.rows for span in step[0]), cost.step(*step)) for step in plan] for cost in costs]
            result = _result(test, [run.seconds for run in runs], steps, limits_of)
            report["results"].append(result | _paging(max_resident, runs))


def _tokenizer(file: GGUFFile, spec: ModelSpec) -> Tokenizer:
    return Tokenizer(file.metadata, nfc=spec.nfc, eos_texts=spec.eos)


def _prefill(stepper: Stepper, max_resident: int | None, sequences: int, depth: int) -> dict[str, Any]:
    """Let sequences read their context. Returns the time of it, and the time of one round of scoring afterwards."""
    run = stepper.prefill(range(sequences), depth)
    rescore = stepper.time_rescore(0)
    return {
        "depth": depth,
        "sequences": sequences,
        "seconds": run.seconds,
        "tokens_per_second": sequences * depth / run.seconds,
        **_paging(max_resident, [run]),
        "rescore": None if rescore is None else {"seconds": rescore[0], "interval_tokens": rescore[1]},
    }


def _paging(max_resident: int | None, runs: Sequence[Run]) -> dict[str, Any]:
    """The mean of the runs' Traffic, None if all pages are resident."""
    if max_resident is None:
        return {"paging": None}
    fields = [dataclasses.asdict(run.traffic) for run in runs]
    return {"paging": {name: statistics.fmean(field[name] for field in fields) for name in fields[0]}}


def _result(
    test: Workload,
    times: Sequence[float],
    steps: Sequence[Sequence[tuple[int, Cost]]],
    reached: Sequence[Limits | None],
) -> dict[str, Any]:
    """The result of a test; its rates are those of the median run. `steps`: by device, rows and cost of each step.

    `of_bandwidth` and, of prompts, `of_matmul_rate` divide the time that the devices need at their limits, one after
    another, by the measured time. They are None if the limit of a device is not known.
    """
    median = statistics.median(times)
    rates = sorted(test.tokens / t for t in times)
    totals = [sum((cost for _, cost in own), Cost()) for own in steps]
    memory = arithmetic = None
    if None not in reached:
        known = [limit for limit in reached if limit is not None]
        memory = sum(total.bytes / limit.read for total, limit in zip(totals, known, strict=True))
        if test.kind == "prompt" and all(limit.products for limit in known):
            pairs = zip(steps, known, strict=True)
            arithmetic = sum(cost.flops / limit.products[rows] for own, limit in pairs for rows, cost in own)
    return {
        "test": test.name,
        **dataclasses.asdict(test),
        "seconds": list(times),
        "tokens_per_second": test.tokens / median,
        "spread": (rates[-1] - rates[0]) / 2,
        "milliseconds_per_step": 1000 * median / len(test.plan(1 << 30)),
        "bytes_per_second": sum(total.bytes for total in totals) / median,
        "flops_per_second": sum(total.flops for total in totals) / median,
        "of_bandwidth": None if memory is None else memory / median,
        "of_matmul_rate": None if arithmetic is None else arithmetic / median,
    }


def show(console: Console, report: dict[str, Any]) -> None:
    """Print the report as tables."""
    console.print(f"{report['model']} ({report['family']}, {report['bytes'] / 1e9:.2f} GB), luce {report['luce']}")
    for device in report["devices"]:
        limit = device["limits"]
        if limit is None:
            where = "simulated" if device["device"].startswith("sim:") else "in a daemon, not measured"
            console.print(f"{device['device']} ({device['name']}): {where}")
            continue
        rates = [f"reads {limit['read'] / 1e9:.0f} GB/s", f"copies {limit['copy'] / 1e9:.0f} GB/s"]
        rates += [f"multiplies {rate / 1e12:.2f} TFLOP/s with {rows} rows" for rows, rate in limit["products"].items()]
        console.print(f"{device['device']} ({device['name']}): {', '.join(rates)}")
    for load in report["loads"]:
        console.print(
            f"{load['sequences']} x {load['context']} tokens: loaded in {load['seconds']:.2f} s, "
            f"first token {load['first_token_seconds']:.2f} s later"
            + (f"; {load['max_resident_tokens']} resident tokens, policy {load['policy']}" if load["policy"] else "")
        )
    for prefill in report["prefills"]:
        parts = [f"{prefill['sequences']} x {prefill['depth']} tokens read at {prefill['tokens_per_second']:.0f} tok/s"]
        if prefill["paging"]:
            parts.append(_traffic(prefill["paging"]))
        if rescore := prefill["rescore"]:
            parts.append(f"scoring pages takes {rescore['seconds']:.3f} s every {rescore['interval_tokens']} tokens")
        console.print("; ".join(parts))
    table = Table()
    table.add_column("test")
    paged = any(result["paging"] for result in report["results"])
    for name in (
        "tok/s",
        "+-",
        "ms/step",
        "GB/s",
        "of reads",
        "TFLOP/s",
        "of products",
        *(["swapped"] if paged else []),
    ):
        table.add_column(name, justify="right")
    for result in report["results"]:
        of_bandwidth, of_products = result["of_bandwidth"], result["of_matmul_rate"]
        table.add_row(
            result["test"],
            f"{result['tokens_per_second']:.1f}",
            f"{result['spread']:.1f}",
            f"{result['milliseconds_per_step']:.2f}",
            f"{result['bytes_per_second'] / 1e9:.0f}",
            "" if of_bandwidth is None else f"{of_bandwidth:.0%}",
            f"{result['flops_per_second'] / 1e12:.2f}",
            "" if of_products is None else f"{of_products:.0%}",
            *([_traffic(result["paging"])] if result["paging"] else []),
        )
    console.print(table)


def _traffic(paging: dict[str, Any]) -> str:
    out, back, size = paging["pages_swapped_out"], paging["pages_swapped_in"], paging["swapped_bytes"] / 1e6
    return f"{out:.0f} pages out, {back:.0f} in, {size:.1f} MB"
