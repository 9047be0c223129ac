"""A driver without hardware: fake_cuda.c as a loaded Driver."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from luce.runtime.driver import Driver


def fake_driver(folder: Path) -> Driver:
    """Compile and load the library in `folder`, a new one every time: its state is its own."""
    library = folder / "libfake_cuda.so"
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", str(library), str(source)], check=True)
    return Driver("cuda", ctypes.CDLL(str(library)), str(library))
