"""Writes, extends and evicts snapshots until it is killed: in its own process, one fork for each kill.

    python -m tests.crash.writer steps DIRECTORY           killed before its 1st, 2nd, ... call that changes the disk
    python -m tests.crash.writer times DIRECTORY ROUNDS    killed at random times, always in the same directory

Prints what was found afterwards; an assertion that fails ends it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from luce.kvcache.disk.store import Store, StoreFullError
from luce.runtime.step import PAGE, Int32
from tests.support import snapshots

#: calls that change what is found after a kill, `open` where it creates a file; what others leave is found before the
#: next of these as well
_CALLS = ("open", "rename", "replace", "mkdir", "unlink", "rmdir", "write", "utime")


def conversations() -> list[Int32]:
    """Three turns of one conversation, another one that shares its first pages, and a third."""
    rng = np.random.default_rng(0)
    one = rng.integers(0, 1000, 6 * PAGE + 20).astype(np.int32)
    other = np.concatenate([one[: 2 * PAGE + 10], rng.integers(0, 1000, 3 * PAGE).astype(np.int32)])
    return [one[: 2 * PAGE + 10], one[: 4 * PAGE], one, other, rng.integers(0, 1000, PAGE + 1).astype(np.int32)]


def work(root: Path, budget: int) -> None:
    """Everything that a store does to its directory."""
    store = Store(root, snapshots.MODEL, budget)
    first, second, third, other, last = conversations()
    for ids in (first, second, third, other):
        with contextlib.suppress(StoreFullError):
            snapshots.write(store, ids, interim=True)
    for snapshot in store.find(third)[1:]:
        store.mark_used(snapshot)
        store.evict(snapshot)
    # The snapshots that lost their state get it back; then the budget evicts others.
    for ids in (second, last):
        with contextlib.suppress(StoreFullError):
            snapshots.write(store, ids)
    for snapshot in store.snapshots:
        if snapshot.manifest.length == len(other):
            store.evict(snapshot)


def die_at(step: int) -> None:
    """End this process before the call number `step` of those that change the disk."""
    count = itertools.count()

    def counted(call: Any) -> Any:
        opens = call is os.open

        def wrapper(*args: Any, **more: Any) -> Any:
            if not (opens and not args[1] & os.O_CREAT) and next(count) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **more)

        return wrapper

    for name in _CALLS:
        setattr(os, name, counted(getattr(os, name)))


def killed_in_steps(root: Path) -> None:
    counts = []
    for step in itertools.count():
        place = root / "steps"
        shutil.rmtree(place, ignore_errors=True)
        child = os.fork()
        if not child:
            die_at(step)
            work(place, 20_000)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"step {step}: status {status}"
        if place.exists():
            counts.append(snapshots.sound(place, conversations()))
        if not os.WIFSIGNALED(status):
            break
    print(f"steps {step} snapshots {min(counts)}..{max(counts)}")


def killed_at_times(root: Path, rounds: int) -> None:
    random.seed(0)
    found: list[int] = []
    for number in range(rounds):
        child = os.fork()
        if not child:
            place = root / "times"
            while True:
                work(place, 20_000 if number % 2 else 0)
        time.sleep(random.expovariate(1 / 0.03))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"round {number}: it ended by itself, status {status}"
        found.append(snapshots.sound(root / "times", conversations()))
    print(f"rounds {rounds} snapshots {min(found)}..{max(found)}")


if __name__ == "__main__":
    directory = Path(sys.argv[2])
    if sys.argv[1] == "steps":
        killed_in_steps(directory)
    else:
        killed_at_times(directory, int(sys.argv[3]))
