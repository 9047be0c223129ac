"""Times work on a device: medians of a few runs, fewer where they take long.

On a GPU each figure is timed by itself. The speed of a host changes from one second to the next, with other programs
and the clocks of its cores, and what was timed apart has no difference and no ratio: there all figures are timed in
turn, round for round. So what one of them reads is in no cache, as in a model's steps.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from luce.runtime.device import Device

# Runs before the timed ones, timed runs, the fewest of them where they take too long, and the most rounds of a host
# where they disagree.
_WARM_UPS, _RUNS, _FEWEST, _MOST = 2, 7, 3, 14
#: figures whose quartiles lie further apart, as a share of the median, are noisy
_NOISY = 0.25
#: what takes fewer seconds than this is a small part of a step, and seldom agrees
_SHORT = 1e-3
#: columns of matrices
COLUMNS = 4096
#: share of a figure's time that one run may take
_SHARE = 0.2
#: fewest features of a matrix: with fewer ones a GPU has blocks without work
_LEAST_FEATURES = 1024


@dataclass(frozen=True)
class ExpertSizes:
    """The routed experts whose products are measured."""

    count: int = 64
    #: that each row chooses
    used: int = 8
    #: of the matrix of one expert
    bytes: int = 1 << 21
    #: rows of the products
    rows: tuple[int, ...] = (1, 16, 512)


@dataclass(frozen=True)
class ProfileSizes:
    """How much is computed for a profile."""

    #: of the matrix in products of few rows; at most 2 % of the free memory
    matrix_bytes: int = 1 << 28
    columns: int = COLUMNS
    #: fewest features of a matrix whose products take too long with all of them
    features: int = _LEAST_FEATURES
    #: rows of the products
    rows: tuple[int, ...] = (1, 16, 512, 2048)
    #: the smallest kernels in a row
    launches: int = 256
    #: bytes of the copy
    copied: int = 1 << 24
    #: seconds for the runs of one figure, of which no run begins after them but the fewest
    seconds: float = 0.1
    #: keys and values that a row of attention sees
    positions: int = 8192
    #: rows of a prompt in attention and recurrent layers
    prompt: int = 2048
    experts: ExpertSizes = ExpertSizes()
    #: recurrent layers of one row, whose states no cache holds together
    recurrent_layers: int = 32
    #: heads of values of a recurrent layer that many rows pass
    recurrent_heads: int = 32


# Where a CPU takes part, no piece of a prompt has more rows without --chunk. Models that it runs have 1024 to 4096
# columns; of 512 rows a core computes 119, 110 and 101 GFLOP/s with 1024, 2048 and 4096 of them (AMD EPYC, Q4_K).
HOST_PROFILE = ProfileSizes(
    columns=COLUMNS // 2, rows=(1, 16, 512), seconds=0.25, prompt=512, experts=ExpertSizes(rows=(1, 16, 128))
)
GPU_PROFILE = ProfileSizes()


@dataclass(frozen=True)
class Measuring:
    """How a device is measured."""

    sizes: ProfileSizes
    #: whether products with routed experts are measured
    experts: bool = False
    #: whether gated DeltaNet is measured
    recurrent: bool = False
    #: whether products of many rows in int8 are measured, where the device has them
    int8: bool = False
    #: when it is to end (time.monotonic); figures after that get the fewest runs
    end: float = math.inf
    #: gets what is measured next
    on_figure: Callable[[str], None] = lambda figure: None


class Timed:
    """The seconds of a piece of work, run by run; on a host they are there after Timer.finish."""

    def __init__(self, figure: str) -> None:
        #: what an error calls it
        self.figure = figure
        self.seconds: list[float] = []

    @property
    def median(self) -> float:
        return max(statistics.median(self.seconds), 1e-9)

    @property
    def spread(self) -> float:
        """The distance of the quartiles as a share of the median."""
        first, _, third = statistics.quantiles(self.seconds, n=4)
        return (third - first) / self.median

    @property
    def noisy(self) -> bool:
        return len(self.seconds) < _RUNS or self.spread > _NOISY


def median_of(value: Callable[..., float], *timed: Timed) -> float:
    """The median of what follows from pieces of work that were timed in the same rounds."""
    return statistics.median(map(value, *(work.seconds for work in timed)))


class Timer:
    """Times work on a device."""

    def __init__(self, device: Device, how: Measuring) -> None:
        self.device, self.how, self.sizes = device, how, how.sizes
        #: what is measured now, and on which device
        self.figure = str(device.name)
        self._waiting: list[tuple[Timed, Callable[[], float]]] = []

    def tell(self, figure: str) -> None:
        self.figure = f"{self.device.name}: {figure}"
        self.how.on_figure(self.figure)

    def runs(self, work: Callable[[], object], *, again: bool = False) -> Timed:
        """Seconds of `work` between two events of the device.

        `again`: behind the same work, so that what it reads has just been written.
        """
        return self.repeated(lambda: self.once(work, again=again))

    def once(self, work: Callable[[], object], *, again: bool = False) -> float:
        """Seconds of `work`; on a GPU behind the same work, untimed: it computes while Python queues what is timed."""
        if again or not self.device.host:
            work()
        start = self.device.record(timing=True)
        work()
        end = self.device.record(timing=True)
        end.wait()
        return end.seconds_since(start)

    def repeated(self, once: Callable[[], float]) -> Timed:
        """The seconds that `once` returns, time after time."""
        timed = Timed(self.figure)
        self._waiting.append((timed, once))
        if not self.device.host:
            self._measure()
        return timed

    def finish(self) -> None:
        """Time what waits for it, all in turn."""
        if self._waiting:
            self.tell("all in turn")
            self._measure()

    def _measure(self) -> None:
        """Time what waits: 7 rounds, more where they disagree, and fewer where the time is over."""
        waiting, self._waiting = self._waiting, []
        for timed, once in waiting:
            self.figure = timed.figure
            for _ in range(_WARM_UPS):
                once()
        spent, rounds = 0.0, 0
        while rounds < _FEWEST or (spent < self._seconds() * len(waiting) and self._goes_on(rounds, waiting)):
            for timed, once in waiting:
                self.figure = timed.figure
                timed.seconds.append(once())
                spent += timed.seconds[-1]
            rounds += 1

    def _goes_on(self, rounds: int, waiting: Sequence[tuple[Timed, object]]) -> bool:
        if rounds < _RUNS or not self.device.host:
            return rounds < _RUNS
        return rounds < _MOST and any(timed.noisy and timed.median > _SHORT for timed, _ in waiting)

    def _seconds(self) -> float:
        return self.sizes.seconds if time.monotonic() < self.how.end else 0.0

    def most(self, count: int, work: Callable[[int], object], *, start: int) -> int:
        """The most of `count` with which a run of `work` is short enough: `start`, and more as long as a run has shown
        that there is time for it. So no run takes a thousand times too long."""
        limit, at = self.sizes.seconds * _SHARE, min(start, count)
        work(at)
        while at < count:
            room = limit / max(self.once(lambda at=at: work(at)), 1e-9)  # type: ignore[misc]
            if room < 2:
                break
            at = min(count, int(at * min(room, 16)))
        return at


def replayed(device: Device, run: Callable[[], object]) -> Callable[[], object]:
    """Work as steps of few rows run it: captured where the device captures."""

    def work() -> tuple[()]:
        run()
        return ()

    if not device.captures:
        return work
    work()
    device.synchronize()
    return device.capture(work)[0].launch
