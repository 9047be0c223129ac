"""Machine code of compiled functions on disk, and its way into memory without numba, whose import takes half a second.

A file has the functions of a group of kernels, and facts about them. Its folder's name has a digest of all that machine
code depends on: the sources of this package, the compiler, the CPU and its features, the interpreter and NumPy, whose
objects the functions read. A file begins with the SHA-256 of the rest; one that is damaged, or that another user could
have written, is compiled anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import logging
import os
import struct
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from luce.config.directories import refusal, user_cache_directory
from luce.decoders import msgpack_decoder

_log = logging.getLogger(__name__)
_DIGEST = hashlib.sha256().digest_size
# Words of a function that Python calls, by the letter of an argument: the address of an array's object, an integer, a
# float32, and whether something holds.
_WORDS = {"a": "q", "q": "q", "f": "f4x", "?": "?7x"}
_Words = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p)
# Engines own the code of their functions, which threads may run until the process ends.
_engines: list[Any] = []


class CompiledFunction(msgspec.Struct, frozen=True, array_like=True):
    """The object file of a function."""

    code: bytes
    #: of a function that Python calls, a letter for each argument; None: of a kernel
    arguments: str | None


class Group(msgspec.Struct, frozen=True):
    """Compiled functions by name, and what their callers need to know."""

    functions: dict[str, CompiledFunction]
    facts: dict[str, int | str | bool]


class BoundCall:
    """A call of a function with arguments that are fixed, for luce.cpu_kernels.thread_pool.CallSequence."""

    def __init__(self, name: str, function: int, words: bytes, arguments: Sequence[Any]) -> None:
        self._name = name
        #: the address of the function, and its words (jit.py)
        self.function = function
        self.words = np.frombuffer(words, np.int64).copy()
        # The words have these objects' addresses.
        self._arguments = arguments

    def error(self, wrong: int) -> TypeError:
        """That argument `wrong`, from 1 on, is no array of its type."""
        return _no_array(self._name, wrong, self._arguments[wrong - 1])


class PythonFunction:
    """A compiled function of arrays and numbers. ctypes releases the interpreter's lock while it runs."""

    def __init__(self, name: str, address: int, arguments: str) -> None:
        """`arguments`: a letter each (a: array, q: int64, f: float32, ?: boolean)."""
        self._name = name
        self._address = address
        self._function = _Words(address)
        self._pack = struct.Struct("q" + "".join(_WORDS[letter] for letter in arguments)).pack
        self._arrays = [letter == "a" for letter in arguments]
        self._type = id(np.ndarray)

    def bind(self, *arguments: Any) -> BoundCall:
        """A call with these arguments, which are checked when it is made."""
        return BoundCall(self._name, self._address, self._words(arguments), arguments)

    def _words(self, arguments: Sequence[Any]) -> bytes:
        own = [id(each) if array else each for array, each in zip(self._arrays, arguments, strict=True)]
        return self._pack(self._type, *own)

    def __call__(self, *arguments: Any) -> None:
        """Raises TypeError for an array of another dtype, number of axes or layout than the function takes."""
        if wrong := self._function(self._words(arguments)):
            raise _no_array(self._name, wrong, arguments[wrong - 1])


def _no_array(name: str, number: int, given: Any) -> TypeError:
    what = f"{given.dtype} {given.shape}" if isinstance(given, np.ndarray) else type(given).__name__
    return TypeError(f"{name}: argument {number} is no array of its type: {what}")


class LoadedGroup:
    """A group in memory."""

    def __init__(self, group: Group) -> None:
        self.facts = group.facts
        self._functions = group.functions
        self._engine = _load(group)

    def address(self, name: str) -> int:
        """That of a kernel."""
        return int(self._engine.get_function_address(symbol(name)))

    def function(self, name: str) -> PythonFunction:
        """One that Python calls."""
        arguments = self._functions[name].arguments
        assert arguments is not None
        return PythonFunction(name, self.address(name), arguments)


def symbol(name: str) -> str:
    """That of a function in its object file, which must be none of the C library, such as `write`."""
    return f"luce_{name}"


def load(name: str, compile_group: Callable[[], Group], directory: Path | None = None) -> LoadedGroup:
    """The group of a name: from its file in `directory` (default: the user's for this package and machine), else
    compiled, and stored there. Where nothing can be stored, the log says so."""
    path = (_directory() if directory is None else directory) / f"{name}.bin"
    group = _read(path)
    if group is None:
        group = compile_group()
        _write(path, group)
    return LoadedGroup(group)


def _load(group: Group) -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    for function in group.functions.values():
        engine.add_object_file(llvm.ObjectFileRef.from_data(function.code))
    engine.finalize_object()
    _engines.append(engine)
    return engine


@cache
def _directory() -> Path:
    import llvmlite
    import llvmlite.binding as llvm

    compiler = importlib.util.find_spec("numba")
    assert compiler is not None and compiler.origin is not None
    digest = hashlib.sha256()
    # Without importlib.metadata, whose import takes longer than all of this.
    for source in (Path(compiler.origin).with_name("_version.py"), *sorted(Path(__file__).parent.glob("*.py"))):
        digest.update(source.read_bytes())
    features: Mapping[str, bool] = llvm.get_host_cpu_features()
    machine = llvm.get_host_cpu_name(), *sorted(name for name, there in features.items() if there)
    versions = llvmlite.__version__, str(llvm.llvm_version_info), np.__version__, sysconfig.get_config_var("SOABI")
    digest.update("\n".join(map(str, (*machine, *versions))).encode())
    return user_cache_directory() / "cpu" / digest.hexdigest()[:16]


def _read(path: Path) -> Group | None:
    """A group from its file; None if there is none that is whole and this user's own."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            if reason := refusal(os.fstat(file.fileno())) or refusal(path.parent.stat()):
                _log.warning("%s: not used: %s", path, reason)
                return None
            content = file.read()
    except OSError:
        return None
    with contextlib.suppress(msgspec.MsgspecError):
        if hashlib.sha256(content[_DIGEST:]).digest() == content[:_DIGEST]:
            group: Group = msgpack_decoder(Group).decode(content[_DIGEST:])
            return group
    _log.warning("%s: damaged; its kernels are compiled again", path)
    return None


def _write(path: Path, group: Group) -> None:
    content, temporary = msgspec.msgpack.encode(group), ""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            temporary = file.name
            file.write(hashlib.sha256(content).digest() + content)
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        _log.warning("%s: cannot be written to (%s); these kernels are compiled at each start", path, error.strerror)
