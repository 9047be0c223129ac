"""The devices that the settings name, in this process and in daemons."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from luce import __version__
from luce.config import Config, flag
from luce.errors import UsageError
from luce.remote.child import Child, interpreter_of
from luce.remote.device import RemoteDevice
from luce.remote.messages import PROTOCOL, Open
from luce.remote.supervisor import Limits, Supervisor
from luce.runtime.device import Device, DeviceName
from luce.runtime.gpu import cupy_vendor
from luce.runtime.open import VENDORS, named, open_all, open_devices


def open_placement(config: Config) -> list[Device]:
    """The devices of --target-devices, or of --target-device, in order: those of daemons as RemoteDevice.

    Daemons start side by side, while this process opens its own devices. Raises UsageError for what the settings
    cannot mean, and what open_devices and daemons raise; nothing is left open or running then.
    """
    if not config.target_shard_ipc_bin:
        return open_devices(config)
    field = "target_devices" if config.target_devices else "target_device"
    names = named(config.target_devices or (config.target_device,))
    doubled = sorted({str(name) for name in names if names.count(name) > 1})
    if doubled:
        raise UsageError(f"{flag(field)} {doubled[0]}: named twice", param=field)
    interpreters = daemon_interpreters(names, dict(config.target_shard_ipc_bin))
    with contextlib.ExitStack() as opened:
        supervisors: dict[int, Supervisor] = {}
        for group in _groups(names, interpreters, isolate=config.isolate_shards):
            own = [names[number] for number in group]
            interpreter = interpreters[group[0]]
            assert interpreter is not None
            supervisor = _supervise(own, interpreter, config)
            opened.callback(supervisor.close)
            supervisors |= dict.fromkeys(group, supervisor)
        local = iter(open_all([name for number, name in enumerate(names) if number not in supervisors], field))
        devices: list[Device] = []
        places: dict[Supervisor, int] = {}
        for number, name in enumerate(names):
            if number not in supervisors:
                device = next(local)
                opened.callback(device.close)
            else:
                supervisor = supervisors[number]
                place = places.setdefault(supervisor, 0)
                places[supervisor] += 1
                device = RemoteDevice(name, supervisor, supervisor.hello().devices[place])
            devices.append(device)
        opened.pop_all()
    return devices


def daemon_interpreters(names: Sequence[DeviceName], given: dict[str, Path]) -> list[Path | None]:
    """The interpreter of each device's daemon, None for devices of this process. Raises UsageError.

    `given`: a path for the kind "", or a path for each of some backends, whose devices then all are in daemons.
    """
    plain = given.get("")
    if plain is None:
        unused = given.keys() - {name.kind for name in names}
        if unused:
            raise UsageError(
                f"{flag('target_shard_ipc_bin')} {min(unused)}: no {min(unused)} device is named",
                param="target_shard_ipc_bin",
            )
        return [given.get(name.kind) for name in names]
    if len(names) < 2:
        raise UsageError(
            f"{flag('target_shard_ipc_bin')}: requires {flag('target_devices')} with two or more devices",
            param="target_shard_ipc_bin",
        )
    vendors = [name.kind for name in names if name.kind in VENDORS]
    if set(vendors) < set(VENDORS):
        return [plain if number else None for number in range(len(names))]
    own = cupy_vendor() or vendors[0]
    return [plain if name.kind in VENDORS and name.kind != own else None for name in names]


def _groups(names: Sequence[DeviceName], interpreters: Sequence[Path | None], *, isolate: bool) -> list[list[int]]:
    """The places of the devices of each daemon: those of one backend side by side."""
    numbers = [number for number in range(len(names)) if interpreters[number] is not None]
    if isolate:
        return [[number] for number in numbers]
    # Places side by side have equal differences to their ranks.
    ranked = groupby(enumerate(numbers), key=lambda item: (item[1] - item[0], names[item[1]].kind))
    return [[number for _, number in run] for _, run in ranked]


def _supervise(names: Sequence[DeviceName], interpreter: Path, config: Config) -> Supervisor:
    kind, label = names[0].kind, ",".join(map(str, names))
    chosen = (text.partition(":")[2].partition("=") for text in config.shard_env if text.startswith(f"{kind}:"))
    variables = {name: value for name, _, value in chosen}
    opening = Open(PROTOCOL, __version__, tuple(map(str, names)), config.log_level, config.threads)
    return Supervisor(
        label,
        lambda: Child(label, interpreter_of(interpreter), variables),
        opening,
        Limits(config.shard_start_timeout, config.shard_timeout),
        shares=config.shard_transport != "stream",
    )
