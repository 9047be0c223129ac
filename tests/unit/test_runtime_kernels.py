"""Kernel sources as data: variants, fingerprints, options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from luce.errors import DeviceError
from luce.runtime import kernels
from luce.runtime.kernels import KernelBuild


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel folder in place of the real one."""
    monkeypatch.setattr(kernels, "directory", lambda: tmp_path)
    monkeypatch.setattr(kernels, "fingerprint", kernels.hash_sources)
    return tmp_path


def write(folder: Path, text: str, name: str = "x.cu") -> None:
    (folder / name).write_text(text)


def test_variants_are_all_combinations_of_a_line(folder: Path) -> None:
    write(folder, "// variants: A=1,2 B=x,y_z,3\n// What it does.\nint a;\n")
    assert kernels.variants("x") == [{"A": a, "B": b} for a in ("1", "2") for b in ("x", "y_z", "3")]


def test_lines_add_up(folder: Path) -> None:
    write(folder, "// What it does.\n// variants: A=1,2\n//variants: A=3 B=1\n// variants:\n\n// variants: A=9\n")
    assert kernels.variants("x") == [{"A": "1"}, {"A": "2"}, {"A": "3", "B": "1"}, {}]


def test_lines_for_one_vendor(folder: Path) -> None:
    write(folder, "// variants for cuda: A=1\n// variants: A=2\n// variants for hip: A=3\n")
    write(folder, "// variants for cuda: A=1\n", "y.cu")
    assert kernels.variants("x") == [{"A": "1"}, {"A": "2"}, {"A": "3"}]
    assert kernels.variants("x", "cuda") == [{"A": "1"}, {"A": "2"}]
    assert kernels.variants("x", "hip") == [{"A": "2"}, {"A": "3"}]
    assert [build.source for build in kernels.builds("hip")] == ["x", "x"]


@pytest.mark.parametrize("text", ["", "int a;\n// variants: A=1\n", "// no such line\n"])
def test_without_a_line_there_is_one_build(folder: Path, text: str) -> None:
    write(folder, text)
    assert kernels.variants("x") == [{}]


@pytest.mark.parametrize(
    "line",
    ["A", "A=", "A=1,", "A=1 A=2", "A=1,,2", "=1", "A=1;2", "A=1 B = 2", "1A=2", "A=1,1", "A=1\n// variants: A=1"],
)
def test_bad_variants_name_file_and_line(folder: Path, line: str) -> None:
    write(folder, f"// What it does.\n// variants: {line}\n")
    with pytest.raises(DeviceError, match=r"kernels/x\.cu:[23]: "):
        kernels.variants("x")


def test_unknown_source(folder: Path) -> None:
    with pytest.raises(DeviceError, match=r"kernels/y\.cu"):
        kernels.variants("y")


def test_fingerprint_follows_names_and_contents(folder: Path) -> None:
    write(folder, "a")
    write(folder, "b", "x.h")
    seen = {kernels.fingerprint()}
    write(folder, "c", "README.md")
    assert kernels.fingerprint() in seen
    for text, name in (("b2", "x.h"), ("a2", "x.cu"), ("a2", "y.cu")):
        write(folder, text, name)
        assert kernels.fingerprint() not in seen
        seen.add(kernels.fingerprint())
    (folder / "x.h").rename(folder / "z.h")
    assert kernels.fingerprint() not in seen


def test_builds_compare_by_meaning() -> None:
    assert KernelBuild.of("x", {"A": 1, "B": "b"}) == KernelBuild.of("x", {"B": "b", "A": "1"})
    assert KernelBuild.of("x") == KernelBuild.of("x", {}) != KernelBuild.of("x", {"A": 1})
    assert str(KernelBuild.of("x", {"B": 2, "A": 1})) == "kernels/x.cu A=1 B=2"


def test_options_hold_defines_and_lanes_and_relax_nothing() -> None:
    options = KernelBuild.of("fill", {"TYPE": "i32"}).options(64)
    assert {"-DTYPE=i32", "-DLUCE_LANES=64", f"-I{kernels.directory()}"} <= set(options)
    assert not [option for option in options if re.search("fast|ftz|flush|denormal", option)]


@pytest.mark.parametrize("source", kernels.sources())
def test_sources_of_this_repository(source: str) -> None:
    assert kernels.variants(source)
    text = (kernels.directory() / f"{source}.cu").read_text()
    included = re.findall(r'#\s*include\s*(["<][^">]*[">])', text)
    assert included and all((kernels.directory() / name.strip('"')).is_file() for name in included)
    entries = re.findall(r"__global__", text)
    assert len(entries) == len(re.findall(r'extern "C" __global__', text)) > 0
