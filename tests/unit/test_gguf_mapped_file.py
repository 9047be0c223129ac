"""Files that are mapped under a lease, and programs that write to them meanwhile."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from luce.errors import ModelError
from luce.gguf.model_file import FileRows, ModelFile

SIZE = 5 * 4096 + 100


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(np.random.default_rng(7).bytes(SIZE))
    return path


def mapped_bytes(path: Path) -> int:
    """The size of this process's mappings of a file."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(
        int(end, 16) - int(begin, 16)
        for begin, end in (line.split()[0].split("-") for line in lines if line.endswith(str(path)))
    )


def test_bytes_in_use_are_not_copied(path: Path) -> None:
    file = ModelFile(path)
    held = FileRows(file, 4096, (2, 4096)).held()
    assert held.tobytes() == path.read_bytes()[4096 : 3 * 4096] and not held.flags.writeable
    assert np.shares_memory(held, file.hold(8192, 4)) and mapped_bytes(path) >= SIZE
    # The arrays keep the mapping behind the file's end.
    file.close()
    assert mapped_bytes(path) >= SIZE and held[1].tobytes() == path.read_bytes()[8192 : 3 * 4096]
    del held
    gc.collect()
    assert mapped_bytes(path) == 0


def zero(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(SIZE))


CHANGES = {
    "truncated": lambda path: os.truncate(path, 0),
    "emptied by a copy": lambda path: path.write_bytes(b"new"),
    "filled with zeros": zero,
}


@pytest.mark.parametrize("change", CHANGES)
def test_bytes_in_use_stay_as_they_were(change: str, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = path.read_bytes()
    file = ModelFile(path)
    # The first and the last page, and none between them.
    held = [(file.hold(at, size), at, size) for at, size in ((8, 40), (SIZE - 64, 64))]
    with caplog.at_level(logging.WARNING):
        CHANGES[change](path)
    assert [array.tobytes() for array, _, _ in held] == [whole[at : at + size] for _, at, size in held]
    assert f"{path}: another program opens it for writing; copied 8192 bytes to memory" in caplog.text
    with pytest.raises(ModelError, match="was changed while it was read"):
        file.hold(8, 40)


def test_a_thread_that_reads_meanwhile_sees_no_other_bytes(path: Path) -> None:
    held = ModelFile(path).hold(0, SIZE)
    expected, wrong, stop = int(held.sum(dtype=np.int64)), [], threading.Event()

    def read() -> None:
        while not stop.is_set():
            if (found := int(held.sum(dtype=np.int64))) != expected:
                wrong.append(found)

    reader = threading.Thread(target=read)
    reader.start()
    os.truncate(path, 0)
    stop.set()
    reader.join()
    assert not wrong and int(held.sum(dtype=np.int64)) == expected


def test_a_file_that_is_open_for_writing_is_read(path: Path) -> None:
    with path.open("r+b"):
        held = ModelFile(path).hold(0, SIZE)
    assert held.tobytes() == path.read_bytes() and mapped_bytes(path) == 0


def test_words_lie_at_multiples_of_their_size(path: Path) -> None:
    held = ModelFile(path).hold(6, 64)
    assert held.tobytes() == path.read_bytes()[6:70] and held.ctypes.data % 4 == 0


def test_a_change_between_opening_and_mapping_is_noticed(path: Path) -> None:
    file = ModelFile(path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(ModelError, match="was changed while it was read"):
        file.hold(0, 64)


def test_a_writer_of_another_process_waits_for_the_copy(path: Path) -> None:
    """And one that comes when no array is left waits for none."""
    whole, file = path.read_bytes(), ModelFile(path)
    held = file.hold(0, SIZE)
    command = [sys.executable, "-c", f"import os; os.truncate({str(path)!r}, 0)"]
    subprocess.run(command, check=True, timeout=40)
    assert held.tobytes() == whole and path.stat().st_size == 0
    path.write_bytes(whole)
    other = ModelFile(path)
    again = other.hold(0, SIZE)
    other.close()
    del again
    gc.collect()
    subprocess.run(command, check=True, timeout=40)
    assert path.stat().st_size == 0


def test_bytes_that_cannot_be_copied_stop_the_process_by_name(path: Path) -> None:
    program = f"""
import os, signal, sys, threading, time
from pathlib import Path
from luce.gguf import mapped_file
from luce.gguf.model_file import ModelFile

stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
held = ModelFile(Path({str(path)!r})).hold(0, 64)
os.preadv = lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error"))
threading.Thread(target=os.truncate, args=({str(path)!r}, 0), daemon=True).start()
# Another thread may get the signal, which interrupts no wait of this one.
for _ in range(600):
    if stopped:
        os._exit(0)
    time.sleep(0.05)
os._exit(1)
"""
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 0 and f"{path}: is written to and cannot be copied (Input/output error)" in done.stderr
