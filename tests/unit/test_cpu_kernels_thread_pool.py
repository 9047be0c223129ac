"""The pool of the CPU's threads: every part of every job runs once, from any thread, and workers sleep and wake."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from luce.cpu_kernels.catalogue import kernels
from luce.cpu_kernels.jit import compile_all, compiled, compiled_as
from luce.cpu_kernels.jobs import run_job
from luce.cpu_kernels.machine_code import Group, LoadedGroup
from luce.cpu_kernels.memory import stack_words
from luce.cpu_kernels.thread_pool import MOST_PARTS, Job, Pool
from luce.cpu_kernels.vectors import put_float, read_float, word

Run = Callable[..., np.ndarray]


@compiled
def count_part(arguments, part, scratch):  # type: ignore[no-untyped-def]
    """Add 1 to the part's float, in steps that use the thread's scratch."""
    place = word(arguments, 0) + part * 4
    put_float(scratch, np.float32(part))
    for _ in range(word(arguments, 1)):
        put_float(scratch + 8, read_float(scratch))
    if read_float(scratch + 8) == np.float32(part) or word(arguments, 1) == 0:
        put_float(place, read_float(place) + np.float32(1.0))


@compiled_as("void(int64, UniTuple(int64, 1), float32[::1], int64)")
def count(slot, kernels, counts, turns):  # type: ignore[no-untyped-def]
    """A job with a part for each of the counts."""
    arguments = stack_words(2)
    arguments[0], arguments[1] = counts.ctypes.data, turns
    run_job(slot, kernels[0], arguments, len(counts))


@pytest.fixture(scope="module")
def count_job() -> Iterator[Job]:
    """Compiled where it is used: each process of xdist would import seconds of compiling."""
    group = LoadedGroup(Group(compile_all({"count": count, "count_part": count_part}), {}))
    yield Job(group.function("count"), (group.address("count_part"),))


@pytest.fixture(params=[1, 2, 5])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    made = Pool(request.param, 64, kernels().work, kernels().replay)
    yield made
    made.close()


@pytest.fixture(scope="module")
def run(count_job: Job) -> Run:
    def run(pool: Pool, parts: int, turns: int = 0) -> np.ndarray:
        counts = np.zeros(parts, np.float32)
        pool.call(count_job, counts, turns)
        return counts

    return run


@pytest.mark.parametrize("parts", [1, 2, 7, 1000, MOST_PARTS])
def test_each_part_runs_once(pool: Pool, run: Run, parts: int) -> None:
    for _ in range(3):
        assert (run(pool, parts, 10) == 1).all()


def test_thousands_of_jobs_one_after_another(pool: Pool, run: Run) -> None:
    for number in range(5000):
        assert (run(pool, number % 9 + 1) == 1).all()


def test_jobs_of_several_threads(pool: Pool, run: Run) -> None:
    failed: list[int] = []

    def work(number: int) -> None:
        failed.extend(number for _ in range(300) if (run(pool, 3 + number, 50) != 1).any())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_workers_that_sleep_wake_for_a_job(run: Run) -> None:
    pool = Pool(3, 64, kernels().work, kernels().replay)
    for _ in range(20):
        # Long enough that workers have given up looking for a job.
        time.sleep(0.01)
        assert (run(pool, 64, 100) == 1).all()
    pool.close()


def test_close_ends_the_workers_also_while_they_sleep() -> None:
    before = threading.active_count()
    pool = Pool(4, 64, kernels().work, kernels().replay)
    assert threading.active_count() == before + 3
    time.sleep(0.01)
    pool.close()
    pool.close()
    assert threading.active_count() == before
