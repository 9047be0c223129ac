"""CuPy, which is optional: imported when the first GPU is opened, so that Luce runs without it."""

from __future__ import annotations

from typing import Any

from luce.errors import DeviceError
from luce.runtime.device import DeviceName
from luce.runtime.driver import Vendor

#: the extras of this package that bring a vendor's CuPy and run-time compiler
EXTRAS: dict[Vendor, str] = {
    "cuda": "luce-llm[cuda13] (or luce-llm[cuda12] for older drivers)",
    "hip": "luce-llm[rocm]",
}


def cupy_vendor() -> Vendor | None:
    """The vendor whose GPUs this environment's CuPy drives, None without CuPy."""
    try:
        import cupy
    except ImportError:
        return None
    return "hip" if cupy.cuda.runtime.is_hip else "cuda"


def import_cupy(name: DeviceName, kind: Vendor) -> Any:
    """The module, for a device of one vendor. Raises DeviceError if it is missing or drives the other vendor's GPUs."""
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(f"{name} needs CuPy: install {EXTRAS[kind]}") from error
    if cupy.cuda.runtime.is_hip != (kind == "hip"):
        other = "HIP" if kind == "cuda" else "CUDA"
        raise DeviceError(f"{name}: the CuPy of this environment is for {other}: install {EXTRAS[kind]} in another one")
    return cupy
