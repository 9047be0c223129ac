"""Kernel sources as data: their folder, their hash, their variants and compiler options.

kernels/README.md has the conventions of the sources.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from luce.errors import DeviceError
from luce.runtime.driver import Vendor

_VARIANTS = re.compile(r"//\s*variants(?: for (cuda|hip))?:(.*)")
_DEFINE = re.compile(r"([A-Za-z_]\w*)=(\w+(?:,\w+)*)")


@cache
def directory() -> Path:
    """The folder of the sources: inside the installed package, or beside it in a checkout."""
    package = Path(str(importlib.resources.files("luce")))
    inside = package / "kernels"
    return inside if inside.is_dir() else package.parent / "kernels"


def sources() -> list[str]:
    """Names of all sources, without `.cu`."""
    return sorted(path.stem for path in directory().glob("*.cu"))


@cache
def fingerprint() -> str:
    """`hash_sources`, once per process: part of every cache key, since a kernel depends on the headers it includes."""
    return hash_sources()


def hash_sources() -> str:
    """SHA-256 over all sources and headers."""
    digest = hashlib.sha256()
    for path in sorted((*directory().glob("*.cu"), *directory().glob("*.h"))):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@dataclass(frozen=True)
class KernelBuild:
    """One source with one set of defines, which a compiler turns into one module."""

    source: str
    defines: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, source: str, defines: Mapping[str, int | str] | None = None) -> KernelBuild:
        """A build from a launch's arguments; the order of the defines does not matter."""
        return cls(source, tuple(sorted((name, str(value)) for name, value in (defines or {}).items())))

    @property
    def path(self) -> Path:
        """The source file. Raises DeviceError if there is none."""
        path = directory() / f"{self.source}.cu"
        if not path.is_file():
            raise DeviceError(f"kernels/{self.source}.cu: no such kernel source")
        return path

    def options(self, lanes: int) -> tuple[str, ...]:
        """Options for every compiler. None relaxes arithmetic: denormals, division and square roots are exact.

        Each compiler also has an option against fusing products and sums by itself (kernels call fmaf instead): a row
        then has the same bits in every variant of a kernel, and on the emulated device if the kernel calls no function
        of the math library.
        """
        return (
            "-std=c++17",
            f"-I{directory()}",
            f"-DLUCE_LANES={lanes}",
            *(f"-D{name}={value}" for name, value in self.defines),
        )

    def __str__(self) -> str:
        return " ".join((f"kernels/{self.source}.cu", *(f"{name}={value}" for name, value in self.defines)))


def variants(source: str, vendor: Vendor | None = None) -> list[dict[str, str]]:
    """The sets of defines that a source is built with, from the `// variants:` lines at its top.

    A line lists the values of each define and stands for all combinations; several lines add up. A line without
    defines, like a file without lines, stands for the build without defines. Other vendors skip a line that begins with
    `// variants for cuda:`. Raises DeviceError naming file and line.
    """
    found: list[dict[str, str]] = []
    lines = 0
    for number, line in enumerate(KernelBuild(source).path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("//"):
            break
        match = _VARIANTS.match(line)
        if match is None:
            continue
        lines += 1
        axes: dict[str, list[str]] = {}
        only, words = match.groups()
        for word in words.split():
            define = _DEFINE.fullmatch(word)
            if define is None or define.group(1) in axes:
                raise DeviceError(f"kernels/{source}.cu:{number}: expected NAME=V1,V2 once per name, got {word!r}")
            axes[define.group(1)] = define.group(2).split(",")
        if only and vendor and only != vendor:
            continue
        for values in itertools.product(*axes.values()):
            variant = dict(zip(axes, values, strict=True))
            if variant in found:
                raise DeviceError(f"kernels/{source}.cu:{number}: {variant} is listed twice")
            found.append(variant)
    return found if lines else [{}]


def builds(vendor: Vendor | None = None) -> list[KernelBuild]:
    """Every variant of every source, or those for one vendor."""
    return [KernelBuild.of(source, variant) for source in sources() for variant in variants(source, vendor)]
