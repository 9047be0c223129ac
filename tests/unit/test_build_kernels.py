"""Every kernel compiles with three vendors' compilers, without a GPU.

Here: one variant of each source, on one target of each compiler. All variants for these targets, and all targets:
`python -m tools.build_kernels --ci`.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from luce.runtime import compiler, kernels
from luce.runtime.compiler import RuntimeCompiler
from luce.runtime.kernels import KernelBuild
from tools import build_kernels
from tools.build_kernels import TARGETS, Target


@pytest.mark.parametrize("name", ["nvrtc", "hiprtc", "clang"])
def test_kernels_compile(name: str, pytestconfig: pytest.Config) -> None:
    reason = build_kernels.missing(name)
    if reason:
        pytest.skip(reason)
    targets = [target for target in TARGETS if target.compiler == name and target.usual]
    every = {build.source: build for build in kernels.builds("cuda" if name == "nvrtc" else "hip")}.values()
    # Whatever is built here is a part of what --ci builds.
    skipped = pytestconfig.getoption("--skip-proved") or pytestconfig.getoption("--prove")
    known = build_kernels.proved(build_kernels.digests(build_kernels.tasks_for(TARGETS, ci=True))) if skipped else set()
    builds = [build for build in every if build.source not in known]
    results = build_kernels.build_all([(build, target) for target in targets for build in builds], jobs=2)
    assert [result.error for result in results if result.error] == []
    assert len(results) == len(builds) * len(targets)
    # Nothing was optimised away or left out: every module holds a kernel that takes registers.
    assert all(result.registers > 0 for result in results)


@pytest.mark.parametrize(
    "target", [next(t for t in TARGETS if t.compiler == name) for name in ("nvrtc", "hiprtc", "clang")]
)
def test_a_broken_kernel_is_reported(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = build_kernels.missing(target.compiler)
    if reason:
        pytest.skip(reason)
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void f(int* x) { *x = unheard_of; }\n')
    (tmp_path / "fine.cu").write_text('extern "C" __global__ void f(int* x) { x[threadIdx.x] = blockIdx.x; }\n')
    monkeypatch.setattr(kernels, "directory", lambda: tmp_path)
    header = build_kernels.precompile(target, tmp_path) if target.compiler == "clang" else None
    broken, fine = (build_kernels.build_one(KernelBuild(name), target, header) for name in ("broken", "fine"))
    assert broken.error is not None and "unheard_of" in broken.error and "FAILED" in broken.cell
    assert fine.error is None and fine.registers > 0


def test_builds_for_another_machine_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = build_kernels.missing("nvrtc")
    if reason:
        pytest.skip(reason)
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path))
    assert build_kernels.main(["--target", "sm_86", "--source", "fill", "--cache"]) == 0
    monkeypatch.setattr(RuntimeCompiler, "compile", None)
    rtc = compiler.load("cuda")
    assert rtc is not None
    for build in kernels.builds():
        if build.source == "fill":
            assert compiler.cached(rtc, build, "sm_86", 32).startswith(b"\x7fELF")


def test_targets_cover_both_lane_counts_and_all_generations() -> None:
    assert {target.lanes for target in TARGETS if target.usual} == {32, 64}
    assert {t.arch for t in TARGETS if t.lanes == 64} == {"gfx906", "gfx90a", "gfx942"}
    assert len({target.arch for target in TARGETS}) == 14


def test_covering() -> None:
    builds = [KernelBuild.of("x", {"A": a, "B": b}) for a in range(3) for b in range(2)] + [KernelBuild("y")]
    chosen = build_kernels.covering(builds)
    assert [dict(build.defines) for build in chosen] == [
        {"A": "0", "B": "0"},
        {"A": "1", "B": "1"},
        {"A": "2", "B": "0"},
        {},
    ]


def test_ci_deals_the_values_out_to_targets_of_one_text() -> None:
    builds = [KernelBuild.of("x", {"A": a}) for a in range(5)] + [KernelBuild("y")]
    first, second, usual = Target("nvrtc", "a", ""), Target("nvrtc", "b", ""), Target("nvrtc", "c", "", usual=True)
    tasks = build_kernels.differing([first, second], builds)
    assert len(tasks) == len(set(tasks)) and {build for build, _ in tasks} == set(builds)
    for target in (first, second):
        assert {build.source for build, to in tasks if to == target} == {"x", "y"}
        assert sum(to == target for _, to in tasks) <= 4
    tasks = build_kernels.differing([first, usual], builds)
    assert [build for build, to in tasks if to == usual] == builds
    assert [str(build) for build, to in tasks if to == first] == ["kernels/x.cu A=4", "kernels/y.cu"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
def test_targets_of_one_text_are_those_whose_sources_preprocess_to_the_same() -> None:
    def text(target: Target) -> str:
        number = "".join(filter(str.isdigit, target.arch))
        if target.vendor == "cuda":
            defined = [f"__CUDA_ARCH__={number}0", *["__CUDA_ARCH_FEAT_SM90_ALL"] * (target.arch == "sm_90a")]
        else:
            defined = ["__HIPCC_RTC__", "__HIP_DEVICE_COMPILE__", f"__{target.arch}__", f"__GFX{target.arch[3:-2]}__"]
        options = [*KernelBuild.of("", {"QTYPE": "Q4_K"}).options(target.lanes), *(f"-D{name}" for name in defined)]
        command = ["g++", "-E", "-P", "-x", "c++", *options, "-"]
        return subprocess.run(command, input=unit, capture_output=True, text=True, check=True).stdout

    unit = "".join(f'#include "{name}.cu"\n' for name in kernels.sources())
    texts = {target.arch: text(target) for target in TARGETS}
    for one in TARGETS:
        for other in TARGETS:
            assert (texts[one.arch] == texts[other.arch]) == (one.text == other.text), (one.arch, other.arch)


def test_kernels_that_are_proved_are_not_compiled_again(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def build_all(tasks: list, jobs: int) -> list[build_kernels.Result]:
        compiled[:] = [build.source for build, _ in tasks]
        return [build_kernels.Result(build, target, 0.0, registers=1) for build, target in tasks]

    monkeypatch.setattr(build_kernels, "missing", lambda name: None)
    monkeypatch.setattr(build_kernels, "build_all", build_all)
    monkeypatch.setattr(build_kernels, "proved", lambda current: current.keys() - {"norm"})
    names = kernels.sources()
    for given, expected in (([], names), (["--skip-proved"], ["norm"]), (["--prove"], ["norm"])):
        config = pytester.parseconfig("-p", "tests.support.selection", *given)
        test_kernels_compile("nvrtc", config)
        assert compiled == expected
