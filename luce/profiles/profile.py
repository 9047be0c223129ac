"""The figures of a device and of a link."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

#: of a server's work: decoding steps, or pieces of prompts
Phase = Literal["decode", "prompt"]

_Range = tuple[float, float]
# A figure is above the first number and at most the second one: a hundred times what the fastest card of
# known_cards.py reaches, so that only lies and errors of a clock are beyond it.
_BYTES, _OPERATIONS = (0.0, 100 * 8e12), (0.0, 100 * 2.5e15)
_SECONDS, _RATIO, _ROWS = (-1e-300, 3600.0), (0.0, 1e6), (0.0, float(1 << 20))
_STEPS = 0.0, sys.float_info.max


@dataclass(frozen=True)
class FormatProfile:
    """Products with weights of one type."""

    #: bytes of weights per second in a product of one row, as the device holds them
    read: float
    #: operations per second by the number of rows
    rates: dict[int, float]
    #: float16 bytes per second of unpacking; None where products of many rows read packed weights
    unpack: float | None
    #: the widest distance of quartiles as a share of the median
    spread: float
    noisy: bool
    #: by the number of rows, the share of `read` and `rates` that products with routed experts reach; empty: not
    #: measured
    gather: dict[int, float] = field(default_factory=dict)
    #: operations per second by the number of rows, and bytes per second of unpacking, where many rows multiply in int8
    #: (--prompt-precision int8); empty, None: not measured, or not possible
    int8: dict[int, float] = field(default_factory=dict)
    int8_unpack: float | None = None
    #: seconds that one row takes in a layer beside reading the weights, attention and recurrent states: of norms and
    #: activations, and of threads that wait for each other. Of devices of the host; 0 on others, which have launches
    layer: float = 0.0


@dataclass(frozen=True)
class LinkProfile:
    """How fast bytes get from one place to another."""

    #: seconds, one way
    latency: float
    #: bytes per second
    bandwidth: float

    @property
    def flaw(self) -> str:
        """The first figure that cannot be, with its value; empty if all can."""
        return _first_flaw([("latency", self.latency, _SECONDS), ("bandwidth", self.bandwidth, _BYTES)])


def _first_flaw(figures: Iterable[tuple[str, float, _Range]]) -> str:
    for name, value, (above, most) in figures:
        # Not a number is never between.
        if not above < value <= most:
            return f"{name} is {value}"
    return ""


@dataclass(frozen=True)
class Observed:
    """How a device's decoding steps, or its pieces of prompts, compared with their prediction while servers ran."""

    #: the median of measured seconds by predicted seconds
    ratio: float
    #: that were compared
    steps: int

    @property
    def flaw(self) -> str:
        """The first figure that cannot be, with its value; empty if all can."""
        return _first_flaw([("observed.ratio", self.ratio, _RATIO), ("observed.steps", self.steps, _STEPS)])


@dataclass(frozen=True)
class DeviceProfile:
    """The figures of a device."""

    device: str
    name: str
    #: seconds since 1970
    measured: float
    #: seconds from queueing the smallest kernel until the host sees that it is done
    step: float
    #: seconds of one of many small kernels in a row
    launch: float
    #: between the device and pinned host memory
    way: LinkProfile
    #: by type of weights, such as Q4_K
    formats: dict[str, FormatProfile] = field(default_factory=dict)
    #: bytes of keys and values per second in attention of one row; None: not measured
    state_read: float | None = None
    #: operations per second of a prompt's attention; None: not measured
    attention: float | None = None
    #: bytes of activations per second that norms, gates and the like read and write; None: not measured
    elementwise: float | None = None
    #: bytes of recurrent states per second that the rows of a prompt read and write; None: not measured
    recurrence: float | None = None
    #: the same of one row, of devices of the host; None: not measured
    recurrence_row: float | None = None
    #: seconds of choosing the experts of a row and adding their results on a device of the host, where that is no
    #: launch but Python; 0 on others, and where no experts are measured
    routing: float = 0.0
    #: of servers that ran since the measurement, by phase; empty: of none
    observed: dict[Phase, Observed] = field(default_factory=dict)

    @property
    def flaw(self) -> str:
        """The first figure that cannot be, with its value; empty if all can."""
        if not all(found.rates for found in self.formats.values()):
            return "rates are missing"
        seen = (observed.flaw for observed in self.observed.values())
        return _first_flaw(self._figures()) or next(filter(None, seen), "")

    def _figures(self) -> Iterator[tuple[str, float, _Range]]:
        times = {"step": self.step, "launch": self.launch, "routing": self.routing, "way.latency": self.way.latency}
        yield from ((name, seconds, _SECONDS) for name, seconds in times.items())
        yield "measured", self.measured, (-1.0, sys.float_info.max)
        yield "way.bandwidth", self.way.bandwidth, _BYTES
        measured = {"state_read": _BYTES, "attention": _OPERATIONS, "elementwise": _BYTES, "recurrence": _BYTES}
        measured["recurrence_row"] = _BYTES
        yield from ((name, value, r) for name, r in measured.items() if (value := getattr(self, name)) is not None)
        for type, found in self.formats.items():
            yield f"{type}.read", found.read, _BYTES
            yield f"{type}.layer", found.layer, _SECONDS
            yield f"{type}.spread", found.spread, (-1.0, sys.float_info.max)
            yield from ((f"{type}.rates.{rows}", rate, _OPERATIONS) for rows, rate in found.rates.items())
            yield from ((f"{type}.gather.{rows}", share, _RATIO) for rows, share in found.gather.items())
            yield from ((f"{type}: rows", rows, _ROWS) for rows in found.rates)
            yield from ((f"{type}.int8.{rows}", rate, _OPERATIONS) for rows, rate in found.int8.items())
            unpacking = {"unpack": found.unpack, "int8_unpack": found.int8_unpack}
            yield from ((f"{type}.{name}", value, _BYTES) for name, value in unpacking.items() if value is not None)
