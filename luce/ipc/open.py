"""The devices that the settings name, in this process and in daemons."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from luce import __version__
from luce.config.settings import Config, flag
from luce.errors import UsageError
from luce.ipc.child import Child, interpreter_of
from luce.ipc.device import RemoteDevice
from luce.ipc.messages import Open
from luce.ipc.supervisor import Limits, Supervisor
from luce.ipc.tcp import Connection, tls
from luce.runtime.cupy_module import cupy_vendor
from luce.runtime.device import Device, DeviceName
from luce.runtime.open import VENDORS, named, open_all, open_devices


def open_placement(config: Config) -> list[Device]:
    """The devices of --target-devices, or of --target-device, in order: those of daemons as RemoteDevice.

    Daemons start side by side, while this process opens its own devices. Raises UsageError for what the settings
    cannot mean, and what open_devices and daemons raise; nothing is left open or running then.
    """
    items = config.target_devices or (config.target_device,)
    if not config.target_shard_ipc_bin and not any("/" in item for item in items):
        _check_messages(config, messages=False)
        _check_variables(config, ())
        return open_devices(config)
    field = "target_devices" if config.target_devices else "target_device"
    names = named(items)
    doubled = sorted({str(name) for name in names if names.count(name) > 1})
    if doubled:
        raise UsageError(f"{flag(field)} {doubled[0]}: named twice", param=field)
    interpreters = daemon_interpreters(names, dict(config.target_shard_ipc_bin))
    groups = daemon_groups(names, interpreters, isolate=config.isolate_shards)
    places = [names[group[0]].place for group in groups if names[group[0]].place]
    torn = [place for place in places if places.count(place) > 1]
    if torn:
        raise UsageError(f"{flag(field)}: devices of {torn[0]} must stand side by side", param=field)
    _check_messages(config, messages=bool(places or (groups and config.shard_transport == "stream")))
    _check_variables(config, {names[group[0]].kind for group in groups if not names[group[0]].place})
    with contextlib.ExitStack() as opened:
        supervisors: dict[int, Supervisor] = {}
        for group in groups:
            own = [names[number] for number in group]
            supervisor = _supervise(own, interpreters[group[0]], config)
            opened.callback(supervisor.close)
            supervisors |= dict.fromkeys(group, supervisor)
        local = iter(open_all([name for number, name in enumerate(names) if number not in supervisors], field))
        devices: list[Device] = []
        counts: dict[Supervisor, int] = {}
        for number, name in enumerate(names):
            if number not in supervisors:
                device = next(local)
                opened.callback(device.close)
            else:
                supervisor = supervisors[number]
                rank = counts.setdefault(supervisor, 0)
                counts[supervisor] += 1
                device = RemoteDevice(name, supervisor, rank)
            devices.append(device)
        opened.pop_all()
    return devices


def open_draft_daemon(config: Config, name: DeviceName, targets: Sequence[Device]) -> RemoteDevice | None:
    """The device of the draft in a daemon of its own; None if this process is to open it itself.

    It is in one over a network, with --draft-ipc-bin, and where layers on that device would be: of one that is named
    for the model too, or of a backend that --target-shard-ipc-bin has an interpreter for. Raises UsageError for a
    network daemon that holds layers, and DeviceError if the daemon does not start.
    """
    interpreter = None if name.place else _draft_interpreter(config, name, targets)
    if name.place and any(device.name.place == name.place for device in targets):
        raise UsageError(
            f"--draft-device {name}: this daemon holds layers; a draft needs a luce shard of its own, on another port",
            param="draft_device",
        )
    if interpreter is None and not name.place:
        return None
    supervisor = _supervise([name], interpreter, config, f"draft on {name}")
    try:
        return RemoteDevice(name, supervisor)
    except BaseException:
        supervisor.close()
        raise


def _draft_interpreter(config: Config, name: DeviceName, targets: Sequence[Device]) -> Path | None:
    if config.draft_ipc_bin is not None:
        return config.draft_ipc_bin
    given = dict(config.target_shard_ipc_bin)
    if name.kind in given:
        return given[name.kind]
    in_daemon = any(device.remote for device in targets if device.name == name)
    foreign = name.kind in VENDORS and cupy_vendor() not in (None, name.kind)
    return given.get("") if in_daemon or foreign else None


def daemon_interpreters(names: Sequence[DeviceName], given: dict[str, Path]) -> list[Path | None]:
    """The interpreter of each device's daemon, None for devices of this process and of network daemons.

    `given`: a path for the kind "", or a path for each of some backends, whose devices then all are in daemons. Raises
    UsageError if a path has no use.
    """
    here = [name for name in names if not name.place]
    unused = given.keys() - {"", *(name.kind for name in here)}
    if unused or ("" in given and len(here) < 2):
        why = f" {min(unused)}: no {min(unused)} device is named" if unused else ": requires two or more devices"
        raise UsageError(flag("target_shard_ipc_bin") + why, param="target_shard_ipc_bin")
    if "" not in given:
        return [None if name.place else given.get(name.kind) for name in names]
    vendors = [name.kind for name in here if name.kind in VENDORS]
    if set(vendors) < set(VENDORS):
        return [None if name.place or name == here[0] else given[""] for name in names]
    own = cupy_vendor() or vendors[0]
    return [given[""] if not name.place and name.kind in VENDORS and name.kind != own else None for name in names]


def daemon_groups(
    names: Sequence[DeviceName], interpreters: Sequence[Path | None], *, isolate: bool
) -> list[list[int]]:
    """The places of the devices of each daemon: those of one backend, or of one network daemon, side by side."""
    groups: list[list[int]] = []
    for number, name in enumerate(names):
        if interpreters[number] is None and not name.place:
            continue
        before = names[number - 1] if groups and groups[-1][-1] == number - 1 else None
        together = before is not None and before.place == name.place
        if together and (name.place or (before is not None and before.kind == name.kind and not isolate)):
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def _check_messages(config: Config, *, messages: bool) -> None:
    """Raises UsageError for a setting of activations in messages where none travel so."""
    if config.shard_activations != "f32" and not messages:
        raise UsageError(
            f"{flag('shard_activations')} {config.shard_activations}: activations travel in messages only over a "
            f"network, or with {flag('shard_transport')} stream",
            param="shard_activations",
        )


def _check_variables(config: Config, kinds: Collection[str]) -> None:
    """Raises UsageError for variables of a backend that no daemon has that is to be started: those with layers are of
    `kinds`."""
    drafting = "" if config.draft in ("", "ngram") else config.draft_device.partition(":")[0]
    if drafting == "auto":
        return
    for kind in sorted({text.partition(":")[0] for text in config.shard_env} - {*kinds, drafting}):
        raise UsageError(f"{flag('shard_env')} {kind}: there is no {kind} daemon to be started", param="shard_env")


def _program(setting: str, path: Path) -> Path:
    """The Python that a setting names. Raises UsageError if there is none."""
    program = interpreter_of(path)
    if shutil.which(program) is None:
        raise UsageError(f"{flag(setting)} {path}: {program} is not there, or no program", param=setting)
    return program


def _supervise(names: Sequence[DeviceName], interpreter: Path | None, config: Config, label: str = "") -> Supervisor:
    """The daemon of devices: a child process, or one of the network without an interpreter."""
    kind, label = names[0].kind, label or ",".join(map(str, names))
    opening = Open(__version__, tuple(str(name.local) for name in names), config.log_level, config.threads)
    limits = Limits(config.shard_start_timeout, config.shard_timeout)
    if interpreter is None:
        if config.shard_key_file is None:
            raise UsageError(f"{label}: network daemons require {flag('shard_key_file')}", param="shard_key_file")
        where = names[0].place.removeprefix("tcp://").rstrip("/")
        context = tls(config.shard_key_file, flag("shard_key_file"), server=False)
        wire = config.shard_activations
        return Supervisor(
            label, lambda called: Connection(called, where, context), opening, limits, shares=False, wire=wire
        )
    chosen = (text.partition(":")[2].partition("=") for text in config.shard_env if text.startswith(f"{kind}:"))
    variables = {name: value for name, _, value in chosen}
    program = _program("draft_ipc_bin" if interpreter is config.draft_ipc_bin else "target_shard_ipc_bin", interpreter)
    way, wire = config.shard_transport, config.shard_activations
    shares, required = way != "stream", way == "shared"
    connect = partial(Child, interpreter=program, variables=variables)
    return Supervisor(label, connect, opening, limits, shares=shares, required=required, wire=wire)
