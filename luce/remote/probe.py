"""Figures of daemons, before they load: a daemon measures its own devices, the server measures the link to it.

A link is measured with small messages and with those of the size of an activation, on the connection that steps use.
Where activations lie in shared memory, that is what it takes to wake the daemon; the bytes are then copied by the
devices themselves.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from gguf import GGMLQuantizationType

from luce.errors import BackendError, LuceError
from luce.ipc.channel import SMALL_FRAME, ProtocolError
from luce.ipc.supervisor import Ask
from luce.profiles.measuring import peer_links
from luce.profiles.profile import LinkProfile
from luce.profiles.profile_cache import default_measuring, profile_key, profile_of, stored_profile
from luce.remote.messages import Measure, Measured, MeasuredDevice, PeerFigures, Probe, Probed
from luce.runtime.device import Device

# Bytes of a message that takes no time beside the latency, of a row of hidden states, and of the first and the largest
# messages that show the bandwidth.
_SMALL, _ROW, _FEW, _MANY = 64, 4 * 5120, 1 << 18, SMALL_FRAME
# Most round trips of few and of many bytes, the fewest, and the seconds after which the fewest must do.
_TRIPS, _COPIES, _FEWEST, _SECONDS = 50, 5, 3, 2.0
#: a message must take this many times the latency to show the bandwidth, or this many seconds
_LONG, _ENOUGH = 20, 0.25


def measure_devices(devices: Sequence[Device], message: Measure) -> Measured:
    """A daemon's response to Measure. Raises BackendError for a type of weights that does not exist."""
    try:
        types = [GGMLQuantizationType[name] for name in message.types]
    except KeyError as error:
        raise BackendError(f"there are no weights of type {error.args[0]!r}") from None
    end = time.monotonic() + message.seconds
    found = [_measured(device, types, message, end) for device in devices]
    peers = (PeerFigures(before, behind, link) for (before, behind), link in peer_links(devices).items())
    return Measured(tuple(found), tuple(peers))


def _measured(device: Device, types: Sequence[GGMLQuantizationType], message: Measure, end: float) -> MeasuredDevice:
    key = profile_key(device)
    experts, recurrent, int8 = message.experts, message.recurrent, message.int8
    known = None
    if not message.anew:
        known = stored_profile(device, types, experts=experts, recurrent=recurrent, int8=int8)
    if known is not None or time.monotonic() >= end:
        return MeasuredDevice(key, known)
    how = replace(default_measuring(device), experts=experts, recurrent=recurrent, int8=int8, end=end)
    try:
        return MeasuredDevice(key, profile_of(device, types, anew=message.anew, how=how))
    except LuceError as error:
        return MeasuredDevice(key, None, str(error))


def answer_probe(message: Probe) -> Probed:
    """A daemon's response to Probe. Raises BackendError for more bytes than a frame may have."""
    if not 0 <= message.answer <= _MANY:
        raise BackendError(f"a probe asks for {message.answer} bytes, at most {_MANY} are sent")
    return Probed(np.zeros(message.answer, np.uint8))


@dataclass(frozen=True)
class DaemonFigures:
    """What a daemon says of its devices."""

    devices: tuple[MeasuredDevice, ...]
    #: links between its own devices, by their numbers
    peers: dict[tuple[int, int], LinkProfile]


def ask_figures(ask: Ask, message: Measure, devices: int) -> DaemonFigures:
    """The figures of a daemon's devices, which it measures where they are missing.

    Raises ProtocolError for figures that cannot be: no numbers, not positive, or far beyond any device.
    """
    found = ask(message, Measured)
    if len(found.devices) != devices:
        raise ProtocolError(f"it sent figures of {len(found.devices)} devices instead of {devices}")
    for number, device in enumerate(found.devices):
        flaw = "" if device.profile is None else device.profile.flaw
        if not flaw and device.profile is not None and not device.profile.formats.keys() >= set(message.types):
            flaw = "types of weights are missing"
        if flaw:
            raise ProtocolError(f"it sent figures of device {number} that cannot be: {flaw}")
    peers = {}
    for peer in found.peers:
        pair = peer.before, peer.behind
        if peer.link.flaw or not all(0 <= number < devices for number in pair) or pair[0] == pair[1]:
            raise ProtocolError(f"it sent a link of devices {pair} that cannot be: {peer.link.flaw}")
        peers[pair] = peer.link
    return DaemonFigures(found.devices, peers)


def probe_link(ask: Ask, clock: Callable[[], float] = time.perf_counter) -> LinkProfile:
    """The link to a daemon: half of the median round trip of a small message, or of a row without the time of its
    bytes, whichever is longer; and the bandwidth of as many bytes as take long enough, there and back.

    Raises ProtocolError if the daemon sends something else back.
    """

    def trip(data: np.ndarray) -> float:
        began = clock()
        response = ask(Probe(data, len(data)), Probed)
        seconds = clock() - began
        if response.data.shape != data.shape:
            raise ProtocolError(f"it answered a probe of {len(data)} bytes with {response.data.shape}")
        return seconds

    def median(size: int, most: int) -> float:
        data, found = np.zeros(size, np.uint8), list[float]()
        while len(found) < _FEWEST or (len(found) < most and sum(found) < _SECONDS):
            found.append(trip(data))
        return statistics.median(found)

    trip(np.zeros(_ROW, np.uint8))
    small, row = median(_SMALL, _TRIPS), median(_ROW, _TRIPS)
    size = _FEW
    while size < _MANY and trip(np.zeros(size, np.uint8)) < max(_ENOUGH, _LONG * row):
        size *= 4
    size = min(size, _MANY)
    many = median(size, _COPIES)
    bandwidth = 2 * (size - _ROW) / max(many - row, 1e-9)
    # A connection may begin with few bytes, which delays a row; and a link that carries a burst faster than its rate
    # delivers a row sooner than its bytes take at that rate, which leaves no latency.
    latency = max(small / 2 - _SMALL / bandwidth, row / 2 - _ROW / bandwidth, 0.0)
    return LinkProfile(latency, bandwidth)
