"""Machine code on disk: compiled once, checked before it runs, and loaded without the compiler."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from luce.cpu_kernels.jit import compile_all, compiled, compiled_as
from luce.cpu_kernels.machine_code import Group, LoadedGroup, load


@compiled_as("void(int64, UniTuple(int64, 2), float32[:, :], float32, boolean, int64[::1])")
def gather(slot, addends, x, factor, negative, out):  # type: ignore[no-untyped-def]
    """out = x * factor by rows, plus slot and both addends."""
    for row in range(x.shape[0]):
        for column in range(x.shape[1]):
            value = int(x[row, column] * factor)
            if negative:
                value = -value
            out[row * x.shape[1] + column] = value + slot + addends[0] + addends[1]


@cache
def group() -> Group:
    """Compiled where it is used: each process of xdist would import seconds of compiling."""
    return Group(compile_all({"gather": gather}), {"answer": 42})


X = np.arange(24, dtype=np.float32).reshape(4, 6)


def no_compiler() -> Group:
    raise AssertionError("the file is there")


def check(loaded: LoadedGroup) -> None:
    assert loaded.facts == {"answer": 42}
    out, x = np.zeros(6, np.int64), X[::2, ::2]
    loaded.function("gather")(1 << 40, 2, 3, x, np.float32(0.5), True, out)
    assert (out == (1 << 40) + 5 - (x * np.float32(0.5)).astype(np.int64).ravel()).all()


def test_a_group_is_compiled_once_and_then_read(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    check(load("some", group, folder))
    check(load("some", no_compiler, folder))
    assert [path.name for path in folder.iterdir()] == ["some.bin"]
    assert folder.stat().st_mode & 0o777 == 0o700 and (folder / "some.bin").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "damage", [lambda code: code[:-1], lambda code: b"", lambda code: code[:999] + b"~" + code[1000:]]
)
def test_a_damaged_file_is_compiled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    load("some", group, tmp_path)
    file = tmp_path / "some.bin"
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    check(load("some", group, tmp_path))
    assert "some.bin: damaged; its kernels are compiled again" in caplog.text
    assert file.read_bytes() == whole


@pytest.mark.parametrize("open_to_all", ["some.bin", "."])
def test_code_that_others_could_have_written_does_not_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, open_to_all: str
) -> None:
    load("some", group, tmp_path)
    foreign = Group(group().functions, {"answer": 43})
    mode = (tmp_path / open_to_all).stat().st_mode
    (tmp_path / open_to_all).chmod(mode | 0o002)
    assert load("some", lambda: foreign, tmp_path).facts == {"answer": 43}
    assert "everybody may write to it" in caplog.text


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    load("some", group, tmp_path)
    (tmp_path / "other.bin").symlink_to(tmp_path / "some.bin")
    foreign = Group(group().functions, {"answer": 43})
    assert load("other", lambda: foreign, tmp_path).facts == {"answer": 43}
    assert not (tmp_path / "other.bin").is_symlink()


def test_a_folder_that_cannot_be_made_costs_only_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    check(load("some", group, tmp_path / "file" / "folder"))
    assert "cannot be written to (Not a directory); these kernels are compiled at each start" in caplog.text


OUT = np.zeros(24, np.int64)


@pytest.mark.parametrize(
    ("x", "out", "wrong"),
    [
        (X.astype(np.float64), OUT, "argument 4 is no array of its type: float64 (4, 6)"),
        (X.astype(np.int32), OUT, "argument 4 is no array of its type: int32 (4, 6)"),
        (X[0], OUT, "argument 4 is no array of its type: float32 (6,)"),
        # Its memory is that of an array, but its operations may be others.
        (X.view(np.matrix), OUT, "argument 4 is no array of its type: float32 (4, 6)"),
        (X.tolist(), OUT, "argument 4 is no array of its type: list"),
        (X, OUT.reshape(4, 6), "argument 7 is no array of its type: int64 (4, 6)"),
        (X, np.zeros(48, np.int64)[::2], "argument 7 is no array of its type: int64 (24,)"),
        (X, np.frombuffer(bytes(192), np.int64), "argument 7 is no array of its type: int64 (24,)"),
        (X, None, "argument 7 is no array of its type: NoneType"),
    ],
)
def test_an_array_of_another_type_is_refused(x: object, out: object, wrong: str) -> None:
    with pytest.raises(TypeError) as error:
        LoadedGroup(group()).function("gather")(0, 0, 0, x, 1.0, False, out)
    assert str(error.value) == f"gather: {wrong}"


def test_the_number_of_arguments_counts() -> None:
    with pytest.raises(ValueError, match="shorter"):
        LoadedGroup(group()).function("gather")(0, 0, 0, X, 1.0, False)


def test_what_numba_would_allocate_is_refused() -> None:
    @compiled
    def kernel(arguments, part, scratch):  # type: ignore[no-untyped-def]
        np.empty(arguments, np.int64)[part] = scratch

    with pytest.raises(AssertionError, match=r"kernel calls .*NRT"):
        compile_all({"kernel": kernel})


def test_a_filled_cache_needs_no_compiler() -> None:
    program = """
import sys
from luce.cpu_kernels.catalogue import format_kernels, kernels
from luce.cpu_kernels.thread_pool import Pool
made = kernels()
Pool(2, made.scratch, made.work, made.replay).close()
assert made.instructions and format_kernels(3).one_row and made.gated_delta_net.function
print("numba" in sys.modules)
"""
    ran = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert ran[1] == "False\n"
