"""The figures of a model's devices and of the links between them: stored, or measured in time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

from gguf import GGMLQuantizationType

from luce.backend.device_figures import weight_types
from luce.backend.draft_load import DraftLoad
from luce.backend.model_work import weight_tensors
from luce.backend.serving_options import ServingOptions
from luce.errors import DeviceError
from luce.gguf.reader import GGUFFile
from luce.log import event
from luce.models.spec import GatedDeltaNet, ModelSpec
from luce.profiles.link_cache import LINKS, link_path
from luce.profiles.measuring import peer_links
from luce.profiles.profile import DeviceProfile, LinkProfile
from luce.profiles.profile_cache import default_measuring, profile_of, profile_path, stored_profile
from luce.remote.device import RemoteDevice, is_remote
from luce.remote.messages import Measure
from luce.remote.probe import DaemonFigures, ask_figures, probe_link
from luce.runtime.device import Device

_log = logging.getLogger("luce.profiles")
# Links that are slower than this, in bytes per second or in seconds one way, are worth a warning.
_SLOW_BANDWIDTH, _SLOW_LATENCY = 1e6, 0.25


@dataclass(frozen=True)
class ModelOnDevices:
    """A file on devices."""

    file: GGUFFile
    spec: ModelSpec
    devices: Sequence[Device]
    options: ServingOptions
    #: None without drafting
    draft: DraftLoad | None = None

    @property
    def types(self) -> dict[GGMLQuantizationType, int]:
        """The bytes of each type of weights that is worth measuring."""
        return weight_types(weight_tensors(self.file, self.spec))

    @property
    def experts(self) -> bool:
        """Whether a layer has routed experts."""
        return any(self.spec.mixture(layer) is not None for layer in range(len(self.spec.layers)))

    @property
    def recurrent(self) -> bool:
        """Whether a layer is gated DeltaNet."""
        return any(isinstance(layer.mixer, GatedDeltaNet) for layer in self.spec.layers)

    @property
    def int8(self) -> bool:
        """Whether prompts are multiplied in int8."""
        return self.options.prompt_precision == "int8"

    @property
    def measurable(self) -> list[Device]:
        """The devices whose figures a plan needs: those of the layers, a CPU for experts where they have none, and the
        drafter's where it is one of this process."""
        found = [*self.devices, *self.expert_cpus]
        drafting = None if self.draft is None or self.draft.on is None else self.draft.on.device
        if drafting is not None and not drafting.remote and drafting.name not in [device.name for device in found]:
            found.append(drafting)
        return found

    @property
    def expert_cpus(self) -> list[Device]:
        """The CPU for experts where none is among the devices."""
        experts = self.options.experts
        return [] if experts is None or any(device.host for device in self.devices) else [experts.device]


@dataclass(frozen=True)
class MeasuredDevices:
    """Figures by the names of devices."""

    profiles: Mapping[str, DeviceProfile]
    #: between daemons' devices and this process
    ways: Mapping[str, LinkProfile] = field(default_factory=dict)
    #: between devices that reach each other, in both directions
    links: Mapping[tuple[str, str], LinkProfile] = field(default_factory=dict)
    #: the files of the profiles of this process's devices
    paths: Mapping[str, Path] = field(default_factory=dict)
    #: whether prompts are multiplied in int8 where the figures have that
    int8: bool = False
    #: what identifies the devices as they are (luce.profiles.profile_cache.profile_key)
    keys: Mapping[str, str] = field(default_factory=dict)


def measured(
    model: ModelOnDevices,
    *,
    anew: bool = False,
    seconds: float = math.inf,
    on_figure: Callable[[str], None] = lambda figure: None,
) -> MeasuredDevices:
    """The figures of all devices: the stored ones, or a measurement of what is missing.

    `seconds`: for what must be measured. Raises DeviceError that names the device whose figures are missing and why:
    the time was over before its turn, it failed, or its daemon sent figures that cannot be.
    """
    return _Measurement(model, seconds, on_figure, anew=anew).all()


def known_figures(model: ModelOnDevices) -> MeasuredDevices | None:
    """The stored figures of all devices; None if one is missing. Measures nothing but links within this process."""
    try:
        return _Measurement(model, 0.0).all()
    except DeviceError:
        return None


class _Measurement:
    """One measurement of a model's devices. GPUs of daemons are measured at the same time as those of this process;
    CPUs come one after the other when all GPUs are done, as they drive the GPUs."""

    def __init__(
        self,
        model: ModelOnDevices,
        seconds: float,
        on_figure: Callable[[str], None] = lambda figure: None,
        *,
        anew: bool = False,
    ) -> None:
        self._devices, self._types = model.measurable, model.types
        self._experts, self._recurrent, self._int8 = model.experts, model.recurrent, model.int8
        self._peer = model.options.peer
        self._seconds, self._end = seconds, time.monotonic() + seconds
        self._on_figure, self._anew = on_figure, anew
        self._profiles: dict[str, DeviceProfile] = {}
        self._keys: dict[str, str] = {}
        self._ways: dict[str, LinkProfile] = {}
        self._links: dict[tuple[str, str], LinkProfile] = {}

    def all(self) -> MeasuredDevices:
        daemons: dict[int, list[RemoteDevice]] = {}
        for device in self._devices:
            if is_remote(device):
                daemons.setdefault(id(device.daemon), []).append(device)
        own = [device for device in self._devices if not device.remote]
        groups = list(daemons.values())
        of_gpus = [group for group in groups if not all(device.host for device in group)]
        begun = [self._begin(group) for group in of_gpus]
        for device in own:
            if not device.host:
                self._profiles[str(device.name)] = self._own(device)
        for group, figures in zip(of_gpus, begun, strict=True):
            self._take(group, figures)
        for device in own:
            if device.host:
                self._profiles[str(device.name)] = self._own(device)
        for group in groups:
            if group not in of_gpus:
                self._take(group, self._begin(group))
        if self._peer:
            self._links |= _simulated_links(own)
            real = [device for device in own if not device.name.simulated]
            names = [str(device.name) for device in real]
            self._links |= {(names[before], names[behind]): link for (before, behind), link in peer_links(real).items()}
        names = [str(device.name) for device in self._devices]
        paths = {str(device.name): profile_path(device) for device in own}
        keys = self._keys | {name: path.stem for name, path in paths.items()}
        profiles = {name: self._profiles[name] for name in names}
        return MeasuredDevices(profiles, self._ways, self._links, paths, self._int8, keys)

    def _left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def _own(self, device: Device) -> DeviceProfile:
        if device.name.simulated:
            from luce.profiles.simulated_profile import simulated_profile

            return simulated_profile(device, self._types)
        experts, recurrent, int8 = self._experts, self._recurrent, self._int8
        known = None
        if not self._anew:
            known = stored_profile(device, self._types, experts=experts, recurrent=recurrent, int8=int8)
        if known is not None:
            return known
        if not self._left():
            raise self._late(str(device.name))
        how = default_measuring(device)
        how = replace(how, experts=experts, recurrent=recurrent, int8=int8, end=self._end, on_figure=self._on_figure)
        return profile_of(device, self._types, anew=self._anew, how=how)

    def _late(self, name: str) -> DeviceError:
        return DeviceError(f"{name}: not measured within {self._seconds:g} s (--measure-budget)")

    def _begin(self, group: Sequence[RemoteDevice]) -> Future[DaemonFigures]:
        """Let a daemon measure its devices."""
        self._on_figure(f"{group[0].daemon.name}: its devices")
        # A daemon takes no infinite number of seconds.
        seconds = min(self._left(), 86400.0)
        types = tuple(type.name for type in self._types)
        message = Measure(types, self._experts, self._recurrent, seconds, self._anew, self._int8)
        count = len(group[0].daemon.hello().devices)
        return group[0].daemon.before_load(lambda ask: ask_figures(ask, message, count))

    def _take(self, group: Sequence[RemoteDevice], figures: Future[DaemonFigures]) -> None:
        """The figures of a daemon's devices, with the link to them and those between them."""
        found = figures.result()
        names = [str(device.name) for device in group]
        for device, name in zip(group, names, strict=True):
            own = found.devices[device.number]
            if own.profile is None:
                raise DeviceError(f"{name}: {own.error}") if own.error else self._late(name)
            self._profiles[name] = replace(own.profile, device=name)
            self._keys[name] = own.key
        link = self._link(group[0], [device.key for device in found.devices])
        for device, name in zip(group, names, strict=True):
            self._ways[name] = _way(device, link, self._profiles[name].way)
        for before, first in zip(names, group, strict=True):
            for behind, second in zip(names, group, strict=True):
                if before != behind:
                    peer = found.peers.get((first.number, second.number)) if self._peer else None
                    ways = self._profiles[before].way, self._profiles[behind].way
                    self._links[before, behind] = peer or _in_turn(ways)

    def _link(self, device: RemoteDevice, keys: Sequence[str]) -> LinkProfile:
        """The link to a daemon, stored or measured."""
        transport = "shared" if device.transport.shared else "messages"
        path = link_path(keys, transport, device.name.place)
        link = None if self._anew else LINKS.read(path)
        if link is None:
            if not self._left():
                raise self._late(f"the link to {device.daemon.name}")
            self._on_figure(f"{device.daemon.name}: the link")
            link = device.daemon.before_load(probe_link).result()
            LINKS.write(path, link)
        if is_slow(link):
            figures = {"milliseconds": 1e3 * link.latency, "bytes_per_second": link.bandwidth}
            event(_log, "link_slow", logging.WARNING, daemon=device.daemon.name, **figures)
        return link


def _simulated_links(devices: Sequence[Device]) -> Mapping[tuple[str, str], LinkProfile]:
    """The links between the simulated ones of some devices."""
    simulated = [device for device in devices if device.name.simulated]
    if not simulated:
        return {}
    from luce.profiles.simulated_profile import simulated_links

    return simulated_links(simulated)


def is_slow(link: LinkProfile) -> bool:
    """Whether a link is worth a warning."""
    return link.bandwidth < _SLOW_BANDWIDTH or link.latency > _SLOW_LATENCY


def _way(device: RemoteDevice, link: LinkProfile, own: LinkProfile) -> LinkProfile:
    """An activation's way to a daemon's device: over the link, and from the daemon's memory to the device.

    In shared memory the device copies the bytes itself, and the link only wakes the daemon. An activation of 16 bits
    has half of the bytes on the link.
    """
    if device.transport.shared:
        return LinkProfile(link.latency + own.latency, own.bandwidth)
    more = 1 if device.transport.activations == "f32" else 2
    link = LinkProfile(link.latency, link.bandwidth * more)
    return link if device.host else _in_turn([link, own])


def _in_turn(links: Iterable[LinkProfile]) -> LinkProfile:
    """Links as one, each of which takes the bytes when the one before it has them all."""
    links = list(links)
    return LinkProfile(sum(link.latency for link in links), 1 / sum(1 / link.bandwidth for link in links))
