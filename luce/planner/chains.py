"""Which chains of devices a placement may have: what may follow a chain, and all chains by the devices they use."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from luce.planner.figures import DeviceFigures, LinkFigures
from luce.planner.problem import Problem
from luce.planner.shard_tables import Ints

#: figures that are measured
_MEASURED = (
    "free",
    "read",
    "rates",
    "launch",
    "routing",
    "step",
    "way",
    "unpack",
    "bus",
    "expand",
    "state_expand",
    "state_read",
    "attention",
    "elementwise",
    "recurrence",
    "recurrence_row",
    "layer",
    "gather",
    "decode_ratio",
    "prompt_ratio",
)
# Of more devices than this, those are interchangeable whose figures differ by less than 1 %, which is less than figures
# vary by from one measurement to the next. Of fewer devices, all orders are searched in no time.
_FEW, _SAME = 4, 0.01
#: sets of devices with a last one, beyond which chains are told apart by their length and their last device alone;
#: eight unlike devices have 1024, eleven 11,264
MOST_STATES = 12_000


@dataclass(frozen=True)
class Level:
    """The states of chains of one length.

    A state is what decides how a chain may go on: the devices that it uses and the last one.
    """

    #: [states]: devices used, as bits; 0 where only the last one tells states apart
    used: Ints
    #: [states]: the last device
    last: Ints
    #: [edges]: states that one more device leads away from, rising, and the state of the next level that it leads to
    source: Ints
    target: Ints


class Chains:
    """The chains that a problem's placements may have."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._devices = problem.devices
        #: whether `levels` tells chains apart by their length and their last device alone
        self.by_length = False
        self._twins = [self._twin(index) for index in range(len(self._devices))]

    def usable(self, index: int, used: int, last: int | None) -> bool:
        """Whether a device may follow: devices of one daemon stand side by side, and of devices that differ only in
        their names the one listed first comes first."""
        if self.problem.pinned:
            return index == used.bit_count()
        if used >> index & 1 or any(not used >> twin & 1 for twin in self._twins[index]):
            return False
        daemon = self._devices[index].daemon
        if last is None or not daemon or self._devices[last].daemon == daemon:
            return True
        return all(other.daemon != daemon for at, other in enumerate(self._devices) if used >> at & 1)

    def levels(self, length: int) -> list[Level]:
        """The states of chains of 1, 2, ... up to `length` devices."""
        states = [(1 << i, i) for i in range(len(self._devices)) if self.usable(i, 0, None)]
        levels, count = list[Level](), 0
        for shards in range(1, length + 1):
            follows = [[i for i in range(len(self._devices)) if self.usable(i, *state)] for state in states]
            if shards == length:
                follows = [[] for _ in states]
            more = sorted({(used | 1 << i, i) for (used, _), ends in zip(states, follows, strict=True) for i in ends})
            count += len(states)
            if count + len(more) > MOST_STATES:
                return self._by_length(length)
            place = {state: at for at, state in enumerate(more)}
            edges = [(at, place[states[at][0] | 1 << i, i]) for at, ends in enumerate(follows) for i in ends]
            levels.append(_level(states, edges))
            states = more
            if not states:
                break
        return levels

    def _by_length(self, length: int) -> list[Level]:
        """States that do not tell which devices a chain uses. What completes any chain completes them."""
        self.by_length = True
        states = [(0, i) for i in range(len(self._devices))]
        edges = [(a, b) for a in range(len(states)) for b in range(len(states)) if a != b]
        return [_level(states, edges)] * (length - 1) + [_level(states, [])]

    def _twin(self, index: int) -> list[int]:
        return [other for other in range(index) if self._interchangeable(other, index)]

    def _interchangeable(self, first: int, second: int) -> bool:
        a, b = self._devices[first], self._devices[second]
        if not _same_figures(a, b, _SAME if len(self._devices) > _FEW else 0.0):
            return False
        links = self.problem.links
        others = [device.name for device in self._devices if device not in (a, b)]
        return links.get((a.name, b.name)) == links.get((b.name, a.name)) and all(
            links.get((a.name, other)) == links.get((b.name, other))
            and links.get((other, a.name)) == links.get((other, b.name))
            for other in others
        )


def _level(states: list[tuple[int, int]], edges: list[tuple[int, int]]) -> Level:
    used, last = (np.array(column, np.int64) for column in zip(*states, strict=True))
    ways = np.array(edges, np.int64).reshape(-1, 2)
    return Level(used, last, ways[:, 0], ways[:, 1])


def _same_figures(a: DeviceFigures, b: DeviceFigures, share: float) -> bool:
    """Whether devices differ in their names, and in figures that are measured by at most a share."""
    return replace(b, **{name: getattr(a, name) for name in _MEASURED}, name=a.name) == a and all(
        _alike(getattr(a, name), getattr(b, name), share) for name in _MEASURED
    )


def _alike(a: Any, b: Any, share: float) -> bool:
    if a is None or b is None:
        return a is b
    if isinstance(a, LinkFigures):
        return _alike((a.latency, a.bandwidth), (b.latency, b.bandwidth), share)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(_alike(x, y, share) for x, y in zip(a, b, strict=True))
    return math.isclose(a, b, rel_tol=share)
