"""The cache of compiled kernels, and what compilers say about a bad source."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from luce.errors import DeviceError
from luce.runtime import compiler, kernels
from luce.runtime.compiler import Compiled, RuntimeCompiler, cached, first_error
from luce.runtime.driver import Vendor
from luce.runtime.kernels import KernelBuild

BUILD = KernelBuild.of("fill", {"TYPE": "float"})


class Counting:
    """A compiler that returns its options as code and counts."""

    vendor = "cuda"

    def __init__(self, version: str = "13.0") -> None:
        self.version = version
        self.compiled = 0

    def options(self, build: KernelBuild, arch: str, lanes: int) -> tuple[str, ...]:
        return (f"-arch={arch}", *build.options(lanes))

    def compile(self, build: KernelBuild, arch: str, lanes: int) -> Compiled:
        self.compiled += 1
        return Compiled(f"{build} {arch} {lanes} {self.version}".encode(), "")


def get(counting: Counting, folder: Path, build: KernelBuild = BUILD, arch: str = "sm_90a", lanes: int = 32) -> bytes:
    return cached(cast(RuntimeCompiler, counting), build, arch, lanes, folder)


def test_second_time_comes_from_the_folder(tmp_path: Path) -> None:
    counting = Counting()
    first = get(counting, tmp_path / "new")
    assert get(counting, tmp_path / "new") == first == b"kernels/fill.cu TYPE=float sm_90a 32 13.0"
    assert counting.compiled == 1
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert len(list((tmp_path / "new").iterdir())) == 1


def test_whatever_decides_the_code_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting()
    get(counting, tmp_path)
    get(counting, tmp_path, build=KernelBuild.of("fill", {"TYPE": "i32"}))
    get(counting, tmp_path, build=KernelBuild.of("fill"))
    get(counting, tmp_path, arch="sm_80")
    get(counting, tmp_path, lanes=64)
    assert counting.compiled == 5
    newer = Counting("13.1")
    get(newer, tmp_path)
    assert newer.compiled == 1
    monkeypatch.setattr(kernels, "fingerprint", lambda: "after an edit of a header")
    get(counting, tmp_path)
    assert counting.compiled == 6
    assert len(list(tmp_path.iterdir())) == 7


def test_where_the_sources_lie_is_not_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting()
    fingerprint = kernels.fingerprint()
    get(counting, tmp_path)
    monkeypatch.setattr(kernels, "directory", lambda: tmp_path / "elsewhere")
    monkeypatch.setattr(kernels, "fingerprint", lambda: fingerprint)
    get(counting, tmp_path)
    assert counting.compiled == 1


@pytest.mark.parametrize("keep", [0, 1, 32, 40])
def test_a_torn_entry_is_a_miss_and_is_replaced(tmp_path: Path, keep: int) -> None:
    counting = Counting()
    code = get(counting, tmp_path)
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(entry.read_bytes()[:keep])
    assert get(counting, tmp_path) == code
    assert get(counting, tmp_path) == code
    assert counting.compiled == 2


def test_a_flipped_bit_is_a_miss(tmp_path: Path) -> None:
    counting = Counting()
    code = get(counting, tmp_path)
    (entry,) = tmp_path.iterdir()
    for position in (0, 31, 32, len(entry.read_bytes()) - 1):
        content = bytearray(entry.read_bytes())
        content[position] ^= 1
        entry.write_bytes(content)
        assert get(counting, tmp_path) == code
    assert counting.compiled == 5


def test_a_folder_that_cannot_be_made_costs_only_the_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    counting = Counting()
    for _ in range(2):
        assert get(counting, tmp_path / "file" / "kernels")
    assert counting.compiled == 2


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('#include "gpu.h"\nextern "C" __global__ void f(int* x) {\n  *x = unheard_of;\n}\n', "unheard_of"),
        ('#include "missing.h"\n', "missing.h"),
        ("#error no such format\n", "no such format"),
    ],
)
def test_compilers_name_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: Vendor, text: str, said: str
) -> None:
    rtc = compiler.load(vendor)
    if rtc is None:
        pytest.skip(f"no run-time compiler for {vendor}")
    (tmp_path / "gpu.h").write_text((kernels.directory() / "gpu.h").read_text())
    (tmp_path / "bad.cu").write_text(text)
    monkeypatch.setattr(kernels, "directory", lambda: tmp_path)
    arch, lanes = ("sm_80", 32) if vendor == "cuda" else ("gfx90a", 64)
    with pytest.raises(DeviceError, match=rf"kernels/bad\.cu N=1 for {arch}: .*{said}") as caught:
        rtc.compile(KernelBuild.of("bad", {"N": 1}), arch, lanes)
    assert "\n" not in str(caught.value)


def test_an_nvrtc_newer_than_the_driver_is_not_taken() -> None:
    rtc = compiler.load("cuda")
    if rtc is None:
        pytest.skip("no NVRTC")
    assert compiler.load("cuda", 11) is None


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("x.cu(3): warning: y\nx.cu(4): error: z\nmore", "x.cu(4): error: z"),
        ("\n  one line \n", "one line"),
        ("", "the compiler gave no reason"),
    ],
)
def test_first_error(log: str, line: str) -> None:
    assert first_error(log) == line


def test_what_is_kept_is_found(tmp_path: Path) -> None:
    counting = Counting()
    compiler.store(cast(RuntimeCompiler, counting), BUILD, "sm_90a", 32, b"made elsewhere", tmp_path)
    assert get(counting, tmp_path) == b"made elsewhere"
    assert counting.compiled == 0
    assert get(counting, tmp_path, arch="sm_80") != b"made elsewhere"
