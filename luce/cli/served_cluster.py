"""The cluster of `luce serve --cluster`: machines join, and the model is loaded on their devices too."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from luce import log
from luce.api import Model
from luce.assembly import open_model, relocate
from luce.backend.fastest_placement import Goal
from luce.backend.placement_gains import Gain, KnownFigures, present_prediction
from luce.backend.prediction_facts import PredictedPlan
from luce.cluster.admin import answering, join_command
from luce.cluster.auto_replan import AutoReplan, gains_enough
from luce.cluster.cluster_status import ModelFacts, span_text
from luce.cluster.coordinator import Coordinator
from luce.cluster.join_token import TOKEN_SECONDS
from luce.cluster.membership import PATIENCE
from luce.cluster.weight_source import WeightSource
from luce.cluster.wire import DeviceMemory, PlanStatus, StageStatus
from luce.config.settings import Config, flag
from luce.errors import BackendError, LuceError, ServerError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import open_gguf
from luce.planner.prediction import LinkPrediction
from luce.remote.device import MEMBER
from luce.remote.open import Connects

_log = logging.getLogger("luce.cluster")
#: seconds in which the coordinator learns of a loss by which a load has failed
LOSS_SECONDS = 2.0
#: longest seconds until a wish for another placement is seen, or the end
_POLL_INTERVAL = 0.2


class _MemberGains(NamedTuple):
    """The gains of members without layers, and the placement, figures and members for which they hold."""

    plan: PredictedPlan
    figures: KnownFigures
    idle: Mapping[str, tuple[str, ...]]
    gains: Mapping[str, Gain]


class ServedCluster:
    """Loads the server's model on its own devices and those of the members, and moves it to others.

    `replans`: --cluster-replan; `parallel`: --parallel; `drain`: --cluster-drain; `loss_context`:
    --cluster-on-loss-context.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        replans: str = "manual",
        parallel: int = 1,
        drain: float = 0.0,
        loss_context: int = 0,
    ) -> None:
        self.coordinator = coordinator
        self._replans, self._drain, self._loss_context = replans, drain, loss_context
        #: whether the loaded model has the smaller context
        self._shrunk = False
        self._auto = AutoReplan(parallel, time.monotonic())
        #: lets the server load its model anew, without waiting for it; None before it is loaded for the first time
        self.reload: Callable[[], None] | None = None
        #: why it is loaded next, as in Coordinator.plan
        self._why = "start"
        #: the loaded model, which this does not keep from being freed
        self._model: Callable[[], Model | None] = lambda: None
        #: of all devices so far
        self._known = KnownFigures()
        self._gains: _MemberGains | None = None
        #: the members of its last placement, also while it has none
        self._members = frozenset[str]()
        #: its file and the settings with which it was opened
        self._opened: tuple[Path, Config] | None = None
        coordinator.model_facts = self._facts
        self.status = coordinator.status

    def replan(self) -> None:
        """Place the model anew, on the devices that are there then. Raises ServerError before it is loaded."""
        if self.reload is None:
            raise ServerError("the model is not loaded yet")
        if self._replans == "never":
            raise ServerError(f"the server was started with {flag('cluster_replan')} never")
        self.coordinator.want("command")

    def follow(self, ending: threading.Event) -> None:
        """Place the model anew whenever that is wanted, until `ending`."""
        while not ending.is_set():
            # Before the first load a placement is that of all members anyway.
            if self.reload is None:
                ending.wait(_POLL_INTERVAL)
            elif why := self.coordinator.take_wanted(_POLL_INTERVAL) or self._due():
                self._replace(why, self.reload)

    def _due(self) -> str:
        """Why a better placement is to be tried now; "" if none is."""
        model = self._model()
        if self._replans != "auto" or model is None or model.immovable or model.down():
            return ""
        stats = model.engine.stats()
        idle = frozenset(self.coordinator.idle)
        return "auto" if self._auto.due(time.monotonic(), idle, running=stats.running, waiting=stats.waiting) else ""

    def _replace(self, why: str, reload: Callable[[], None]) -> None:
        model = self._model()
        if model is None or model.immovable or self._shrunk:
            why_not = "it is not loaded" if model is None else f"{model.immovable} keeps it from moving"
            if self._shrunk:
                why_not = "it has a smaller context, and may get back its own"
            away = ", ".join(sorted(self.coordinator.placed - self.coordinator.present))
            log.event(_log, "the model is loaded anew behind its requests", reason=why_not)
            self._why = why
            reload()
            if model is not None and not model.engine.wait_idle(self._drain):
                # The engine may hear of a lost member later than the coordinator.
                without = f" without {away}" if away else ""
                model.engine.end_replies(
                    f"the model is loaded anew on other machines{without}, and this reply had no more than "
                    f"{self._drain:g} s ({flag('cluster_drain')}) to end: {why_not}"
                )
            return
        try:
            model.engine.relocate(lambda: self._move(model, why), self._drain)
        except LuceError as error:
            log.event(_log, "no placement", logging.ERROR, reason=str(error))
            if why == "loss" and self._loss_context and not self.coordinator.placed:
                # Behind the replies, which go on if the member is back before --cluster-resume is over.
                self._why = why
                reload()
        except Exception:
            # Later placements may succeed.
            _log.exception("the model could not be placed")

    def _move(self, model: Model, why: str) -> None:
        """Move the model to the members that are there and stay. On the engine's thread. Raises LuceError if it fits
        neither there nor where it was; then it is on no device."""
        before, without, only = self.coordinator.placed, frozenset[str](), None

        def worth(plan: PredictedPlan | None) -> bool:
            if why != "auto" or only is not None:
                return True
            if model.plan is None or plan is None:
                return False
            # Both by the figures of now: those of the present placement may have changed since.
            present = present_prediction(model.plan, plan.problem)
            return gains_enough(present.decode_rate, plan.prediction.decode_rate)

        def moved(path: Path, config: Config, connects: Connects) -> Model:
            relocate(model, config, connects, worth)
            return model

        while True:
            try:
                self._place(without, why, moved, only)
                return
            except LuceError as error:
                unfit, lost = self.coordinator.broken(LOSS_SECONDS)
                without |= unfit
                if unfit or lost:
                    _log.warning("the model cannot move, and tries again without what is not there: %s", error)
                    continue
                tried, there = self.coordinator.placed, before & self.coordinator.present
                # A placement that is not worth it may have the same members: the idle ones for which it was tried have
                # gone, or lack the model file.
                if only is None and (tried != there or why == "auto"):
                    _log.warning("the model stays where it was: %s", error)
                    only = there
                    continue
                away = ", ".join(sorted(self._members - self.coordinator.present))
                reason = f"the model does not fit without {away}: {error}" if away else str(error)
                model.backend.unload(reason)
                self.coordinator.unplaced()
                raise BackendError(reason) from error

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
        found = self.coordinator.wait_for_members(wanted, patience, waiting)
        on_wait("")
        if found < wanted:
            _log.warning(
                "%s %d: %d members are there; the model loads without more", flag("cluster_min"), wanted, found
            )
        without: frozenset[str] = frozenset()
        self._opened, why, self._why = (path, config), self._why, "command"
        may_shrink, self._shrunk = self._shrunk or why == "loss", False
        while True:
            try:
                return self._load(progress, without, why)
            except LuceError as error:
                unfit, lost = self.coordinator.broken(LOSS_SECONDS)
                without |= unfit
                why = "loss" if lost else "unfit"
                if not unfit and not lost:
                    if self._shrunk or not may_shrink or not self._has_smaller(config):
                        self.coordinator.unplaced()
                        raise
                    self._shrink(path, config, error)
                    continue
                _log.warning("the load failed, and begins again without what is not there: %s", error)
                self.coordinator.wait_for_members(wanted, config.cluster_wait, waiting)
                on_wait("")

    def _has_smaller(self, config: Config) -> bool:
        """Whether a loss may cost context."""
        return bool(self._loss_context) and not 0 < config.max_ctx <= self._loss_context

    def _shrink(self, path: Path, config: Config, error: LuceError) -> None:
        """Let the next load have the smaller context."""
        self._shrunk, smaller = True, self._loss_context
        self._opened = path, dataclasses.replace(config, max_ctx=smaller)
        facts = flag("cluster_on_loss_context"), smaller
        _log.warning("%s: the model gets a context of %d, until it is placed anew: %s", *facts, error)

    def _load(self, progress: Callable[[float], None], without: Collection[str], why: str) -> Model:
        """The model on the members that are there now, but not on those of `without`."""
        return self._place(without, why, lambda path, config, connects: open_model(path, config, progress, connects))

    def _place(
        self,
        without: Collection[str],
        why: str,
        place: Callable[[Path, Config, Connects], Model],
        only: Collection[str] | None = None,
    ) -> Model:
        """The model that `place` returns, which gets its file, the settings with all devices, and how to connect to
        them. `without`, `why` and `only`: as in Coordinator.plan."""
        assert self._opened is not None, "nothing is placed before the first load"
        path, config = self._opened
        with open_gguf(path) as file:
            identity = fingerprint(file)
        source = WeightSource(path, config.cluster_stream_rate * 1e6, streams=config.cluster_stream == "on")
        devices, connects = self.coordinator.plan(identity, source, without, why, only)
        own = config.target_devices or (("auto",) if config.target_device == "auto" else (config.target_device,))
        model = place(path, dataclasses.replace(config, target_devices=(*own, *devices)), connects)
        placed = {str(shard["device"]): shard["layers"] for shard in model.placement}
        self.coordinator.keep({device: range(at[0], at[1] + 1) for device, at in placed.items()}, why)
        self._model, self._members = weakref.ref(model), self.coordinator.placed
        if model.plan is not None:
            self._known = self._known.beside(model.plan.problem)
        self._auto.placed(time.monotonic(), frozenset(self.coordinator.idle))
        for device, rate in _bandwidths(model).items():
            log.event(_log, "member measured", device=device, bytes_per_second=rate)
        return model

    def _facts(self) -> ModelFacts | None:
        model = self._model()
        if model is None:
            return None
        memory = {name: DeviceMemory(found.free, found.total) for name, found in model.memory().items()}
        gains, unmeasured = self._gains_of(model)
        return ModelFacts(plan_status(model), memory, _bandwidths(model), gains, unmeasured)

    def _gains_of(self, model: Model) -> tuple[Mapping[str, Gain], Collection[str]]:
        """Where the planner places the model: what members without layers would bring, and those of which it has no
        figures."""
        assert self._opened is not None
        # Read once: the model may move meanwhile, on the engine's thread.
        plan, figures, last = model.plan, self._known, self._gains
        if plan is None or Goal.of(self._opened[1]) is None:
            return {}, ()
        idle = self.coordinator.idle
        # A search takes up to a second, and `luce cluster status --watch` asks each second.
        if last is None or last.plan is not plan or last.figures is not figures or last.idle != idle:
            last = self._gains = _MemberGains(plan, figures, idle, figures.gains(plan, idle))
        return last.gains, figures.lacks(idle)


def _bandwidths(model: Model) -> dict[str, float]:
    """As in ModelFacts."""
    plan = model.plan
    known = {} if plan is None else plan.known.ways
    return {name: way.bandwidth for name, way in known.items() if name.startswith(MEMBER)}


def plan_status(model: Model) -> PlanStatus:
    """The placement of a model, and how fast it is."""
    plan = model.plan
    prediction = None if plan is None else plan.prediction
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
    replans, patience = config.cluster_replan, PATIENCE if config.cluster_on_loss == "wait" else 0.0
    options: dict[str, Any] = {"announce": config.cluster_announce, "replans": replans != "never", "patience": patience}
    with contextlib.closing(
        Coordinator(config.cluster, config.cluster_listen, flag("cluster_listen"), **options)
    ) as coordinator:
        log.event(_log, "cluster", cluster=config.cluster, address=",".join(coordinator.addresses))
        cluster = ServedCluster(
            coordinator,
            replans=replans,
            parallel=config.parallel,
            drain=config.cluster_drain,
            loss_context=config.cluster_on_loss_context,
        )
        with answering(coordinator, cluster.replan), _following(cluster):
            _print_command(coordinator)
            yield cluster


@contextlib.contextmanager
def _following(cluster: ServedCluster) -> Iterator[None]:
    """Place the model anew whenever that is wanted, until the block ends."""
    ending = threading.Event()
    thread = threading.Thread(target=cluster.follow, args=(ending,), name="luce-cluster-replan", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def _print_command(coordinator: Coordinator) -> None:
    """Print the command with which a machine joins, where nobody but this user keeps it."""
    # The journal keeps what it reads, and others may read it.
    if not log.is_journal(sys.stdout):
        with contextlib.suppress(OSError):
            print(join_command(coordinator, TOKEN_SECONDS), flush=True)
            return
    _log.info("`luce cluster token` prints the command with which a machine joins")
