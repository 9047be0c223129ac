"""Profiles of devices in the user's cache folder: a file for each device as it is, with its driver and its power limit.

A profile counts for 90 days. A file counts only if it can be read, and if all its figures are finite and positive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import threading
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import threadpoolctl
from gguf import GGMLQuantizationType

import luce
from luce.config.directories import user_cache_directory
from luce.profiles.cached_file import counts, read_cached, write_cached
from luce.profiles.measuring import profile_device
from luce.profiles.products import can_multiply_int8
from luce.profiles.profile import DeviceProfile, FormatProfile, Observed, Phase
from luce.profiles.timer import GPU_PROFILE, HOST_PROFILE, Measuring
from luce.runtime import kernels
from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Device
from luce.runtime.gpu import GpuDevice
from luce.runtime.power import power_limit

_FORMAT = 3
_noting = threading.Lock()


def profile_of(
    device: Device,
    types: Iterable[GGMLQuantizationType],
    *,
    anew: bool = False,
    folder: Path | None = None,
    how: Measuring | None = None,
) -> DeviceProfile:
    """The profile of a device of this process with these types of weights: the stored one, after a measurement of what
    it lacks, or of everything with `anew`.

    `folder`: of the files, the user's cache folder by default. `how`: default_measuring. Raises DeviceError naming the
    figure that failed. Where the file cannot be written, the log says why.
    """
    how = how or default_measuring(device)
    path = profile_path(device, folder)
    known = None if anew else read_profile(path)
    formats = {} if known is None else known.formats
    wanted = [type for type in types if not _measured(device, type, formats.get(type.name), how)]
    if known is not None and not wanted and _has_recurrence(known, how):
        return dataclasses.replace(known, device=str(device.name))
    found = profile_device(device, wanted, how)
    if known is not None:
        found = dataclasses.replace(
            found,
            formats=formats | found.formats,
            routing=found.routing or known.routing,
            recurrence=found.recurrence or known.recurrence,
            recurrence_row=found.recurrence_row or known.recurrence_row,
            observed=known.observed,
        )
    _write(path, found)
    return found


def stored_profile(
    device: Device,
    types: Iterable[GGMLQuantizationType],
    *,
    experts: bool = False,
    recurrent: bool = False,
    int8: bool = False,
) -> DeviceProfile | None:
    """The stored profile of a device of this process; None if it lacks one of the types, `experts`, or the recurrences
    or products in int8 that `recurrent` and `int8` ask for. Measures nothing."""
    if not profile_folder().exists():
        # The key in a profile's name takes 15 ms.
        return None
    how = dataclasses.replace(default_measuring(device), experts=experts, recurrent=recurrent, int8=int8)
    known = read_profile(profile_path(device))
    if (
        known is None
        or not _has_recurrence(known, how)
        or not all(_measured(device, type, known.formats.get(type.name), how) for type in types)
    ):
        return None
    return dataclasses.replace(known, device=str(device.name))


def default_measuring(device: Device) -> Measuring:
    """How a device is measured without experts and recurrences, however long it takes."""
    return Measuring(HOST_PROFILE if device.host else GPU_PROFILE)


def profile_path(device: Device, folder: Path | None = None) -> Path:
    """The file of a device's profile."""
    return (folder or profile_folder()) / f"{profile_key(device)}.json"


def profile_folder() -> Path:
    """The folder of profiles and links."""
    return user_cache_directory() / "profiles"


def note_observed(path: Path, phase: Phase, observed: Observed) -> None:
    """Keep in the profile of a file how a server's work of a phase compared with its prediction. Without a profile
    there is nothing to correct."""
    # Each phase has its own thread, and keeps what is known of the other one.
    with _noting:
        known = read_profile(path)
        if known is not None:
            _write(path, dataclasses.replace(known, observed=known.observed | {phase: observed}))


def _measured(device: Device, type: GGMLQuantizationType, found: FormatProfile | None, how: Measuring) -> bool:
    if found is None or (how.experts and not found.gather):
        return False
    return not how.int8 or bool(found.int8) or not can_multiply_int8(device, type)


def _has_recurrence(profile: DeviceProfile, how: Measuring) -> bool:
    return profile.recurrence is not None or not how.recurrent


def profile_key(device: Device) -> str:
    """SHA-256 of everything that the speed of a device depends on: the device and its slot, driver and compiler, Luce's
    kernels and ops, threads and BLAS, the power limit within 10 W."""
    facts: dict[str, Any] = {**device.describe(), "kernels": kernels.fingerprint(), "sources": source_hash()}
    if isinstance(device, GpuDevice):
        address = device.cupy.cuda.runtime.deviceGetPCIBusId(device.name.index)
        assert device.name.vendor is not None
        watts = power_limit(device.name.vendor, address)
        card = device.cupy.cuda.runtime.getDeviceProperties(device.name.index).get("uuid")
        facts |= {"address": address, "uuid": str(card), "watts": None if watts is None else round(watts / 10)}
    else:
        facts |= {"cpu": cpu_model(), "nodes": numa_nodes()}
        facts |= {"instructions": device.kernels.instructions if isinstance(device, CpuDevice) else ""}
        pools = threadpoolctl.threadpool_info()
        names = "internal_api", "version", "num_threads"
        facts["blas"] = [[pool.get(name) for name in names] for pool in pools if pool.get("user_api") == "blas"]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def read_profile(path: Path) -> DeviceProfile | None:
    """The profile in a file; None if there is none, if it is too old, or if the file is no profile, which the log
    says."""
    stored = read_cached(path, _Stored)
    if stored is None:
        return None
    flaw = stored.profile.flaw if stored.format == _FORMAT else f"format is {stored.format}"
    return stored.profile if counts(path, flaw, stored.profile.measured) else None


class _Stored(msgspec.Struct):
    format: int
    profile: DeviceProfile


def _write(path: Path, profile: DeviceProfile) -> None:
    write_cached(path, _Stored(_FORMAT, profile))


@cache
def source_hash() -> str:
    """A hash of the code that products run through on the host's side, and of what measures them."""
    root = Path(luce.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for part in ("ops", "cpu_kernels", "profiles") for path in (root / part).glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def cpu_model() -> str:
    """The CPU's name; empty where the system does not say."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return ""


def numa_nodes() -> int:
    """Nodes of memory of this machine."""
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
