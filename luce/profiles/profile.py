"""The figures of a device and of a link."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field


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


@dataclass(frozen=True)
class LinkProfile:
    """How fast bytes get from one place to another."""

    #: seconds, one way
    latency: float
    #: bytes per second
    bandwidth: float

    @property
    def sound(self) -> bool:
        """Whether both figures are finite and positive."""
        return math.isfinite(self.latency) and self.latency >= 0 and 0 < self.bandwidth < math.inf


@dataclass(frozen=True)
class Observed:
    """How a device's decoding steps compared with their prediction while a server ran."""

    #: the median of measured seconds by predicted seconds
    ratio: float
    steps: int


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
    #: seconds of choosing the experts of a row and adding their results on a device of the host, where that is no
    #: launch but Python; 0 on others, and where no experts are measured
    routing: float = 0.0
    #: of servers that ran since the measurement
    observed: Observed | None = None

    @property
    def sound(self) -> bool:
        """Whether every figure is finite and positive; times may be 0."""
        return self.way.sound and all(self._figures())

    def _figures(self) -> Iterator[bool]:
        times = self.measured, self.step, self.launch, self.routing
        yield from (math.isfinite(seconds) and seconds >= 0 for seconds in times)
        rates = [] if self.state_read is None else [self.state_read]
        for found in self.formats.values():
            yield bool(found.rates) and min(found.rates) > 0
            yield math.isfinite(found.spread)
            rates += [found.read, *found.rates.values(), *found.gather.values()]
            rates += [] if found.unpack is None else [found.unpack]
        rates += [] if self.observed is None else [self.observed.ratio]
        yield from (0 < rate < math.inf for rate in rates)
