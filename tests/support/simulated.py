"""Simulated devices for tests, and time for them that passes only where a test waits."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec

from luce.runtime.simulated_file import SimulatedFigures, SimulatedLink, SimulatedMachine, SimulatedWay

WAY = SimulatedWay(1e-5, 1e10)
LINK = SimulatedWay(2e-4, 1e9)


class VirtualClock:
    """See luce.runtime.simulated.Clock. Nothing takes time but simulated work.

    It is the time of the thread that made it: where the threads of a pipeline wait, so that they are not too far ahead
    of their devices, no time passes.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._thread = threading.get_ident()

    def now(self) -> float:
        return self._now

    def wait_until(self, at: float) -> None:
        if threading.get_ident() == self._thread:
            self._now = max(self._now, at)


def card(free: int = 1 << 40, **figures: Any) -> SimulatedFigures:
    """The figures of a card."""
    own: dict[str, Any] = {"read": 1e12, "rates": {1: 1e13}, "launch": 1e-6, "step": 1e-5, "way": WAY}
    return SimulatedFigures(name="card", free=free, **(own | figures))


def machine(*cards: SimulatedFigures, linked: bool = False) -> SimulatedMachine:
    """A machine with these cards; `linked`: each one reaches all others."""
    names = [f"sim:{index}" for index in range(len(cards))]
    pairs = [(before, behind) for before in names for behind in names if before != behind and linked]
    return SimulatedMachine(cards, tuple(SimulatedLink(*pair, LINK.latency, LINK.bandwidth) for pair in pairs))


def write(path: Path, *cards: SimulatedFigures, linked: bool = False) -> Path:
    """A file of simulated devices."""
    path.write_bytes(msgspec.json.encode(machine(*cards, linked=linked)))
    return path
