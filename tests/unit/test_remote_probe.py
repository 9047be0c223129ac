"""Figures of daemons: what a daemon measures of its devices, what a server believes, and the link between them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luce import __version__
from luce.backend import measured_devices
from luce.backend.measured_devices import ModelOnDevices, known_figures, measured
from luce.backend.serving_options import ServingOptions
from luce.errors import BackendError, DeviceError
from luce.gguf.reader import open_gguf
from luce.ipc.channel import SMALL_FRAME, Channel, ProtocolError
from luce.ipc.lifecycle import Open
from luce.ipc.supervisor import Supervisor, Timeouts
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.profiles import link_cache
from luce.profiles.link_cache import LINKS, link_path
from luce.profiles.profile import DeviceProfile, FormatProfile, LinkProfile
from luce.profiles.timer import ExpertSizes, Measuring, ProfileSizes
from luce.remote import daemon, probe
from luce.remote.device import RemoteDevice, Transport
from luce.remote.messages import Measure, Measured, MeasuredDevice, PeerFigures, Probe, Probed, Request, Response
from luce.remote.probe import ask_figures, probe_link
from luce.runtime.device import Device, DeviceName
from luce.runtime.host import HostDevice
from tests.support.reference import Reference
from tests.support.threaded_daemon import ThreadedDaemon

SIZES = ProfileSizes(1 << 15, 256, 1 << 20, (1, 16), 4, 1 << 12, 0.0, 64, 32, ExpertSizes(4, 2, 1 << 12, (1,)), 1)
FOUND = FormatProfile(1e9, {1: 1e9, 512: 1e10}, None, 0.1, False)
PROFILE = DeviceProfile("cpu:0", "x", time.time(), 1e-5, 1e-6, LinkProfile(1e-6, 1e9), {"F32": FOUND})
LINK = LinkProfile(1e-4, 1e8)
MODEL = Reference("qwen3-a-F32").path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(probe, "default_measuring", lambda device: Measuring(SIZES))


@contextlib.contextmanager
def started(devices: int = 1) -> Iterator[Supervisor]:
    """A daemon in a thread, with CPU devices."""
    opening = Open(__version__, tuple(f"cpu:{n}" for n in range(devices)), "info", 0, "float32")
    supervisor = Supervisor("test", ThreadedDaemon, opening, Timeouts(60, 60), Response)
    try:
        supervisor.hello()
        yield supervisor
    finally:
        supervisor.close()


def figures(supervisor: Supervisor, message: Measure, devices: int = 1) -> probe.DaemonFigures:
    return supervisor.before_load(lambda ask: ask_figures(ask, message, devices)).result(60)


def test_a_daemon_measures_its_devices_once() -> None:
    with started(2) as supervisor:
        nothing = figures(supervisor, Measure(("F32",), False, False, 0.0), 2)
        assert [device.profile for device in nothing.devices] == [None, None]
        assert [device.error for device in nothing.devices] == ["", ""]
        found = figures(supervisor, Measure(("F32",), False, False, 60.0), 2).devices
        profiles = [device.profile for device in found]
        assert profiles[0] is not None
        assert profiles[0].formats.keys() == {"F32"}
        # The devices of a CPU are one CPU, whose figures are stored in the daemon's cache folder.
        assert found[0].key == found[1].key == nothing.devices[0].key
        assert profiles[1] == replace(profiles[0], device="cpu:1")
        again = figures(supervisor, Measure(("F32",), False, False, 0.0), 2)
        assert [device.profile for device in again.devices] == profiles
        anew = figures(supervisor, Measure(("F32",), False, False, 60.0, anew=True), 2).devices[0].profile
        assert anew is not None
        assert anew.measured > profiles[0].measured


def test_a_device_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **how: Any) -> None:
        raise DeviceError("cpu:0: it is broken")

    monkeypatch.setattr(probe, "profile_of", fails)
    with started() as supervisor:
        assert figures(supervisor, Measure(("F32",), False, False, 60.0)).devices[0].error == "cpu:0: it is broken"


def test_types_that_do_not_exist_and_long_answers_are_refused() -> None:
    with started() as supervisor:
        with pytest.raises(BackendError, match="no weights of type 'F33'"):
            figures(supervisor, Measure(("F33",), False, False, 1.0))
        probing = Probe(np.zeros(1, np.uint8), SMALL_FRAME + 1)
        with pytest.raises(BackendError, match="a probe asks for"):
            supervisor.before_load(lambda ask: ask(probing, Probed)).result(60)
        # The daemon goes on.
        assert (
            supervisor.before_load(lambda ask: ask(Probe(np.zeros(1, np.uint8), 5), Probed)).result(60).data.size == 5
        )


def test_nothing_is_measured_without_devices() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.ExitStack() as opened:
        session = daemon.Session(Channel(ours, Request), opened, can_share=True, locate=None, loaders=())
        with pytest.raises(BackendError, match="no devices are open"):
            session.measure(Measure((), False, False, 0.0))
        with pytest.raises(BackendError, match="no devices are open"):
            session.probe(Probe(np.zeros(1, np.uint8), 1))


def wrong(**changes: Any) -> DeviceProfile:
    """The profile with another figure of F32, or of the device."""
    own = {name: changes.pop(name) for name in list(changes) if name in vars(PROFILE)}
    return replace(PROFILE, **own, formats={"F32": replace(FOUND, **changes)})


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (wrong(read=float("nan")), "F32.read is nan"),
        (wrong(read=0.0), "F32.read is 0.0"),
        (wrong(read=-1.0), "F32.read is -1.0"),
        (wrong(read=1e30), "F32.read is 1e[+]30"),
        (wrong(rates={1: float("inf")}), "F32.rates.1 is inf"),
        (wrong(rates={1: 1e30}), "F32.rates.1 is 1e[+]30"),
        (wrong(unpack=1e30), "F32.unpack is 1e[+]30"),
        (wrong(rates={}), "rates are missing"),
        (wrong(step=-1.0), "step is -1.0"),
        (wrong(launch=1e30), "launch is 1e[+]30"),
        (wrong(state_read=float("nan")), "state_read is nan"),
        (wrong(way=LinkProfile(0.0, float("inf"))), "way.bandwidth is inf"),
        (wrong(way=LinkProfile(float("nan"), 1.0)), "way.latency is nan"),
        (replace(PROFILE, formats={}), "types of weights are missing"),
        (replace(PROFILE, formats={"Q8_0": FOUND}), "types of weights are missing"),
        (wrong(read="much"), "Expected `float`, got `str`"),
    ],
)
def test_figures_that_cannot_be_end_the_daemon(
    profile: DeviceProfile, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Measured((MeasuredDevice("key", profile),), ())
    monkeypatch.setattr(daemon, "measure_devices", lambda devices, message: answer)
    with started() as supervisor:
        with pytest.raises(DeviceError, match=f"test: it sent .*{message}"):
            figures(supervisor, Measure(("F32",), False, False, 1.0))
        with pytest.raises(DeviceError):
            figures(supervisor, Measure(("F32",), False, False, 1.0))


@pytest.mark.parametrize(
    "peer", [PeerFigures(0, 1, LINK), PeerFigures(0, 0, LINK), PeerFigures(0, 1, LinkProfile(0.0, 0.0))]
)
def test_links_that_cannot_be_end_the_daemon(peer: PeerFigures, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Measured((MeasuredDevice("key", PROFILE),), (peer,))
    monkeypatch.setattr(daemon, "measure_devices", lambda devices, message: answer)
    with started() as supervisor, pytest.raises(DeviceError, match="a link of devices"):
        figures(supervisor, Measure(("F32",), False, False, 1.0))


def test_as_many_devices_answer_as_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "measure_devices", lambda devices, message: Measured((), ()))
    with started() as supervisor, pytest.raises(DeviceError, match="figures of 0 devices instead of 1"):
        figures(supervisor, Measure(("F32",), False, False, 1.0))


class Line:
    """A link with a clock of its own: what `probe_link` asks takes the time that such a link takes. The first `burst`
    bytes of a message take none."""

    def __init__(self, latency: float, bandwidth: float, burst: int = 0) -> None:
        self.latency, self.bandwidth, self.burst, self.now, self.sent = latency, bandwidth, burst, 0.0, 0

    def clock(self) -> float:
        return self.now

    def ask(self, request: Any, response: type[Any]) -> Any:
        slow = sum(max(0, size - self.burst) for size in (len(request.data), request.answer))
        self.now += 2 * self.latency + slow / self.bandwidth
        self.sent += len(request.data)
        return Probed(np.zeros(request.answer, np.uint8))


@pytest.mark.parametrize(("latency", "bandwidth"), [(1e-5, 1e10), (1e-3, 1.2e7), (0.3, 5e5), (3e-3, 1e3)])
def test_a_link_has_its_latency_and_its_bandwidth(latency: float, bandwidth: float) -> None:
    line = Line(latency, bandwidth)
    found = probe_link(line.ask, line.clock)
    assert found.latency == pytest.approx(latency, rel=1e-6, abs=1e-9)
    assert found.bandwidth == pytest.approx(bandwidth, rel=1e-6)


def test_a_link_that_carries_a_burst_faster_keeps_its_latency() -> None:
    line = Line(5e-4, 1.2e7, burst=16384)
    found = probe_link(line.ask, line.clock)
    assert found.latency == pytest.approx(5e-4, rel=0.02)
    assert found.bandwidth == pytest.approx(1.2e7, rel=0.02)


def test_a_slow_link_is_measured_with_few_bytes() -> None:
    line = Line(0.01, 1e6)
    probe_link(line.ask, line.clock)
    assert line.now < 15


def test_a_probe_has_the_bytes_that_were_asked_for() -> None:
    def short(request: Any, response: type[Any]) -> Any:
        return Probed(np.zeros(3, np.uint8))

    with pytest.raises(ProtocolError, match="answered a probe"):
        probe_link(short)


def test_a_daemon_in_a_thread_has_a_link() -> None:
    with started() as supervisor:
        link = supervisor.before_load(probe_link).result(60)
    assert not link.flaw
    # It is memory, not a network.
    assert link.latency < 0.1
    assert link.bandwidth > 1e6


def test_requests_before_a_load_have_their_turn_before_it_and_not_after_the_end() -> None:
    supervisor = Supervisor(
        "test", ThreadedDaemon, Open(__version__, ("cpu:0",), "info", 0, "float32"), Timeouts(60, 60), Response
    )
    supervisor.hello()
    supervisor.close()
    with pytest.raises(DeviceError):
        supervisor.before_load(probe_link).result(60)


def test_an_error_of_what_is_done_before_a_load_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    def breaks(ask: Any) -> None:
        raise ZeroDivisionError("broken")

    with started() as supervisor, pytest.raises(DeviceError, match="test: broken"):
        supervisor.before_load(breaks).result(60)


def test_links_are_stored_by_both_ends_way_and_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {link_path(*facts) for facts in [(["a"], "s", ""), (["b"], "s", ""), (["a"], "m", ""), (["a"], "s", "x")]}
    assert len(paths) == 4
    before = link_path(["a"], "s", "")
    assert before in paths
    # The end here counts as well as that of the daemon.
    monkeypatch.setattr(link_cache, "profile_key", lambda device: "another")
    assert link_path(["a"], "s", "") != before
    monkeypatch.undo()
    monkeypatch.setattr("platform.node", lambda: "another")
    assert link_path(["a"], "s", "") != before
    path = link_path(["a"], "messages", "tcp://b:1", tmp_path)
    assert LINKS.read(path) is None
    LINKS.write(path, LINK)
    assert LINKS.read(path) == LINK
    assert path.stat().st_mode & 0o777 == 0o600
    for text in (path.read_text()[:-9], path.read_text().replace("1e8", "-1").replace("100000000.0", "-1.0"), "{}"):
        path.write_text(text)
        assert LINKS.read(path) is None


def test_an_old_link_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = link_path(["a"], "messages", "", tmp_path)
    LINKS.write(path, LINK)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 91 * 86400)
    assert LINKS.read(path) is None


class Faked:
    """A daemon whose answers are given."""

    def __init__(self, profiles: list[DeviceProfile | None], peers: dict[tuple[int, int], LinkProfile]) -> None:
        self.name, self.probes = "faked", 0
        self._figures = probe.DaemonFigures(tuple(MeasuredDevice("key", it) for it in profiles), peers)

    def hello(self) -> Any:
        return type("Hello", (), {"devices": self._figures.devices})

    def before_load(self, work: Callable[[Any], Any]) -> Any:
        self.probes += work is probe_link
        result = LINK if work is probe_link else self._figures
        return type("Future", (), {"result": lambda self: result})()


class Far(HostDevice):
    """A device of a daemon, without a connection."""

    remote = True

    def __init__(self, daemon: Faked, number: int, transport: Transport, *, host: bool) -> None:
        super().__init__(number)
        self.name = DeviceName("cpu" if host else "cuda", number, "tcp://b:1/")
        self.daemon, self.number, self.transport, self.host = daemon, number, transport, host


def model_on(*devices: Device) -> ModelOnDevices:
    file = open_gguf(MODEL)
    spec = read_spec(Source(str(file.paths[0]), file.metadata, file.tensors))
    return ModelOnDevices(file, spec, devices, ServingOptions(context=256, chunk=64))


@pytest.mark.parametrize(
    ("transport", "host", "latency", "bandwidth"),
    [
        (Transport(shared=True), False, 1.01e-4, 1e9),
        (Transport(shared=False), True, 1e-4, 1e8),
        (Transport(shared=False, activations="f16"), True, 1e-4, 2e8),
        (Transport(shared=False), False, 1.01e-4, 1 / (1e-8 + 1e-9)),
    ],
)
def test_the_way_to_a_device_is_the_link_and_its_own_copies(
    transport: Transport, host: bool, latency: float, bandwidth: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_devices, "is_remote", lambda device: device.remote)
    faked = Faked([PROFILE], {})
    device = Far(faked, 0, transport, host=host)
    found = measured(model_on(device))
    (way,) = found.ways.values()
    assert way.latency == pytest.approx(latency)
    assert way.bandwidth == pytest.approx(bandwidth)
    # Figures that are stored are known, and nothing is measured again.
    assert known_figures(model_on(device)) == found
    assert faked.probes == 1
    measured(model_on(device), anew=True)
    assert faked.probes == 2


def test_devices_of_a_daemon_have_links_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_devices, "is_remote", lambda device: device.remote)
    faked = Faked([PROFILE, PROFILE], {(0, 1): LinkProfile(1e-9, 5e9)})
    found = measured(model_on(*(Far(faked, n, Transport(shared=False), host=False) for n in range(2))))
    first, second = found.profiles
    assert found.links[first, second] == LinkProfile(1e-9, 5e9)
    # The other way round it is two copies.
    assert found.links[second, first].latency == 2e-6
    assert found.links[second, first].bandwidth == pytest.approx(5e8)


def test_gpus_of_daemons_are_measured_at_the_same_time_and_cpus_when_they_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measured_devices, "is_remote", lambda device: device.remote)
    order: list[str] = []

    class Noted(Faked):
        def __init__(self, name: str) -> None:
            super().__init__([PROFILE], {})
            self.name = name

        def before_load(self, work: Callable[[Any], Any]) -> Any:
            future = super().before_load(work)
            if work is probe_link:
                return future
            order.append(f"{self.name} begins")
            return type("Future", (), {"result": lambda own: (order.append(f"{self.name} ends"), future.result())[1]})()

    def own(device: Device, types: Any, **how: Any) -> DeviceProfile:
        order.append(str(device.name))
        return PROFILE

    monkeypatch.setattr(measured_devices, "profile_of", own)
    monkeypatch.setattr(measured_devices, "stored_profile", lambda *device, **how: None)
    far = [Far(Noted(name), number, Transport(), host=name == "c") for number, name in enumerate("abc")]
    # Each daemon has one device.
    for device in far:
        device.number = 0
    measured(model_on(HostDevice(), *far), anew=True)
    assert order == ["a begins", "b begins", "a ends", "b ends", "cpu:0", "c begins", "c ends"]


def test_a_daemon_without_figures_is_an_error_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_devices, "is_remote", lambda device: device.remote)
    device = Far(Faked([None], {}), 0, Transport(), host=True)
    with pytest.raises(DeviceError, match=r"tcp://b:1/cpu:0: not measured within inf s"):
        measured(model_on(device))
    assert known_figures(model_on(device)) is None


def test_a_slow_link_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(measured_devices, "is_remote", lambda device: device.remote)
    monkeypatch.setattr(measured_devices.LINKS, "read", lambda path: LinkProfile(0.3, 1e9))
    measured(model_on(Far(Faked([PROFILE], {}), 0, Transport(), host=True)))
    assert "link_slow" in caplog.text


def test_a_placement_over_a_daemon_is_predicted() -> None:
    """A real daemon in a thread."""
    with started() as supervisor:
        device = RemoteDevice(DeviceName("cpu", 0), supervisor, 0, Transport(shared=False))
        found = measured(model_on(device))
        assert found.ways["cpu:0"].bandwidth > 1e6
        assert found.profiles["cpu:0"].formats.keys() == {"F32"}
        assert known_figures(model_on(device)) is not None
