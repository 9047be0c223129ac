"""`luce doctor`: libraries, devices and limits of this machine, and the problems of each device.

Every device is tested, not only listed: a GPU compiles all kernels and runs one, the CPU multiplies two matrices and
measures how fast it reads memory and multiplies. `--measure` measures every device with Luce's own kernels, within a
number of seconds, and keeps the figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import resource
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl
from gguf import GGMLQuantizationType
from rich.console import Console
from rich.table import Table

import luce
from luce.bench.limits import Sizes, host_limits, packed_rate
from luce.cli import progress
from luce.cli.arguments import add_json
from luce.cli.console import output
from luce.config import values
from luce.errors import DeviceError, UsageError
from luce.ops.matmul import matmul
from luce.ops.weight import RawTensor, upload_weight
from luce.profiles.profile_cache import default_measuring, profile_of
from luce.runtime import compiler, driver, kernels
from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Device
from luce.runtime.found import VENDORS, Found, found
from luce.runtime.gpu import GpuDevice

_GIB = 1 << 30
#: seconds of --measure; a GPU takes 3 to 5, a CPU 5 to 10
_BUDGET = "60"
# What the CPU is measured with: a second and half a GiB. Packed products are as a layer's with a prompt.
_SIZES = Sizes(copied_bytes=1 << 28, side=2048)
_FLOAT_ROWS = 256
_ROWS, _SIDE = 128, 2048
#: types of weights that --measure measures products of
_MEASURED = (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K, GGMLQuantizationType.Q8_0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--measure and --json."""
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure the speed of every device, and keep the figures in the cache folder",
    )
    parser.add_argument(
        "--measure-budget",
        metavar="SECONDS",
        help=f"longest time to measure, beside compiling kernels (default: {_BUDGET}); devices without a turn by then "
        "are not measured",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the findings, as JSON with --json. Exit status 0 if at least one device works, else that of DeviceError."""
    seconds = _seconds(args)
    with progress.shown("examining the devices", lines=seconds is not None) as wait:
        report = examine(Examination(wait, seconds))
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        show(output(), report)
    return 0 if any(device["works"] for device in report["devices"]) else DeviceError.exit_code


def _seconds(args: argparse.Namespace) -> float | None:
    """The seconds for measuring; None without --measure."""
    if not args.measure:
        if args.measure_budget is not None:
            raise UsageError("--measure-budget: requires --measure", param="measure_budget")
        return None
    try:
        return float(values.number(0, 86400)(args.measure_budget or _BUDGET))
    except ValueError as error:
        raise UsageError(f"--measure-budget {args.measure_budget}: {error}", param="measure_budget") from None


class Examination:
    """What is examined, and who sees how far it is. `seconds`: for measuring all devices; None: none is measured."""

    def __init__(self, wait: progress.Wait, seconds: float | None = None) -> None:
        self.wait, self.seconds = wait, seconds
        self._left = seconds or 0.0

    def profile(self, device: Device, report: dict[str, Any]) -> None:
        """Measure a device and put its `profile` into its report; None if the time is over."""
        if self.seconds is None:
            return
        if self._left <= 0:
            report["profile"] = None
            return
        began = time.monotonic()
        how = replace(
            default_measuring(device),
            experts=True,
            recurrent=True,
            int8=True,
            end=began + self._left,
            on_figure=lambda text: self.wait.step(text),
        )
        report["profile"] = dataclasses.asdict(profile_of(device, _MEASURED, anew=True, how=how))
        self._left -= time.monotonic() - began


def examine(examination: Examination) -> dict[str, Any]:
    """All findings. Sizes are in bytes; None means absent or unlimited. Each device that works and is measured has a
    `profile`, its DeviceProfile of now."""
    shm = Path("/dev/shm")
    space = shutil.disk_usage(shm) if shm.is_dir() else None
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "luce": luce.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cupy": _cupy_version(),
        "blas": [
            {key: pool.get(key) for key in ("internal_api", "version", "num_threads", "filepath")}
            for pool in threadpoolctl.threadpool_info()
            if pool.get("user_api") == "blas"
        ],
        "libraries": {vendor: _libraries(vendor) for vendor in VENDORS},
        "devices": [*(_gpu(gpu, examination) for gpu in found()), _host(examination)],
        "shm": None if space is None else {"free": space.free, "total": space.total},
        "memlock": None if memlock == resource.RLIM_INFINITY else memlock,
    }


def _cupy_version() -> str | None:
    try:
        import cupy
    except ImportError:
        return None
    return f"{cupy.__version__} for {'HIP' if cupy.cuda.runtime.is_hip else 'CUDA'}"


def _libraries(vendor: driver.Vendor) -> dict[str, Any]:
    loaded, rtc = driver.load(vendor), compiler.load(vendor)
    return {
        "driver": None if loaded is None else {"path": loaded.path, "version": loaded.version},
        "compiler": None if rtc is None else {"path": rtc.path, "version": rtc.version},
    }


def _gpu(gpu: Found, examination: Examination) -> dict[str, Any]:
    facts = gpu.properties
    report: dict[str, Any] = {
        "device": str(gpu.name),
        "name": facts.name,
        "arch": facts.arch,
        "lanes": facts.lanes,
        "multiprocessors": facts.multiprocessors,
        "total": facts.memory,
        "shared": facts.shared,
        "shared_optin": facts.shared_optin,
        "works": False,
        "problems": [],
    }
    assert gpu.name.vendor is not None
    try:
        device = GpuDevice(gpu.name.vendor, gpu.name.index)
    except DeviceError as error:
        report["problems"].append(str(error))
        return report
    try:
        report["free"] = device.memory().free
        _fill(device)
        report["graphs"] = _captures(device)
        report.update(_build_all(device, report["problems"], examination.wait))
        report["works"] = not report["problems"]
        if report["works"]:
            examination.profile(device, report)
    except DeviceError as error:
        report["works"] = False
        report["problems"].append(str(error))
    finally:
        device.close()
    return report


def _fill(device: GpuDevice) -> None:
    """Run one kernel and check its result."""
    n = 1000
    out = device.zeros(n)
    device.launch("fill", "fill", (4,), (256,), (out, np.int64(n), np.float32(0.5)), defines={"TYPE": "float"})
    if not (device.download(out) == 0.5).all():
        raise DeviceError(f"{device.name}: the kernel fill wrote a wrong result")


def _captures(device: GpuDevice) -> bool:
    """Whether the device captures and replays CUDA graphs; without them, every step queues each launch."""
    out = device.zeros(1000)

    def fill() -> tuple[Any, ...]:
        args = (out, np.int64(1000), np.float32(0.25))
        device.launch("fill", "fill", (4,), (256,), args, defines={"TYPE": "float"})
        return ()

    try:
        device.capture(fill)[0].launch()
        return bool((device.download(out) == 0.25).all())
    except DeviceError:
        return False


def _build_all(device: GpuDevice, problems: list[str], wait: progress.Wait) -> dict[str, Any]:
    started = time.monotonic()
    builds = kernels.builds("hip" if device.name.kind == "hip" else "cuda")
    wait.step(f"{device.name}: compiling {len(builds)} kernels, which takes minutes the first time")
    device.compile(builds, lambda done: wait.update(done, len(builds)))
    for build in builds:
        try:
            device.prepare(build)
        except DeviceError as error:
            problems.append(str(error))
    return {"kernels": len(builds), "kernel_seconds": round(time.monotonic() - started, 2)}


def _host(examination: Examination) -> dict[str, Any]:
    """The CPU, tried with a product of NumPy and one of compiled code on packed weights."""
    device = CpuDevice()
    examination.wait.step(f"{device.name}: reads and products")
    ones = np.ones((64, 64), np.float32)
    problems = []
    if not (ones @ ones == 64).all():
        problems.append(f"NumPy {np.__version__} multiplies matrices incorrectly")
    # Quant blocks of Q8_0: a scale of 1, and 32 ones.
    block = np.concatenate([np.ones(1, np.float16).view(np.uint8), np.ones(32, np.uint8)])
    weight = RawTensor("ones", np.tile(block, (64, 2)), GGMLQuantizationType.Q8_0, 64)
    if not np.allclose(matmul(device, ones, upload_weight(device, [weight])), 64, rtol=1e-5):
        problems.append(f"compiled code multiplies matrices incorrectly ({device.kernels.instructions})")
    memory, reached = device.memory(), host_limits(_SIZES, [_FLOAT_ROWS])
    report = {
        "device": str(device.name),
        "arch": device.kernels.instructions,
        **device.describe(),
        "read_bytes_per_second": reached.read,
        "packed_flops_per_second": packed_rate(device, _ROWS, _SIDE),
        "float_flops_per_second": reached.products[_FLOAT_ROWS],
        "free": memory.free,
        "total": memory.total,
        "works": not problems,
        "problems": problems,
    }
    if not problems:
        examination.profile(device, report)
    return report


def _rates(device: Mapping[str, Any]) -> str:
    """What the CPU reached."""
    packed, floats = device["packed_flops_per_second"] / 1e12, device["float_flops_per_second"] / 1e12
    read = device["read_bytes_per_second"] / 1e9
    return (
        f"{device['device']}: {device['threads']} threads read {read:.0f} GB/s, multiply {packed:.2f} TFLOP/s on "
        f"packed weights ({device['arch']}) and {floats:.2f} in float32"
    )


def show(console: Console, report: Mapping[str, Any]) -> None:
    """Print the findings as tables."""
    software = Table("software", "version")
    software.add_column("where", overflow="fold")
    for name in ("luce", "python", "numpy", "cupy"):
        software.add_row(name, report[name] or "[yellow]not installed[/yellow]", "")
    for pool in report["blas"]:
        software.add_row(
            f"blas ({pool['internal_api']}, {pool['num_threads']} threads)", pool["version"], pool["filepath"]
        )
    for vendor, libraries in report["libraries"].items():
        for part, library in libraries.items():
            if library is None:
                software.add_row(f"{vendor} {part}", "[dim]not found[/dim]", "")
            else:
                software.add_row(f"{vendor} {part}", library["version"], library["path"])
    console.print(software)

    devices = Table("device", "name", "arch", "lanes", "memory free/total", "shared memory", "kernels", "works")
    for device in report["devices"]:
        free = f"{device['free'] / _GIB:.1f}" if "free" in device else "?"
        shared = (
            f"{device['shared'] >> 10} KiB, {device['shared_optin'] >> 10} on request" if "shared" in device else ""
        )
        built = f"{device['kernels']} in {device['kernel_seconds']} s" if "kernels" in device else ""
        devices.add_row(
            device["device"],
            str(device["name"]),
            str(device.get("arch", "")),
            str(device.get("lanes", "")),
            f"{free} / {device['total'] / _GIB:.1f} GiB",
            shared,
            built,
            "[green]yes[/green]" if device["works"] else "[red]no[/red]",
        )
    console.print(devices)
    if any(device.get("profile") for device in report["devices"]):
        console.print(_profiles(report["devices"]))
    for device in report["devices"]:
        if device.get("profile", device) is None:
            console.print(f"{device['device']}: not measured, --measure-budget is over", style="yellow")
    for device in report["devices"]:
        if "read_bytes_per_second" in device:
            console.print(_rates(device), markup=False, highlight=False)
        for problem in device["problems"]:
            console.print(problem, style="red", markup=False, highlight=False)
        if not device.get("graphs", True):
            console.print(
                f"{device['device']} cannot capture CUDA graphs: every step queues each launch", style="yellow"
            )

    shm, memlock = report["shm"], report["memlock"]
    space = "not mounted" if shm is None else f"{shm['free'] / _GIB:.1f} of {shm['total'] / _GIB:.1f} GiB free"
    locked = "unlimited" if memlock is None else f"{memlock / _GIB:.3f} GiB"
    console.print(f"/dev/shm: {space}; lockable memory (RLIMIT_MEMLOCK): {locked}")


def _profiles(devices: Sequence[Mapping[str, Any]]) -> Table:
    """What --measure has measured, a line for each device and type of weights."""
    columns = "device", "weights", "read", "TFLOP/s by rows", "experts", "unpack", "launch", "step", "host memory"
    shown = Table(*columns, "attention", "spread")
    for device in devices:
        profile = device.get("profile")
        if profile is None:
            continue
        for name, figures in profile["formats"].items():
            shown.add_row(
                device["device"],
                name,
                f"{figures['read'] / 1e9:,.1f} GB/s",
                ", ".join(f"{rows}: {rate / 1e12:.3g}" for rows, rate in figures["rates"].items()),
                ", ".join(f"{rows}: {share:.0%}" for rows, share in figures["gather"].items()),
                "" if figures["unpack"] is None else f"{figures['unpack'] / 1e9:,.0f} GB/s",
                f"{profile['launch'] * 1e6:.1f} us"
                + (f", {figures['layer'] * 1e6:.0f} us a layer" if figures["layer"] else ""),
                f"{profile['step'] * 1e6:.0f} us",
                f"{profile['way']['latency'] * 1e6:.0f} us, {profile['way']['bandwidth'] / 1e9:.1f} GB/s",
                f"{profile['state_read'] / 1e9:,.1f} GB/s, {profile['attention'] / 1e12:.3g} TFLOP/s",
                f"{figures['spread']:.0%}" + (", noisy" if figures["noisy"] else ""),
            )
    return shown
