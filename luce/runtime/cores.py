"""The cores that this process may use, and the threads of the CPU's matrix products on them."""

from __future__ import annotations

import logging
import math
import os
from contextlib import suppress
from pathlib import Path

import threadpoolctl

_log = logging.getLogger(__name__)

_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


def usable_cores(groups: Path = _GROUPS, root: Path = _ROOT, cpus: Path = _CPUS) -> int:
    """The physical cores in this process's affinity, at most what the CPU quota of its control group and of those above
    allows.

    groups: the process's control groups, in the form of /proc/self/cgroup; root: where control groups are mounted;
    cpus: where the system describes the threads of cores.
    """
    cores = len({_core(cpus, number) for number in os.sched_getaffinity(0)})
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                top, read = root, _quota
            elif "cpu" in controllers.split(","):
                top, read = root / "cpu", _quota_of_version_1
            else:
                continue
            own = top / path.lstrip("/")
            for group in (own, *own.parents):
                if group.is_relative_to(top):
                    with suppress(OSError, ValueError, ZeroDivisionError):
                        cores = min(cores, max(1, math.ceil(read(group))))
    return cores


def _core(cpus: Path, number: int) -> str:
    """A name of the physical core that runs a thread of the system's numbering: all its threads, if they are known."""
    with suppress(OSError):
        return (cpus / f"cpu{number}/topology/thread_siblings_list").read_text().strip()
    return str(number)


def _quota(group: Path) -> float:
    """Cores of a control group. Raises ValueError if it has no limit."""
    quota, period = (group / "cpu.max").read_text().split()
    return int(quota) / int(period)


def _quota_of_version_1(group: Path) -> float:
    quota = int((group / "cpu.cfs_quota_us").read_text())
    if quota < 0:
        raise ValueError("no limit")
    return quota / int((group / "cpu.cfs_period_us").read_text())


def limit_threads(threads: int) -> None:
    """Let matrix products use `threads` threads (0: one for each core), at most one for each usable core.

    More threads than cores wait for each other in turns: eight on two cores take six times as long as one.
    """
    cores = usable_cores()
    if threads > cores:
        _log.warning("--threads %d: this process may use %d cores; %d threads are used", threads, cores, cores)
    pools = [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool.get("user_api") == "blas"]
    wanted = min(threads, cores) or min([cores, *pools])
    threadpoolctl.threadpool_limits(wanted, user_api="blas")
    _wanted.append(wanted)


_wanted: list[int] = []


def thread_count() -> int:
    """The threads of the CPU's products: as limit_threads has set them, else one for each usable core."""
    return _wanted[-1] if _wanted else usable_cores()
