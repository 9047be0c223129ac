"""Opens the devices that the settings name, in this process and in daemons."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from luce import __version__
from luce.config.settings import Config, flag
from luce.errors import UsageError
from luce.ipc.child import Child, interpreter_of
from luce.ipc.lifecycle import Open
from luce.ipc.supervisor import Peer, Supervisor, Timeouts
from luce.ipc.tcp import Connection, open_key_file
from luce.remote.device import RemoteDevice, Transport
from luce.remote.messages import Response
from luce.runtime.cupy_module import cupy_vendor
from luce.runtime.device import Device, DeviceName
from luce.runtime.found import VENDORS
from luce.runtime.open import named, open_all, open_devices

#: by their place, how to connect to daemons that have no address here, such as those of a cluster: under a name that
#: messages call them
Connects = Mapping[str, Callable[[str], Peer]]
NO_CONNECTS: Connects = MappingProxyType({})


def open_placement(config: Config, connects: Connects = NO_CONNECTS) -> list[Device]:
    """The devices of the settings, in order, with their margins. Raises as `_open`, and UsageError for a margin of a
    device that is not one of them."""
    devices = _open(config, connects)
    margins, names = dict(config.device_margin), {str(device.name) for device in devices}
    unknown = margins.keys() - {"", *names}
    if unknown:
        for device in devices:
            device.close()
        name = min(unknown)
        raise UsageError(f"{flag('device_margin')} {name}: the model is not placed on it", param="device_margin")
    for device in devices:
        device.margin = margins.get(str(device.name), margins.get(""))
    return devices


def _open(config: Config, connects: Connects) -> list[Device]:
    """The devices of --target-devices, or of --target-device, in order; those of daemons as RemoteDevice.

    All daemons start at the same time, while this process opens its own devices. Raises UsageError for settings that
    contradict each other, and what open_devices and daemons raise. After an error no device is open and no daemon runs.
    """
    items = config.target_devices or (config.target_device,)
    if not config.target_shard_ipc_bin and not any("/" in item for item in items):
        _check_activations(config, messages=False)
        _check_variables(config, ())
        return open_devices(config)
    field = "target_devices" if config.target_devices else "target_device"
    names = named(items)
    doubled = sorted({str(name) for name in names if names.count(name) > 1})
    if doubled:
        raise UsageError(f"{flag(field)} {doubled[0]}: named twice", param=field)
    interpreters = daemon_interpreters(names, dict(config.target_shard_ipc_bin))
    groups = daemon_groups(names, interpreters, isolate=config.isolate_shards)
    _check_groups(config, field, names, groups)
    with contextlib.ExitStack() as opened:
        daemons: dict[int, tuple[Supervisor, int]] = {}
        for group in groups:
            those = [names[number] for number in group]
            daemon = _supervise(those, interpreters[group[0]], config, Response, connects=connects)
            opened.callback(daemon.close)
            daemons |= {number: (daemon, rank) for rank, number in enumerate(group)}
        local = iter(
            open_all([name for number, name in enumerate(names) if number not in daemons], field, config.cpu_weights)
        )
        devices: list[Device] = []
        for number, name in enumerate(names):
            if number in daemons:
                daemon, rank = daemons[number]
                devices.append(RemoteDevice(name, daemon, rank, _transport(config, interpreters[number])))
            else:
                devices.append(next(local))
                opened.callback(devices[-1].close)
        opened.pop_all()
    return devices


def _check_groups(config: Config, field: str, names: Sequence[DeviceName], groups: Sequence[Sequence[int]]) -> None:
    """Raises UsageError for daemons that cannot serve these devices, and for settings that no daemon uses."""
    places = [names[group[0]].place for group in groups if names[group[0]].place]
    torn = [place for place in places if places.count(place) > 1]
    if torn:
        raise UsageError(f"{flag(field)}: devices of {torn[0]} must stand side by side", param=field)
    _check_activations(config, messages=bool(places or (groups and config.shard_transport == "stream")))
    _check_variables(config, {names[group[0]].kind for group in groups if not names[group[0]].place})


def open_draft_daemon(
    config: Config, name: DeviceName, targets: Sequence[Device], responses: Any, field: str = "draft_device"
) -> RemoteDevice | None:
    """The device of a draft in a daemon of its own; None if this process opens the device itself.

    `field`: the setting of the device, draft_device or prefill_drafter_device. A draft has a daemon if its device is on
    another machine, with --draft-ipc-bin if it drafts, and where layers on the same device would have one: if a daemon
    holds the device for the target, or if --target-shard-ipc-bin names an interpreter for its backend. `responses` is
    the union of the messages that the daemon sends. Raises UsageError for a network daemon that holds layers, and
    DeviceError if the daemon does not start.
    """
    drafts = field == "draft_device"
    interpreter = None if name.place else (draft_interpreter if drafts else layer_interpreter)(config, name, targets)
    if name.place and any(device.name.place == name.place for device in targets):
        raise UsageError(
            f"{flag(field)} {name}: this daemon holds layers; a draft needs a luce shard of its own, on another port",
            param=field,
        )
    if interpreter is None and not name.place:
        return None
    label = f"{'draft' if drafts else 'prefill drafter'} on {name}"
    daemon = _supervise([name], interpreter, config, responses, label)
    try:
        return RemoteDevice(name, daemon)
    except BaseException:
        daemon.close()
        raise


def draft_interpreter(config: Config, name: DeviceName, targets: Sequence[Device]) -> Path | None:
    """The interpreter of the daemon that holds the draft on a device of this machine; None if there is no daemon."""
    return config.draft_ipc_bin or layer_interpreter(config, name, targets)


def layer_interpreter(config: Config, name: DeviceName, targets: Sequence[Device]) -> Path | None:
    """The interpreter of the daemon that layers on a device of this machine would have; None if there is no daemon."""
    interpreters = dict(config.target_shard_ipc_bin)
    if name.kind in interpreters:
        return interpreters[name.kind]
    in_daemon = any(device.remote for device in targets if device.name == name)
    foreign = name.kind in VENDORS and cupy_vendor() not in (None, name.kind)
    return interpreters.get("") if in_daemon or foreign else None


def daemon_interpreters(names: Sequence[DeviceName], given: dict[str, Path]) -> list[Path | None]:
    """The interpreter of each device's daemon; None for devices of this process and of network daemons.

    `given` has a path under "", or a path for each of some backends, all of whose devices are then in daemons. Raises
    UsageError for a path that no device uses.
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
    """The positions of each daemon's devices: neighbours of one backend, or of one network daemon."""
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


def _check_activations(config: Config, *, messages: bool) -> None:
    """Raises UsageError if --shard-activations is set although no activations travel in messages."""
    if config.shard_activations != "f32" and not messages:
        raise UsageError(
            f"{flag('shard_activations')} {config.shard_activations}: activations travel in messages only over a "
            f"network, or with {flag('shard_transport')} stream",
            param="shard_activations",
        )


def _check_variables(config: Config, kinds: Collection[str]) -> None:
    """Raises UsageError for --shard-env variables of a backend without a daemon. `kinds`: backends of daemons with
    layers."""
    drafting = "" if config.draft in ("", "ngram") else config.draft_device.partition(":")[0]
    if drafting == "auto":
        return
    scoring = config.prefill_drafter_device.partition(":")[0] if config.prefill_drafter else ""
    for kind in sorted({text.partition(":")[0] for text in config.shard_env} - {*kinds, drafting, scoring}):
        raise UsageError(f"{flag('shard_env')} {kind}: no {kind} daemon is started", param="shard_env")


def _program(setting: str, path: Path) -> Path:
    """The interpreter that a setting names. Raises UsageError if there is none."""
    program = interpreter_of(path)
    if shutil.which(program) is None:
        raise UsageError(f"{flag(setting)} {path}: {program} does not exist, or is not executable", param=setting)
    return program


def _supervise(
    names: Sequence[DeviceName],
    interpreter: Path | None,
    config: Config,
    responses: Any,
    label: str = "",
    *,
    connects: Connects = NO_CONNECTS,
) -> Supervisor:
    """The daemon of devices: a child process with an interpreter, one of the network without."""
    kind, label = names[0].kind, label or ",".join(map(str, names))
    opening = Open(
        __version__, tuple(str(name.local) for name in names), config.log_level, config.threads, config.cpu_weights
    )
    timeouts = Timeouts(config.shard_start_timeout, config.shard_timeout)
    if names[0].place in connects:
        return Supervisor(label, connects[names[0].place], opening, timeouts, responses)
    if interpreter is None:
        if config.shard_key_file is None:
            raise UsageError(f"{label}: network daemons require {flag('shard_key_file')}", param="shard_key_file")
        address = names[0].place.removeprefix("tcp://").rstrip("/")
        tls = open_key_file(config.shard_key_file, flag("shard_key_file"), server=False)
        connect = partial(Connection, address=address, tls=tls)
        return Supervisor(label, connect, opening, timeouts, responses)
    items = (text.partition(":")[2].partition("=") for text in config.shard_env if text.startswith(f"{kind}:"))
    variables = {name: value for name, _, value in items}
    program = _program("draft_ipc_bin" if interpreter is config.draft_ipc_bin else "target_shard_ipc_bin", interpreter)
    start = partial(Child, interpreter=program, variables=variables)
    return Supervisor(label, start, opening, timeouts, responses)


def _transport(config: Config, interpreter: Path | None) -> Transport:
    """How activations travel to the daemon of an interpreter, or of the network."""
    if interpreter is None:
        return Transport(shared=False, activations=config.shard_activations)
    shared = config.shard_transport != "stream"
    activations = "f32" if shared else config.shard_activations
    return Transport(shared, config.shard_transport == "shared", activations)
