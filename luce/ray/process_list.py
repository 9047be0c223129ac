"""The processes of a node: `luce ray up` writes them down, `luce ray down` ends these and no others.

`ray stop` would end every Ray process of the machine, by its name. A process id may be another process's by now, so the
time at which a process started, in ticks since the machine did, is part of its identity.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from luce.errors import UsageError


class Process(NamedTuple):
    """A process, whose id alone could be another's later."""

    pid: int
    #: ticks between the start of the machine and its own
    started: int


def process(pid: int) -> Process | None:
    """The process with an id, None if there is none, or a zombie."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else Process(pid, int(fields[19]))


def runs(known: Process) -> bool:
    """Whether a process still runs."""
    return process(known.pid) == known


def descendants(roots: Iterable[int]) -> list[Process]:
    """The processes with these ids and all below them, parents first."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (fields := _stat(int(path.name))) is not None:
            children.setdefault(int(fields[1]), []).append(int(path.name))
    found, todo = list[Process](), list(roots)
    while todo:
        pid = todo.pop(0)
        if (known := process(pid)) is not None:
            found.append(known)
        todo += children.get(pid, [])
    return found


def write(path: Path, processes: Collection[Process]) -> None:
    """Keep the list, readable by this user alone."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump([list(each) for each in processes], file)
    temporary.replace(path)


def read(path: Path) -> list[Process]:
    """The list, empty without a file. Raises UsageError if it is none."""
    try:
        return [Process(int(pid), int(started)) for pid, started in json.loads(path.read_text())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path}: no list of processes: {error}", param="config") from None


def end(processes: Collection[Process], seconds: float) -> int:
    """End these processes: SIGTERM, and after `seconds` SIGKILL. Returns how many still ran."""
    running = [each for each in processes if runs(each)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for each in running:
            if runs(each):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each.pid, number)
        deadline = time.monotonic() + seconds
        while any(map(runs, running)) and time.monotonic() < deadline:
            time.sleep(0.05)
    return len(running)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat behind the name: state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
