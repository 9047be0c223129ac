"""How shards' own times compare with their prediction while a server runs, for later plans."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from luce.backend.device_figures import correction
from luce.backend.layersplit import LayerSplitBackend
from luce.backend.prediction_facts import PredictedPlan
from luce.planner.prediction import PlacedShard
from luce.planner.problem import Problem
from luce.planner.shard_tables import shard_seconds
from luce.profiles.cached_file import in_background
from luce.profiles.profile import Observed
from luce.profiles.profile_cache import note_observed

_log = logging.getLogger("luce.profiles")
#: steps after which a device's ratio counts, and as many whose median it is
STEPS = 1000
# Steps between two looks at whether a device is slow, by which ratio, and for how many seconds before the log says so.
_LOOK, _SLOW, _LONG = 100, 1.5, 300.0
# Positions between which a prediction is made anew.
_POSITIONS = 256


class ShardObservation:
    """Compares one shard's decoding steps with their prediction. For the thread of the backend's `forward`.

    `store` gets the ratio of measured and predicted seconds after 1000 steps, and each time that their number has
    doubled since. Ratios are those to a prediction without an earlier ratio.
    """

    def __init__(
        self,
        problem: Problem,
        shard: PlacedShard,
        before: float,
        store: Callable[[Observed], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._problem, self._shard = problem, shard
        (self._device,) = (device for device in problem.devices if device.name == shard.device)
        self._before = before
        self._store = store
        self._clock = clock
        self._ratios: deque[float] = deque(maxlen=STEPS)
        self._predicted: dict[int, float] = {}
        #: steps so far, and those after which the ratio is stored next
        self._steps, self._next = 0, STEPS
        #: since when the device has been slow, and whether the log has said so
        self._slow_since: float | None = None
        self._told = False

    def add(self, position: int, seconds: float) -> None:
        """Count a decoding step of one row at a position."""
        self._ratios.append(seconds / self.expected(position))
        self._steps += 1
        if self._steps % _LOOK == 0:
            self._look()
        if self._steps == self._next:
            self._next *= 2
            self._store(Observed(statistics.median(self._ratios) * self._before, self._steps))

    def expected(self, position: int) -> float:
        """Predicted seconds of the device's work on a row at a position."""
        part = position // _POSITIONS
        if part not in self._predicted:
            load = replace(self._problem.load, rows=1, depth=part * _POSITIONS + _POSITIONS // 2)
            problem, layers = replace(self._problem, load=load), self._shard.layers
            decode, _ = shard_seconds(problem, self._device, layers, self._shard.offloaded, 0.0, 1)
            # Events of the device do not contain what the host takes to see them.
            self._predicted[part] = decode.total - decode.step
        return self._predicted[part]

    def _look(self) -> None:
        ratio, now = statistics.median(list(self._ratios)[-_LOOK:]), self._clock()
        if ratio <= _SLOW:
            self._slow_since = None
            return
        self._slow_since = now if self._slow_since is None else self._slow_since
        if now - self._slow_since >= _LONG and not self._told:
            self._told = True
            _log.warning(
                "%s takes %.1f times as long as predicted (other programs, power, heat?); luce doctor --measure",
                self._device.name,
                ratio,
            )


def observe(backend: LayerSplitBackend, plan: PredictedPlan) -> None:
    """Compare the decoding steps of a backend with its plan, and keep what was observed beside the profiles of the
    devices, for later plans; daemons keep that of theirs."""
    for stage in plan.prediction.shards:
        name = stage.shard.device
        path, before = plan.known.paths.get(name), correction(plan.known.profiles[name])
        store = partial(backend.keep_observed, name) if path is None else partial(_store, path)
        backend.watch_decoding(name, ShardObservation(plan.problem, stage.shard, before, store).add)


def _store(path: Path, observed: Observed) -> None:
    in_background(partial(note_observed, path, observed))
