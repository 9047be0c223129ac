"""Kernels as shared libraries for the emulated device (emulated.py): g++ compiles them, the user's cache keeps them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from luce.config.directories import user_cache_directory
from luce.errors import DeviceError

#: the folder of the project's kernels
KERNELS = Path(__file__).parents[2] / "kernels"
_EMULATOR = Path(__file__).with_name("emulator.cpp")

_COMMON = ("g++", "-std=c++17", "-gdwarf-4", "-fPIC", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-w")
# Without tree-sra a vector is read at once, so that its alignment is seen. Without thread-jumps a call stays one call:
# duplicated on two paths, lanes would seem to wait at different places. GNU-unique symbols
# would be shared by all variants of a source.
_KERNEL_FLAGS = ("-O1", "-fsanitize=thread", "-fno-thread-jumps", "-fno-tree-sra", "-fno-gnu-unique", "-DLUCE_HOST")


def compile_source(kernels: Path, source: str, lanes: int, defines: dict[str, int | str]) -> tuple[Path, Path]:
    """The shared library of one source with its defines, and the source's path. Raises DeviceError."""
    path = kernels / f"{source}.cu"
    if not path.is_file():
        raise DeviceError(f"kernels/{source}.cu: no such kernel source")
    emulator()
    unit = f'#include "gpu.h"\n#include "{source}.cu"\n'
    options = (*_KERNEL_FLAGS, f"-DLUCE_LANES={lanes}", *(f"-D{k}={v}" for k, v in defines.items()))
    headers = {header.name: header for folder in (KERNELS, kernels) for header in folder.glob("*.h")}
    sources = (path, *(headers[name] for name in sorted(headers)))
    return _compile(f"{source}-{lanes}", unit, sources, options, (kernels, KERNELS)), path


@functools.cache
def emulator() -> ctypes.CDLL:
    """emulator.cpp, whose symbols the kernels' libraries resolve."""
    path = _compile("emulator", f'#include "{_EMULATOR.name}"\n', (_EMULATOR,), ("-O2",), (_EMULATOR.parent,))
    return ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_GLOBAL)


def _compile(name: str, unit: str, sources: Sequence[Path], options: Sequence[str], include: Sequence[Path]) -> Path:
    """A shared library of `unit`, from the cache if unit, sources, options and compiler are the same."""
    digest = hashlib.sha256(repr((unit, options, _COMMON, _compiler())).encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    folder = _cache()
    path = folder / f"{name}-{digest.hexdigest()[:32]}.so"
    if path.exists():
        path.touch()
        return path
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        main, linked = Path(scratch, "unit.cpp"), Path(scratch, "unit.so")
        main.write_text(unit, encoding="utf-8")
        compiled = str(main.with_suffix(".o"))
        # Equal sources share a library wherever they lie, so debuggers look for kernels/X.cu below the working folder.
        places = (f"-fdebug-prefix-map={folder}={folder.name}" for folder in include)
        command = (*_COMMON, *options, *(f"-I{folder}" for folder in include), *places)
        # The preprocessor knows which kernels this set of defines leaves, their names and their bounds.
        flat = _gpp(name, (*command, "-DLUCE_LIST_KERNELS", "-E", "-P", str(main)))
        kernels = re.findall(r"luce_global\s+void\s+(?:luce_bounds<([^;{]*?)>\s*)?(\w+)\s*\(", flat)
        lines = (f"LUCE_HOST_KERNEL({kernel}, {bound or 1024})\n" for bound, kernel in kernels)
        main.write_text(unit + "".join(lines), encoding="utf-8")
        # Two commands: with -fsanitize=thread the linker would add the sanitizer's own library.
        _gpp(name, (*command, "-c", str(main), "-o", compiled))
        _gpp(name, ("g++", "-shared", compiled, "-o", str(linked)))
        linked.replace(path)
    return path


@functools.cache
def _cache() -> Path:
    """The folder of the libraries, without those that no test has used for a week."""
    folder = user_cache_directory() / "emulated"
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.so"):
        if time.time() - path.stat().st_mtime > 7 * 86400:
            path.unlink(missing_ok=True)
    return folder


def _gpp(name: str, command: Sequence[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise DeviceError(f"{name}: g++ failed\n{result.stderr.strip()}")
    return result.stdout


@functools.cache
def _compiler() -> str:
    return subprocess.run(("g++", "--version"), capture_output=True, text=True, check=True).stdout.splitlines()[0]
