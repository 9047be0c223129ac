"""The vendors' run-time compilers by ctypes, and the disk cache of what they build.

CuPy could compile too, but it always asks for flushed denormals (CuPy 14.2 appends -ftz=true), and the key of its disk
cache leaves out included headers.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import tempfile
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import NamedTuple

from luce.config.directories import user_cache_directory
from luce.errors import DeviceError
from luce.runtime import kernels
from luce.runtime.driver import Vendor
from luce.runtime.kernels import KernelBuild
from luce.runtime.library import open_library

_DIGEST = 32
#: option by which hiprtc and clang do not fuse a product and a sum by themselves
CLANG_ARITHMETIC = "-ffp-contract=off"


class Compiled(NamedTuple):
    """A module for the driver (cubin or code object), and the compiler's log."""

    code: bytes
    log: str


class RuntimeCompiler:
    """NVRTC or hiprtc: one interface under two prefixes. As thread-safe as the vendor's library."""

    def __init__(self, vendor: Vendor, library: ctypes.CDLL, path: str) -> None:
        self.vendor = vendor
        self.path = path
        self._library = library
        self._prefix, self._code = ("nvrtc", "CUBIN") if vendor == "cuda" else ("hiprtc", "Code")
        major, minor = c_int(), c_int()
        self._call("Version", byref(major), byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, self._prefix + name)(*arguments)
        if status:
            describe = getattr(self._library, self._prefix + "GetErrorString")
            describe.restype = c_char_p
            raise DeviceError(f"{self._prefix}{name}: {describe(status).decode()} ({status})")

    def _text(self, program: c_void_p, name: str) -> bytes:
        size = c_size_t()
        self._call(f"Get{name}Size", program, byref(size))
        buffer = ctypes.create_string_buffer(max(1, size.value))
        self._call(f"Get{name}", program, buffer)
        return buffer.raw[: size.value]

    def options(self, build: KernelBuild, arch: str, lanes: int) -> tuple[str, ...]:
        """All options of a build for a target (`sm_90a`, `gfx90a`)."""
        if self.vendor == "cuda":
            return (f"-arch={arch}", "--fmad=false", *build.options(lanes))
        return (f"--offload-arch={arch}", CLANG_ARITHMETIC, *build.options(lanes))

    def compile(self, build: KernelBuild, arch: str, lanes: int, extra: tuple[str, ...] = ()) -> Compiled:
        """Compile one build. Raises DeviceError naming source, defines, target and the first error."""
        options = [option.encode() for option in (*self.options(build, arch, lanes), *extra)]
        program = c_void_p()
        self._call(
            "CreateProgram", byref(program), build.path.read_bytes(), build.path.name.encode(), c_int(0), None, None
        )
        try:
            compiled = getattr(self._library, self._prefix + "CompileProgram")
            status = compiled(program, c_int(len(options)), (c_char_p * len(options))(*options))
            log = self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            if status:
                raise DeviceError(f"{build} for {arch}: {first_error(log)}")
            return Compiled(self._text(program, self._code), log)
        finally:
            self._call("DestroyProgram", byref(program))


def first_error(log: str) -> str:
    """The first line of a compiler's log that reports an error."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "the compiler gave no reason")


def _wheel_folders() -> tuple[Path, ...]:
    """Folders of NVIDIA's wheels that hold NVRTC: one folder for all of CUDA 13, one per library of CUDA 12."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    return tuple(root / sub / "lib" for root in roots for sub in ("cu13", "cuda_nvrtc"))


def load(vendor: Vendor, major: int | None = None) -> RuntimeCompiler | None:
    """A vendor's run-time compiler, None if not installed.

    `major` is the newest CUDA that the driver runs: it cannot load the modules of a newer NVRTC.
    """
    if vendor == "cuda":
        names = tuple(f"libnvrtc.so.{n}" for n in (13, 12) if major is None or n <= major)
        folders: tuple[str | Path, ...] = (*_wheel_folders(), "/usr/local/cuda/lib64")
    else:
        # Up to ROCm 5 the compiler is part of the HIP library.
        names = ("libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5", "libamdhip64.so.5")
        folders = ("/opt/rocm/lib",)
    found = open_library(names, folders)
    if found is None:
        return None
    if vendor == "cuda":
        _open_builtins(Path(found[1]).parent)
    return RuntimeCompiler(vendor, *found)


def _open_builtins(folder: Path) -> None:
    """Load the library that NVRTC loads by its name: 13.0 does not find it beside itself, but where it is loaded."""
    for path in folder.glob("libnvrtc-builtins.so.*"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(path))


def cached(compiler: RuntimeCompiler, build: KernelBuild, arch: str, lanes: int, folder: Path | None = None) -> bytes:
    """The module of a build, from the cache in `folder` (default: the user's); a miss compiles and stores it."""
    entry = _entry(compiler, build, arch, lanes, folder)
    with contextlib.suppress(OSError):
        content = entry.read_bytes()
        if hashlib.sha256(content[_DIGEST:]).digest() == content[:_DIGEST]:
            return content[_DIGEST:]
    code = compiler.compile(build, arch, lanes).code
    store(compiler, build, arch, lanes, code, folder)
    return code


def store(
    compiler: RuntimeCompiler, build: KernelBuild, arch: str, lanes: int, code: bytes, folder: Path | None = None
) -> None:
    """Store a module where `cached` finds it. If the folder is not writable, nothing is stored and nothing fails."""
    entry = _entry(compiler, build, arch, lanes, folder)
    with contextlib.suppress(OSError):
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=entry.parent, prefix=".", delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(file.name, entry)


def _entry(compiler: RuntimeCompiler, build: KernelBuild, arch: str, lanes: int, folder: Path | None) -> Path:
    """The cache file of a build. The key covers everything that affects the result. A file begins with the SHA-256 of
    the rest, so a torn or foreign file is a miss."""
    folder = user_cache_directory() / "kernels" if folder is None else folder
    # The include path names the place of the sources, not their content.
    options = [o for o in compiler.options(build, arch, lanes) if not o.startswith("-I")]
    content = "\n".join((kernels.fingerprint(), build.source, compiler.vendor, compiler.version, *options))
    return folder / f"{build.source}-{hashlib.sha256(content.encode()).hexdigest()}.bin"
