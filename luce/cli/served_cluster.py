"""The cluster of `luce serve --cluster`: machines join, and the model is loaded on their devices too."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from luce import log
from luce.api import Model
from luce.assembly import open_model
from luce.cluster.admin import answering, join_command
from luce.cluster.cluster_status import ModelFacts, span_text
from luce.cluster.coordinator import TOKEN_SECONDS, Coordinator
from luce.cluster.weight_source import WeightSource
from luce.cluster.wire import DeviceMemory, PlanStatus, StageStatus
from luce.config.settings import Config, flag
from luce.errors import LuceError, ServerError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import open_gguf
from luce.planner.prediction import LinkPrediction
from luce.remote.device import MEMBER

_log = logging.getLogger("luce.cluster")
#: seconds in which the coordinator learns of a loss by which a load has failed
LOSS_SECONDS = 2.0


class ServedCluster:
    """Loads the server's model on its own devices and those of the members."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        #: lets the server load its model anew, without waiting for it; None before it is loaded for the first time
        self.reload: Callable[[], None] | None = None
        #: the loaded model, which this does not keep from being freed
        self._model: Callable[[], Model | None] = lambda: None
        coordinator.model_facts = self._facts
        self.status = coordinator.status

    def replan(self) -> None:
        """Load the model anew, on the devices that are there now. Raises ServerError before it is loaded."""
        if self.reload is None:
            raise ServerError("the model is not loaded yet")
        self.reload()

    def open_model(
        self, path: Path, config: Config, progress: Callable[[float], None], on_wait: Callable[[str], None]
    ) -> Model:
        """The model, the first time once --cluster-min members are there or --cluster-wait is over.

        `on_wait` gets what the load waits for, and "" behind it. Raises as luce.assembly.open_model.
        """
        wanted = config.cluster_min

        def waiting(found: int) -> None:
            on_wait(f"waiting for members: {found} of {wanted}")

        # A new placement is that of the members that are there.
        patience = config.cluster_wait if self.reload is None else 0.0
        found = self._coordinator.wait_for_members(wanted, patience, waiting)
        on_wait("")
        if found < wanted:
            _log.warning(
                "%s %d: %d members are there; the model loads without more", flag("cluster_min"), wanted, found
            )
        without: frozenset[str] = frozenset()
        why = "start" if self.reload is None else "command"
        while True:
            try:
                return self._load(path, config, progress, without, why)
            except LuceError as error:
                unfit, lost = self._coordinator.broken(LOSS_SECONDS)
                without |= unfit
                why = "loss" if lost else "unfit"
                if not unfit and not lost:
                    raise
                _log.warning("the load failed, and begins again without what is not there: %s", error)
                self._coordinator.wait_for_members(wanted, config.cluster_wait, waiting)
                on_wait("")

    def _load(
        self, path: Path, config: Config, progress: Callable[[float], None], without: Collection[str], why: str
    ) -> Model:
        """The model on the members that are there now, but not on those of `without`."""
        with open_gguf(path) as file:
            identity = fingerprint(file)
        source = WeightSource(path, config.cluster_stream_rate * 1e6, streams=config.cluster_stream == "on")
        devices, connects = self._coordinator.plan(identity, source, without, why)
        own = config.target_devices or (("auto",) if config.target_device == "auto" else (config.target_device,))
        model = open_model(path, dataclasses.replace(config, target_devices=(*own, *devices)), progress, connects)
        placed = {str(shard["device"]): shard["layers"] for shard in model.placement}
        self._coordinator.keep({device: range(at[0], at[1] + 1) for device, at in placed.items()}, why)
        self._model = weakref.ref(model)
        for device, rate in _bandwidths(model).items():
            log.event(_log, "member measured", device=device, bytes_per_second=rate)
        return model

    def _facts(self) -> ModelFacts | None:
        model = self._model()
        if model is None:
            return None
        memory = {name: DeviceMemory(found.free, found.total) for name, found in model.memory().items()}
        return ModelFacts(plan_status(model), memory, _bandwidths(model))


def _bandwidths(model: Model) -> dict[str, float]:
    """As in ModelFacts."""
    known = {} if model.plan is None else model.plan.known.ways
    return {name: way.bandwidth for name, way in known.items() if name.startswith(MEMBER)}


def plan_status(model: Model) -> PlanStatus:
    """The placement of a model, and how fast it is."""
    prediction = None if model.plan is None else model.plan.prediction
    predicted = {} if prediction is None else {s.shard.device: 1000 * s.decode.total for s in prediction.shards}
    stages = []
    for shard in model.placement:
        first, last = shard["layers"]
        stages.append(StageStatus(shard["device"], span_text(range(first, last + 1)), predicted.get(shard["device"])))
    done = model.engine.stats().finished
    return PlanStatus(
        tuple(stages),
        None if prediction is None else prediction.decode_rate,
        None if prediction is None else prediction.prompt_rate,
        _rate(done.predicted_tokens, done.predicted),
        _rate(done.prompt_tokens - done.cached_tokens, done.prompt),
        None if prediction is None else 1000 * sum(map(_saved, prediction.links)),
    )


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens and seconds > 0 else None


def _saved(link: LinkPrediction) -> float:
    """Seconds of a decoding step that a connection between two members would save: an activation crosses the network
    to the coordinator and from it, and would do so once."""
    members = [device.rpartition("/")[0] for device in (link.before, link.behind)]
    remote = all(place.startswith(MEMBER) for place in members)
    return link.decode / 2 if remote and members[0] != members[1] else 0.0


@contextlib.contextmanager
def served_cluster(config: Config) -> Iterator[ServedCluster | None]:
    """The cluster of the settings, None without --cluster; prints the command with which a machine joins."""
    if not config.cluster:
        yield None
        return
    listen, announce = config.cluster_listen, config.cluster_announce
    with contextlib.closing(
        Coordinator(config.cluster, listen, flag("cluster_listen"), announce=announce)
    ) as coordinator:
        log.event(_log, "cluster", cluster=config.cluster, address=",".join(coordinator.addresses))
        cluster = ServedCluster(coordinator)
        with answering(coordinator, cluster.replan):
            _print_command(coordinator)
            yield cluster


def _print_command(coordinator: Coordinator) -> None:
    """Print the command with which a machine joins, where nobody but this user keeps it."""
    # The journal keeps what it reads, and others may read it.
    if not log.is_journal(sys.stdout):
        with contextlib.suppress(OSError):
            print(join_command(coordinator, TOKEN_SECONDS), flush=True)
            return
    _log.info("`luce cluster token` prints the command with which a machine joins")
