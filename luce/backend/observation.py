"""How shards' own times compare with their prediction while a server runs, for later plans."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from luce.backend.layersplit import LayerSplitBackend
from luce.backend.prediction_facts import PredictedPlan
from luce.planner.layer_time import Pass, head_time
from luce.planner.prediction import PlacedShard
from luce.planner.problem import Problem
from luce.planner.shard_tables import pass_seconds, shard_tables
from luce.profiles.cached_file import in_background
from luce.profiles.profile import Observed, Phase
from luce.profiles.profile_cache import note_observed
from luce.shard.timing import SequenceRows

_log = logging.getLogger("luce.profiles")
#: decoding steps, and pieces of prompts, after which a device's ratio counts, and as many whose median it is
STEPS, PIECES = 1000, 16
#: fewest rows of a piece that is compared: what a shorter one takes beside its products is not measured
_LEAST_ROWS = 256
# Steps between two looks at whether a device is slow, by which ratio, and for how many seconds before the log says so.
_LOOK, _SLOW, _LONG = 100, 1.5, 300.0
# Positions between which a prediction is made anew.
_POSITIONS = 256


class ShardObservation:
    """Compares one shard's decoding steps, and its pieces of prompts, with their prediction. For the thread of the
    backend's `forward`.

    `store` gets the ratio of measured and predicted seconds after 1000 steps, or 16 pieces, and each time that their
    number has doubled since. Ratios are those to a prediction without an earlier ratio. `prompts`: whether pieces of
    prompts are compared.
    """

    def __init__(
        self,
        problem: Problem,
        shard: PlacedShard,
        store: Callable[[Phase, Observed], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        prompts: bool = True,
    ) -> None:
        self._problem, self._shard = problem, shard
        (self._device,) = (device for device in problem.devices if device.name == shard.device)
        self._clock = clock
        self._prompts = prompts
        self._seen: dict[Phase, _Ratios] = {
            "decode": _Ratios(STEPS, self._device.decode_ratio, partial(store, "decode")),
            "prompt": _Ratios(PIECES, self._device.prompt_ratio, partial(store, "prompt")),
        }
        self._predicted: dict[int, float] = {}
        tables = shard_tables(problem, self._device, _LEAST_ROWS, offloaded=shard.offloaded)
        self._unpacked = float(tables.unpacked[shard.layers.start, shard.layers.stop])
        #: since when the device has been slow, and whether the log has said so
        self._slow_since: float | None = None
        self._told = False

    def add(self, rows: SequenceRows, seconds: float) -> None:
        """Count what a step of one sequence took."""
        if rows.rows == rows.outputs == 1:
            phase: Phase = "decode"
        elif self._prompts and rows.rows >= _LEAST_ROWS:
            phase = "prompt"
        else:
            return
        seen = self._seen[phase]
        seen.add(seconds / self.expected(rows))
        if phase == "decode" and seen.count % _LOOK == 0:
            self._look(seen)

    def expected(self, rows: SequenceRows) -> float:
        """Predicted seconds of the device's work on a step."""
        if rows.rows > 1:
            # A row sees what is before the piece, and half of the piece.
            seconds = self._seconds(Pass("prompt", rows.rows, rows.position + rows.rows / 2))
            model = self._problem.model
            if rows.outputs and self._shard.layers.stop == len(model.layers):
                seconds += head_time(self._device, model.head, rows.outputs).total
            return seconds
        part = rows.position // _POSITIONS
        if part not in self._predicted:
            self._predicted[part] = self._seconds(Pass("decode", 1, part * _POSITIONS + _POSITIONS // 2))
        return self._predicted[part]

    def _seconds(self, work: Pass) -> float:
        shard = self._shard
        seconds = pass_seconds(self._problem, self._device, shard.layers, shard.offloaded, work, self._unpacked)
        # Events of the device do not contain what the host takes to see them.
        return seconds.total - seconds.step

    def _look(self, seen: _Ratios) -> None:
        ratio, now = seen.median(_LOOK), self._clock()
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


class _Ratios:
    """The last ratios of a phase, whose median is stored when `kept` of them are there and when they have doubled."""

    def __init__(self, kept: int, before: float, store: Callable[[Observed], None]) -> None:
        self._ratios: deque[float] = deque(maxlen=kept)
        self._before, self._store = before, store
        self.count, self._next = 0, kept

    def add(self, ratio: float) -> None:
        self._ratios.append(ratio)
        self.count += 1
        if self.count == self._next:
            self._next *= 2
            self._store(Observed(self.median(self.count) * self._before, self.count))

    def median(self, last: int) -> float:
        return statistics.median(list(self._ratios)[-last:])


def observe(backend: LayerSplitBackend, plan: PredictedPlan) -> None:
    """Compare the steps of a backend with its plan, and keep what was observed beside the profiles of the devices, for
    later plans; daemons keep that of theirs."""
    for stage in plan.prediction.shards:
        name = stage.shard.device
        path = plan.known.paths.get(name)
        store = partial(backend.keep_observed, name) if path is None else partial(_store, path)
        # What is stored of prompts is in fp16.
        prompts = not plan.known.int8
        backend.watch_rows(name, ShardObservation(plan.problem, stage.shard, store, prompts=prompts).add)


def _store(path: Path, phase: Phase, observed: Observed) -> None:
    in_background(partial(note_observed, path, phase, observed))
