"""The cores that this process may use, by affinity and control groups."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from luce.runtime import cores


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.mark.parametrize(
    ("line", "files", "expected"),
    [
        ("0::/a/b", {}, 8),
        ("0::/a/b", {"a/b/cpu.max": "max 100000"}, 8),
        ("0::/a/b", {"a/b/cpu.max": "150000 100000"}, 2),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/a", {"a/cpu.max": "9900000 100000"}, 8),
        ("4:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, 2),
        ("4:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 8),
        ("4:memory:/a", {"a/cpu.max": "100000 100000"}, 8),
    ],
)
def test_usable_cores(line: str, files: dict[str, str], expected: int, tmp_path: Path) -> None:
    (tmp_path / "groups").write_text(line + "\n")
    for name, content in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    assert cores.usable_cores(tmp_path / "groups", tmp_path / "root", tmp_path) == expected


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert cores.usable_cores(tmp_path / "none", tmp_path, tmp_path) == 8


@pytest.mark.parametrize(
    ("affinity", "expected"), [(range(8), 4), (range(4), 4), ((0, 4), 1), ((0, 1, 5), 2), ((7,), 1), ((0, 4, 9), 2)]
)
def test_threads_of_a_core_count_once(
    affinity: Iterable[int], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads n and n + 4 share a core; the system says nothing of thread 9."""
    for number in range(8):
        folder = tmp_path / f"cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(affinity))
    assert cores.usable_cores(tmp_path / "none", tmp_path, tmp_path) == expected


@pytest.mark.parametrize(("asked", "used", "noted"), [(99, 2, True), (3, 2, True), (2, 2, False), (1, 1, False)])
def test_threads_are_capped_with_a_note(
    asked: int, used: int, noted: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits: list[Any] = []
    monkeypatch.setattr(cores, "usable_cores", lambda: 2)
    monkeypatch.setattr("threadpoolctl.threadpool_limits", lambda count, user_api: limits.append((count, user_api)))
    cores.limit_threads(asked)
    assert limits == [(used, "blas")]
    assert [record.getMessage() for record in caplog.records] == (
        [f"--threads {asked}: this process may use 2 cores; 2 threads are used"] if noted else []
    )


@pytest.mark.parametrize(("pool", "used"), [(64, 2), (1, 1)])
def test_all_cores_are_the_usable_ones(pool: int, used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(cores, "usable_cores", lambda: 2)
    monkeypatch.setattr("threadpoolctl.threadpool_info", lambda: [{"user_api": "blas", "num_threads": pool}])
    monkeypatch.setattr("threadpoolctl.threadpool_limits", lambda count, user_api: limits.append(count))
    cores.limit_threads(0)
    assert limits == [used]
