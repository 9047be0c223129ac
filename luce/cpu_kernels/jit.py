"""Decorators of compiled functions, and the folder that keeps their machine code.

numba keeps machine code beside the CPU's name and features. The folder's name has a digest of all sources of this
package and the compiler's version, as numba looks at the file of a function alone, not at those that it calls.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

from luce.config.directories import user_cache_directory

_log = logging.getLogger(__name__)


def _folder() -> Path:
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    folder = user_cache_directory() / "cpu" / digest.hexdigest()[:16]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    _log.warning("%s: cannot be written to; the kernels of the CPU are compiled at each start", folder)
    return Path(tempfile.mkdtemp(prefix="luce-cpu-"))


FOLDER = _folder()
# Read where a function is decorated, so this module comes before all others of the package.
numba.config.CACHE_DIR = str(FOLDER)

# Arithmetic as NumPy's: no exception for a division by zero. No fast-math: bits do not depend on the compiler's choice.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def compiled(function: Callable[..., Any]) -> Any:
    """A function that compiled functions call; compiled for the types of each call."""
    return numba.njit(cache=True, **_OPTIONS)(function)


def compiled_as(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """A function of this signature that Python calls, without the interpreter's lock."""
    return numba.njit(signature, cache=True, **_OPTIONS)  # type: ignore[no-any-return]


def inlined(function: Callable[..., Any]) -> Any:
    """A function whose calls are replaced by its body, so that numbers in a call stay constants."""
    return numba.njit(inline="always", **_OPTIONS)(function)


def c_function(function: Any, arguments: int = 3) -> Any:
    """The C function of a compiled one that takes int64 and returns nothing: `.address`. Kernels of
    luce.cpu_kernels.thread_pool.Pool take (arguments, part, scratch)."""
    signature = f"void({', '.join(['int64'] * arguments)})"
    return numba.cfunc(signature, cache=True, error_model="numpy")(function.py_func)
