"""A served cluster moves its model to other devices: as members come, leave and are lost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from luce.cli import served_cluster as module
from luce.cli.served_cluster import ServedCluster, served_cluster
from luce.config.settings import Config
from luce.errors import DeviceError
from tests.support.clusters import MODEL, Host, joined
from tests.support.daemons import within
from tests.support.served_clusters import Loaded, config, folder

__all__ = ["folder"]
Patch = pytest.MonkeyPatch


class Movable(Loaded):
    """A model whose engine moves at once. `fits` says on which devices it can be; `moves` has where it was moved to."""

    immovable = ""

    def __init__(self, fits: Any) -> None:
        self.fits = fits
        self.moves: list[tuple[str, ...]] = []
        self.engine = self.backend = self
        #: why it is on no device
        self.reason: str | None = None
        self.done = threading.Event()
        self.plan = self.next = None

    def down(self) -> str:
        return ""

    def wait_idle(self, seconds: float) -> bool:
        return True

    def stats(self) -> Any:
        return SimpleNamespace(running=0, waiting=0)

    def relocate(self, replace: Any, drain: float) -> None:
        self.drain = drain
        try:
            replace()
        finally:
            self.done.set()

    def unload(self, reason: str) -> None:
        self.reason = reason

    def moved(self, model: Any, config: Config, connects: Any, worth: Any) -> None:
        self.moves.append(config.target_devices[1:])
        if not worth(self.next):
            raise DeviceError("not worth it")
        self.plan = self.next
        names = tuple(device.split("/")[2] for device in config.target_devices[1:])
        if not self.fits(names):
            raise DeviceError("it needs 7 bytes more")
        self.placement = tuple({"device": device, "layers": (0, 0)} for device in config.target_devices)


@contextlib.contextmanager
def serving(
    folder: Path, patch: Patch, fits: Any, **fields: Any
) -> Iterator[tuple[ServedCluster, Movable, list[Host]]]:
    """A served cluster with the members box and den, and its model."""
    patch.setattr(module, "LOSS_SECONDS", 0.1)
    made: list[Host] = []
    real = module.Coordinator

    def kept(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        for name in ("box", "den"):
            made.append(joined(found, patch, folder, name))
            made[-1].patience = 30
            (made[-1].folder / "model.gguf").symlink_to(MODEL)
            made[-1].start()
        return found

    model = Movable(fits)
    patch.setattr(module, "Coordinator", kept)
    patch.setattr(module, "relocate", model.moved)

    def open_model(path: Path, config: Config, progress: Any, connects: Any) -> Any:
        model.placement = tuple({"device": device, "layers": (0, 0)} for device in config.target_devices)
        return model

    patch.setattr(module, "open_model", open_model)
    settings = config(cluster_min="2", cluster_wait="60", **fields)
    with served_cluster(settings) as cluster:
        assert cluster is not None
        assert cluster.open_model(MODEL, settings, lambda share: None, lambda text: None) is model
        cluster.reload = lambda: None
        patch.setattr(module, "plan_status", lambda model: None)
        Movable.memory = lambda self: {}  # type: ignore[attr-defined]
        try:
            yield cluster, model, made
        finally:
            # One that is left connects anew every few seconds, for as long as the process of these tests lives.
            for host in made:
                assert host.host is not None
                host.host.stop()
                host.end()


def states(cluster: ServedCluster) -> dict[str, str]:
    return {member.name: member.state for member in cluster.status().members}


def test_a_member_leaves_once_the_model_does_without_it(folder: Path, monkeypatch: Patch) -> None:
    with serving(folder, monkeypatch, lambda names: True, cluster_drain="12.5") as (cluster, model, (box, den)):
        box.stop()
        assert model.drain == 12.5
        assert model.moves == [("member://den/cpu:0",)] and states(cluster)["box"] == "gone"
        assert cluster.status().replans["leave"] == 1
        den.stop()
        assert model.moves[1:] == [()] and model.reason is None


def test_a_model_that_needs_a_member_that_leaves_stays_where_it_was(folder: Path, monkeypatch: Patch) -> None:
    with serving(folder, monkeypatch, lambda names: len(names) == 2) as (cluster, model, (box, _)):
        assert box.host is not None
        box.host.leave()
        assert model.done.wait(30) and within(10, lambda: len(model.moves) == 2)
        both = ("member://box/cpu:0", "member://den/cpu:0")
        assert model.moves == [("member://den/cpu:0",), both] and model.reason is None
        assert states(cluster)["box"] == "draining"
        box.host.stop()
        box.end()


def test_a_model_that_fits_nowhere_says_what_is_missing_until_that_is_back(folder: Path, monkeypatch: Patch) -> None:
    fits = {("box", "den")}
    with serving(folder, monkeypatch, fits.__contains__, cluster_on_loss="replan") as (cluster, model, (box, _)):
        assert box.host is not None
        box.host.stop()
        box.end()
        assert within(30, lambda: model.reason is not None)
        assert model.reason == "the model does not fit without box: it needs 7 bytes more"
        assert states(cluster) == {"box": "lost", "den": "idle"} and cluster.status().replans["loss"] == 1
        # Whoever tries in vain hears the same.
        model.reason = None
        cluster.replan()
        assert within(30, lambda: model.reason is not None)
        assert model.reason == "the model does not fit without box: it needs 7 bytes more"
        box.start()
        assert within(30, lambda: cluster.status().replans.get("back") == 1)
        assert within(30, lambda: model.moves[-1] == ("member://box/cpu:0", "member://den/cpu:0"))


def test_a_loss_may_cost_context_where_that_is_allowed(folder: Path, monkeypatch: Patch, caplog: Any) -> None:
    fields = {"cluster_on_loss": "replan", "cluster_on_loss_context": "512", "max_ctx": "2048"}
    with serving(folder, monkeypatch, lambda names: len(names) == 2, **fields) as (cluster, model, (box, _)):
        loads: list[tuple[int, int]] = []

        def open_model(path: Path, config: Config, progress: Any, connects: Any) -> Any:
            loads.append((config.max_ctx, len(config.target_devices)))
            if config.max_ctx > 512 and len(config.target_devices) < 3:
                raise DeviceError("it needs 7 bytes more")
            model.placement = tuple({"device": device, "layers": (0, 0)} for device in config.target_devices)
            return model

        def load_anew() -> Any:
            assert reloaded.wait(30)
            reloaded.clear()
            settings = config(**fields)
            return cluster.open_model(MODEL, settings, lambda share: None, lambda text: None)

        monkeypatch.setattr(module, "open_model", open_model)
        reloaded = threading.Event()
        cluster.reload = reloaded.set
        assert box.host is not None
        box.host.stop()
        box.end()
        assert load_anew() is model and loads == [(2048, 2), (512, 2)]
        assert "--cluster-on-loss-context: the model gets a context of 512, until it is placed anew" in caplog.text
        # It does not move with that context, as it may get back its own; while it cannot, it keeps the smaller one.
        cluster.replan()
        assert load_anew() is model and loads[2:] == [(2048, 2), (512, 2)]
        box.start()
        assert within(30, lambda: states(cluster)["box"] == "idle")
        cluster.replan()
        assert load_anew() is model and loads[4:] == [(2048, 3)]


@pytest.mark.parametrize(("allowed", "why"), [("0", "loss"), ("512", "leave"), ("4096", "loss")])
def test_a_load_that_fails_costs_no_context_otherwise(allowed: str, why: str, monkeypatch: Patch) -> None:
    settings, tried = config(cluster_on_loss_context=allowed, max_ctx="2048", cluster_min="0"), list[int]()

    def open_model(path: Path, config: Config, progress: Any, connects: Any) -> Any:
        tried.append(config.max_ctx)
        if len(tried) > 1:
            raise DeviceError("it needs 7 bytes more")
        return Movable(lambda names: True)

    monkeypatch.setattr(module, "open_model", open_model)
    monkeypatch.setattr(module, "LOSS_SECONDS", 0.1)
    with served_cluster(settings) as cluster:
        assert cluster is not None
        model: Any = cluster.open_model(MODEL, settings, lambda share: None, lambda text: None)
        model.immovable = "--kvflash"
        reloaded = threading.Event()
        cluster.reload = reloaded.set
        cluster.coordinator.want(why)
        assert reloaded.wait(30)
        with pytest.raises(DeviceError, match="it needs 7 bytes more"):
            cluster.open_model(MODEL, settings, lambda share: None, lambda text: None)
        assert tried == [2048, 2048]


def test_a_lost_member_has_time_to_come_back(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 3600.0)
    with serving(folder, monkeypatch, lambda names: True) as (cluster, model, (box, den)):
        assert box.host is not None
        box.host.stop()
        box.end()
        assert within(30, lambda: states(cluster)["box"] == "lost")
        # Longer than the time between two looks at it.
        assert not within(2.5, lambda: bool(model.moves))
        # By command it goes at once.
        cluster.replan()
        assert within(30, lambda: model.moves == [("member://den/cpu:0",)])
        assert den.host is not None
        den.host.stop()


def plan(decode: float) -> Any:
    on = SimpleNamespace(shard=SimpleNamespace(device="cpu:0"))
    prediction = SimpleNamespace(decode_rate=decode, shards=(on,))
    problem = SimpleNamespace(devices=(), links={}, offload="off")
    return SimpleNamespace(prediction=prediction, problem=problem, known=SimpleNamespace(ways={}))


def once(asked: list[frozenset[str]]) -> Any:
    """AutoReplan.due that holds once, for the first members without layers; `asked` gets those of each call."""

    def due(self: Any, now: float, idle: frozenset[str], *, running: int, waiting: int) -> bool:
        if idle:
            asked.append(idle)
        return len(asked) == 1 and bool(idle)

    return due


@pytest.mark.parametrize(("rate", "present", "taken"), [(115.1, 0.0, True), (114.9, 0.0, False), (130.0, 120.0, False)])
def test_a_faster_placement_is_taken_by_itself(
    rate: float, present: float, taken: bool, folder: Path, monkeypatch: Patch
) -> None:
    asked: list[frozenset[str]] = []
    with serving(folder, monkeypatch, lambda names: True, cluster_replan="auto") as (cluster, model, (box, _)):
        box.stop()
        monkeypatch.setattr(module.AutoReplan, "due", once(asked))
        model.moves.clear()
        model.plan, model.next = plan(100.0), plan(rate)
        if present:
            # By the figures of now, the present placement is faster than it was predicted.
            monkeypatch.setattr(module, "present_prediction", lambda old, problem: plan(present).prediction)
        box.start()
        assert within(30, lambda: cluster.status().replans.get("auto", 0) == 2 - taken)
        both, one = ("member://box/cpu:0", "member://den/cpu:0"), ("member://den/cpu:0",)
        assert within(30, lambda: model.moves == ([both] if taken else [both, one])), model.moves
        assert asked[0] == frozenset({"box"}) and model.reason is None
        assert within(30, lambda: model.plan is model.next)


def test_a_model_stays_where_it_was_if_the_member_that_would_make_it_faster_cannot(
    folder: Path, monkeypatch: Patch
) -> None:
    fields = {"cluster_replan": "auto", "cluster_stream": "off"}
    with serving(folder, monkeypatch, lambda names: True, **fields) as (cluster, model, (box, _)):
        box.stop()
        (box.folder / "model.gguf").unlink()
        monkeypatch.setattr(module.AutoReplan, "due", once([]))
        model.moves.clear()
        model.plan, model.next = plan(100.0), plan(100.0)
        box.start()
        one = ("member://den/cpu:0",)
        assert within(30, lambda: len(model.moves) == 2 or model.reason is not None)
        assert model.moves == [one, one] and model.reason is None
        assert within(30, lambda: states(cluster) == {"box": "idle", "den": "loading"}), states(cluster)


@pytest.mark.parametrize("idle", [True, False])
def test_what_keeps_a_model_from_moving_lets_it_be_loaded_anew(
    idle: bool, folder: Path, monkeypatch: Patch, caplog: Any
) -> None:
    caplog.set_level("INFO")
    with serving(folder, monkeypatch, lambda names: True, cluster_drain="12.5") as (cluster, model, _):
        called: list[Any] = []

        def wait_idle(seconds: float) -> bool:
            called.append(seconds)
            return idle

        # Replies that have not ended in time fail, behind the beginning of the load.
        monkeypatch.setattr(Movable, "wait_idle", staticmethod(wait_idle))
        monkeypatch.setattr(Movable, "end_replies", staticmethod(called.append), raising=False)
        model.immovable = "--kvflash"
        cluster.reload = lambda: called.append("reload")
        cluster.replan()
        assert within(30, lambda: len(called) == 3 - idle) and not model.moves
    reasons = [r.__dict__["fields"]["reason"] for r in caplog.records if "loaded anew" in r.getMessage()]
    assert reasons == ["--kvflash keeps it from moving"] and called[:2] == ["reload", 12.5]
    text = "this reply had no more than 12.5 s (--cluster-drain) to end: --kvflash keeps it from moving"
    assert called[2:] == ([] if idle else [f"the model is loaded anew on other machines, and {text}"])


def test_replies_that_a_lost_member_ends_are_told_its_name(folder: Path, monkeypatch: Patch) -> None:
    with serving(folder, monkeypatch, lambda names: True, cluster_on_loss="replan") as (cluster, model, (box, _)):
        called: list[str] = []

        def reload() -> None:
            # The placement without the member may begin at once.
            called.append("reload")
            cluster.coordinator.unplaced()

        monkeypatch.setattr(Movable, "wait_idle", staticmethod(lambda seconds: False))
        monkeypatch.setattr(Movable, "end_replies", staticmethod(called.append), raising=False)
        model.immovable, cluster.reload = "--draft", reload
        assert box.host is not None
        box.host.stop()
        box.end()
        assert within(30, lambda: len(called) >= 2)
    assert called[0] == "reload"
    assert called[1].startswith("the model is loaded anew on other machines without box, and this reply had")
