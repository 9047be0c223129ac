"""When a server tries another placement by itself (--cluster-replan auto). Pure: the caller gives the time."""

from __future__ import annotations

#: how much faster than the last one a placement has to be
LEAST_GAIN = 1.15
#: least seconds between two placements, and seconds without a request before one is tried
INTERVAL, QUIET = 600.0, 30.0


class AutoReplan:
    """A placement is tried once for the members that have come since the last one. Times are monotonic seconds.

    `parallel`: how many requests run at a time.
    """

    def __init__(self, parallel: int, now: float) -> None:
        self._parallel = parallel
        self._placed = self._busy = now
        #: members without layers that an earlier placement could have used
        self._passed_over: frozenset[str] = frozenset()

    def due(self, now: float, idle: frozenset[str], *, running: int, waiting: int) -> bool:
        """Whether to try a placement now. `idle`: members without layers; `running`, `waiting`: requests."""
        if running or waiting:
            self._busy = now
        self._passed_over &= idle
        if idle <= self._passed_over or now - self._placed < INTERVAL:
            return False
        return waiting > self._parallel or now - self._busy >= QUIET

    def placed(self, now: float, idle: frozenset[str]) -> None:
        """The model has been placed, for any reason, and these members have no layers."""
        self._placed, self._passed_over = now, idle


def gains_enough(before: float, now: float) -> bool:
    """Whether a placement is worth it, by its predicted tokens per second and those of the one before."""
    return now >= LEAST_GAIN * before
