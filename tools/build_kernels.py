"""Compile every kernel variant for every target without a GPU, and print one table.

    python -m tools.build_kernels                     all variants for a few representative targets
    python -m tools.build_kernels --ci                these, and the differing variants for all other targets
    python -m tools.build_kernels --ci --skip-proved  without sources whose builds passed as they stand
    python -m tools.build_kernels --ci --prove        the same, and record what passes (tools/proofs.py)
    python -m tools.build_kernels --all               all variants for all targets
    python -m tools.build_kernels --target sm_90a --source norm
    python -m tools.build_kernels --target sm_90a --cache
                                                      all variants for one GPU, stored in the cache of Luce

Three compilers: NVRTC (PyPI nvidia-cuda-nvrtc), the HIP runtime's hiprtc (Debian libamdhip64-5, libhiprtc-builtins5),
and clang for the targets that hiprtc 5.2 does not know (clang-19, headers of libamdhip64-dev). A cell shows the most
registers of its kernels, `s` spilled (bytes on NVIDIA, registers on AMD), `m` bytes of static shared memory.

Targets whose sources preprocess to the same text differ only in the last stages of the compiler. So --ci compiles every
value of every define once for each such text, distributed over its targets, and each source for each target.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.table import Table

from luce.errors import DeviceError
from luce.runtime import compiler, kernels
from luce.runtime.driver import Vendor
from luce.runtime.kernels import KernelBuild
from tools import proofs

CLANG = "clang-19"


@dataclass(frozen=True)
class Target:
    """An architecture and its compiler."""

    compiler: str
    arch: str
    #: equal for targets whose sources preprocess to the same text
    text: str
    #: whether a run without --all compiles for it: one target for each compiler
    usual: bool = False

    @property
    def vendor(self) -> Vendor:
        """The vendor of the GPU."""
        return "cuda" if self.compiler == "nvrtc" else "hip"

    @property
    def lanes(self) -> int:
        """Lanes of a wave: 64 on GCN and CDNA, else 32."""
        return 64 if self.arch.startswith("gfx9") else 32


TARGETS = (
    Target("nvrtc", "sm_75", "turing"),
    Target("nvrtc", "sm_80", "ampere"),
    Target("nvrtc", "sm_86", "ampere"),
    Target("nvrtc", "sm_89", "ampere"),
    Target("nvrtc", "sm_90a", "hopper", usual=True),
    Target("nvrtc", "sm_100a", "blackwell"),
    Target("nvrtc", "sm_120a", "blackwell"),
    Target("hiprtc", "gfx906", "gcn"),
    Target("hiprtc", "gfx90a", "gcn", usual=True),
    Target("hiprtc", "gfx1030", "rdna2"),
    Target("clang", "gfx942", "gcn"),
    Target("clang", "gfx1100", "rdna3", usual=True),
    Target("clang", "gfx1151", "rdna3"),
    Target("clang", "gfx1201", "rdna3"),
)


@dataclass(frozen=True)
class Result:
    """One build for one target; `error` is None if it compiled. Counts that the compiler does not report are 0."""

    build: KernelBuild
    target: Target
    seconds: float
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    error: str | None = None

    @property
    def cell(self) -> str:
        """The table's entry."""
        if self.error is not None:
            return "[red]FAILED[/red]"
        spilled = f" [yellow]{self.spilled}s[/yellow]" if self.spilled else ""
        return f"{self.registers}r{spilled}" + (f" {self.shared}m" if self.shared else "")


def missing(name: str) -> str | None:
    """The reason why this machine lacks a compiler, None if it has it."""
    if name == "nvrtc":
        return None if compiler.load("cuda") else "no libnvrtc (pip install nvidia-cuda-nvrtc)"
    if name == "hiprtc":
        return None if compiler.load("hip") else "no hiprtc (apt install libamdhip64-5 libhiprtc-builtins5)"
    if shutil.which(CLANG) is None:
        return f"no {CLANG} (apt install {CLANG})"
    if not Path("/usr/include/hip/hip_runtime.h").is_file():
        return "no HIP headers (apt install libamdhip64-dev)"
    return None


_load = cache(compiler.load)


def _most(pattern: str, text: str) -> int:
    return max((int(number) for number in re.findall(pattern, text)), default=0)


def _metadata(code: bytes, key: str) -> int:
    """The largest unsigned value that a code object's msgpack note gives for `key`."""
    value = re.compile(re.escape(key.encode()) + rb"(?:\xcc(.)|\xcd(..)|\xce(....)|([\x00-\x7f]))", re.DOTALL)
    return max((int.from_bytes(b"".join(groups), "big") for groups in value.findall(code)), default=0)


def _clang(build: KernelBuild, target: Target, header: Path, started: float) -> Result:
    command = [*_clang_command(target), *build.options(target.lanes)]
    command += ["-Xclang", "-include-pch", "-Xclang", str(header), "-S", str(build.path), "-o", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started
    if done.returncode:
        return Result(build, target, seconds, error=f"{build} for {target.arch}: {compiler.first_error(done.stderr)}")
    counts = (r"\.vgpr_count:\s+(\d+)", r"\.vgpr_spill_count:\s+(\d+)", r"\.group_segment_fixed_size:\s+(\d+)")
    registers, spilled, shared = (_most(pattern, done.stdout) for pattern in counts)
    return Result(build, target, seconds, registers, spilled, shared)


def _clang_command(target: Target) -> list[str]:
    options = ["-x", "hip", "--cuda-device-only", "-nogpulib", "-O3", compiler.CLANG_ARITHMETIC]
    return [CLANG, *options, f"--offload-arch={target.arch}"]


def precompile(target: Target, folder: Path) -> Path:
    """HIP's own header, which takes most of a small kernel's compile time (0.4 of 0.6 s), once per target."""
    source, header = folder / f"{target.arch}.hip", folder / f"{target.arch}.pch"
    source.write_text("#include <hip/hip_runtime.h>\n")
    options = KernelBuild("").options(target.lanes)
    command = [*_clang_command(target), *options, "-Xclang", "-emit-pch", "-S", str(source), "-o", str(header)]
    subprocess.run(command, check=True)
    return header


def build_one(build: KernelBuild, target: Target, header: Path | None, keep: bool = False) -> Result:
    """Compile one variant for one target; with `keep`, store an NVIDIA target's module in the user's cache."""
    started = time.monotonic()
    if header is not None:
        return _clang(build, target, header, started)
    rtc = _load("cuda" if target.compiler == "nvrtc" else "hip")
    assert rtc is not None
    try:
        done = rtc.compile(
            build, target.arch, target.lanes, ("--ptxas-options=-v",) if target.compiler == "nvrtc" else ()
        )
    except DeviceError as error:
        return Result(build, target, time.monotonic() - started, error=str(error))
    if keep and target.compiler == "nvrtc":
        compiler.store(rtc, build, target.arch, target.lanes, done.code)
    seconds = time.monotonic() - started
    if target.compiler == "nvrtc":
        counts = (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes smem")
        registers, spilled, shared = (_most(pattern, done.log) for pattern in counts)
    else:
        keys = (".vgpr_count", ".vgpr_spill_count", ".group_segment_fixed_size")
        registers, spilled, shared = (_metadata(done.code, key) for key in keys)
    return Result(build, target, seconds, registers, spilled, shared)


def build_all(tasks: Sequence[tuple[KernelBuild, Target]], jobs: int, *, keep: bool = False) -> list[Result]:
    """Compile in `jobs` processes; results in the order of the tasks."""
    with tempfile.TemporaryDirectory() as folder:
        targets = dict.fromkeys(target for _, target in tasks if target.compiler == "clang")
        headers = {target: precompile(target, Path(folder)) for target in targets}
        calls = [(build, target, headers.get(target), keep) for build, target in tasks]
        # Not forked: the compilers have their own threads.
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
            return list(pool.map(build_one, *zip(*calls, strict=True), chunksize=4))


def covering(builds: Sequence[KernelBuild]) -> list[KernelBuild]:
    """Few builds of each source in which every value of every define occurs."""
    sources: dict[str, list[KernelBuild]] = {}
    for build in builds:
        sources.setdefault(build.source, []).append(build)
    chosen = []
    for variants in sources.values():
        missing = {define for build in variants for define in build.defines}
        while True:
            best = max(variants, key=lambda build: len(missing.intersection(build.defines)))
            chosen.append(best)
            missing.difference_update(best.defines)
            if not missing:
                break
    return chosen


def differing(targets: Sequence[Target], builds: Sequence[KernelBuild]) -> list[tuple[KernelBuild, Target]]:
    """The builds of --ci for targets of one text."""
    each = {build.source: build for build in builds}.values()
    others = [target for target in targets if not target.usual]
    dealt = covering(builds) if len(others) == len(targets) else []
    tasks = [(build, target) for target in targets if target.usual for build in builds]
    for i, target in enumerate(others):
        tasks += [(build, target) for build in dict.fromkeys((*dealt[i :: len(others)], *each))]
    return tasks


def tasks_for(
    targets: Sequence[Target], sources: Sequence[str] | None = None, *, ci: bool
) -> list[tuple[KernelBuild, Target]]:
    """The builds for targets, of these sources or of all: all of each source, or those of --ci."""
    tasks = []
    for text in dict.fromkeys(target.text for target in targets):
        kin = [target for target in targets if target.text == text]
        builds = [build for build in kernels.builds(kin[0].vendor) if not sources or build.source in sources]
        tasks += differing(kin, builds) if ci else [(build, target) for target in kin for build in builds]
    return tasks


def digests(tasks: Sequence[tuple[KernelBuild, Target]]) -> dict[str, str]:
    """By source: the digest of all that its builds depend on in this repository."""
    folder = proofs.ROOT / "kernels"
    code = (Path(__file__).resolve(), Path(kernels.__file__), Path(compiler.__file__))
    found: dict[str, list[str]] = {}
    for build, target in tasks:
        found.setdefault(build.source, []).append(f"{build} {target}")
    return {
        source: proofs.digest((folder / f"{source}.cu", *folder.glob("*.h"), *code), *sorted(texts))
        for source, texts in found.items()
    }


def proved(current: Mapping[str, str]) -> set[str]:
    """The sources that are recorded with their current digest."""
    return {source for source, digest in proofs.recorded("builds").items() if current.get(source) == digest}


def table(results: Sequence[Result]) -> Table:
    """A table of builds by targets."""
    targets = list(dict.fromkeys(result.target for result in results))
    cells = {(result.build, result.target): result.cell for result in results}
    shown = Table("kernel")
    for target in targets:
        shown.add_column(target.arch, justify="right")
    for build in dict.fromkeys(result.build for result in results):
        shown.add_row(str(build), *(cells.get((build, target), "") for target in targets))
    return shown


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    scope = parser.add_mutually_exclusive_group()
    scope.add_argument("--all", action="store_true", help="all variants for all targets")
    scope.add_argument("--ci", action="store_true", help="all targets, most of them with fewer variants")
    parser.add_argument("--target", action="append", choices=[t.arch for t in TARGETS], help="only these (repeatable)")
    parser.add_argument("--source", action="append", choices=kernels.sources(), help="only these (repeatable)")
    parser.add_argument("--skip-proved", action="store_true", help="with --ci: not what tools/proved.json names")
    parser.add_argument("--prove", action="store_true", help="as --skip-proved, and record the sources that pass")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument(
        "--cache", action="store_true", help="store NVIDIA targets' modules in the user's cache of Luce"
    )
    options = parser.parse_args(arguments)
    if (options.skip_proved or options.prove) and (options.target or not options.ci):
        parser.error("--skip-proved and --prove stand for the builds of --ci on all targets")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 if everything compiled, 1 if not, 2 if a compiler is missing."""
    options = _arguments(arguments)
    if options.target:
        targets = [target for target in TARGETS if target.arch in options.target]
    else:
        targets = [target for target in TARGETS if options.all or options.ci or target.usual]
    reasons = [reason for name in dict.fromkeys(t.compiler for t in targets) if (reason := missing(name))]
    if reasons:
        print("\n".join(reasons), file=sys.stderr)
        return 2
    started = time.monotonic()
    tasks = tasks_for(targets, options.source, ci=options.ci)
    current = digests(tasks)
    if options.skip_proved or options.prove:
        known = proved(current)
        tasks = [task for task in tasks if task[0].source not in known]
        print(f"{len(known)} of {len(current)} sources have passed as they stand; {len(tasks)} builds are left")
    results = build_all(tasks, options.jobs, keep=options.cache)
    shown = table(results)
    console = Console(width=None if sys.stdout.isatty() else 60 + 18 * len(targets))
    console.print(shown)
    failed = [result for result in results if result.error]
    for result in failed:
        console.print(result.error, style="red", markup=False, highlight=False)
    spent = f"{time.monotonic() - started:.0f} s, {sum(r.seconds for r in results):.0f} s in compilers"
    console.print(f"{len(results)} builds for {len(targets)} targets: {len(failed)} failed ({spent})")
    if options.prove:
        broken = {result.build.source for result in failed}
        passed = {result.build.source for result in results} - broken
        proofs.record("builds", {source: current[source] for source in passed})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
