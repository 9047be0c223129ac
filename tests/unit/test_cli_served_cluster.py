"""What `luce serve --cluster` prints, what the load of its model waits for, and on which devices it is."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from luce.backend.measured_devices import MeasuredDevices
from luce.cli import served_cluster as module
from luce.cli.main import main
from luce.cli.served_cluster import ServedCluster, plan_status, served_cluster
from luce.cluster.join_token import decode_token
from luce.config.resolve import resolve
from luce.config.settings import Config
from luce.engine.events import Timings
from luce.errors import DeviceError, ListenError, ServerError, UsageError
from luce.planner.prediction import LinkPrediction
from luce.profiles.profile import LinkProfile
from tests.support.clusters import Host, coordinator, joined, needs_keys, port_of
from tests.support.daemons import within
from tests.support.reference import Reference
from tests.support.scripted_model import ScriptedModel

MODEL = Reference("qwen3-a-F32").path
Patch, Output = pytest.MonkeyPatch, pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Directories of this test's own."""
    needs_keys()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def config(**fields: Any) -> Config:
    return resolve({"cluster": "home", "cluster_listen": "127.0.0.1:0", "target_devices": "cpu:0", **fields}, env={})


class Loaded:
    """A model of no layers."""

    placement: tuple[Any, ...] = ()
    plan = None


def opened(settings: Config, patch: Patch, host: Any = lambda made: None) -> tuple[Config, list[str], list[str]]:
    """The settings with which a model is opened, the places of members' daemons, and what the load waited for."""
    seen: list[Any] = []

    def open_model(path: Path, config: Config, progress: Any, connects: Any) -> Any:
        seen[:] = [config, list(connects)]
        return Loaded()

    patch.setattr(module, "open_model", open_model)
    waited: list[str] = []
    with served_cluster(settings) as cluster:
        assert cluster is not None
        host(cluster)
        cluster.open_model(MODEL, settings, lambda share: None, waited.append)
    return (*seen, waited)


def test_without_the_flag_nothing_is_there(folder: Path, capsys: Output) -> None:
    before = threading.active_count()
    with served_cluster(config(cluster="", cluster_listen="127.0.0.1:7443")) as cluster:
        assert cluster is None and threading.active_count() == before
    assert list(folder.iterdir()) == [] and capsys.readouterr().out == ""


def test_it_prints_a_command_that_joins_one_machine(capsys: Output) -> None:
    with served_cluster(config()):
        words = capsys.readouterr().out.split()
    assert words[:2] == ["luce", "join"] and decode_token(words[2]).cluster == "home"


def test_the_journal_gets_no_token(monkeypatch: Patch, capsys: Output, caplog: Any) -> None:
    monkeypatch.setattr("luce.log.is_journal", lambda stream: True)
    with caplog.at_level("INFO", "luce.cluster"), served_cluster(config()):
        pass
    assert capsys.readouterr().out == "" and "luce1." not in caplog.text
    assert "`luce cluster token` prints the command" in caplog.text


def test_the_load_waits_for_members(folder: Path, monkeypatch: Patch) -> None:
    made: list[Host] = []
    real = module.Coordinator

    def kept(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        host = joined(found, monkeypatch, folder)
        (host.folder / "model.gguf").symlink_to(MODEL)
        made.append(host)
        return found

    monkeypatch.setattr(module, "Coordinator", kept)
    # It starts only once the load waits.
    settings, places, waited = opened(
        config(cluster_min="1", cluster_wait="300"),
        monkeypatch,
        lambda cluster: threading.Timer(0.5, lambda: made[0].start()).start(),
    )
    assert settings.target_devices == ("cpu:0", "member://box/cpu:0") and places == ["member://box/"]
    assert waited[0] == "waiting for members: 0 of 1" and waited[-1] == ""
    made[0].stop()


def test_the_wait_for_members_ends(monkeypatch: Patch, caplog: Any) -> None:
    settings, places, waited = opened(config(cluster_min="2", cluster_wait="0.2"), monkeypatch)
    assert settings.target_devices == ("cpu:0",) and places == [] and waited[0] == "waiting for members: 0 of 2"
    assert "--cluster-min 2: 0 members are there; the model loads without more" in caplog.text
    settings, _, waited = opened(config(cluster_min="0", target_devices="auto"), monkeypatch)
    assert settings.target_devices == ("auto",) and waited == [""]


def test_how_weights_are_sent_is_set(monkeypatch: Patch) -> None:
    made: list[tuple[float, bool]] = []
    source = module.WeightSource

    def noted(path: Path, rate: float, *, streams: bool) -> Any:
        made.append((rate, streams))
        return source(path, rate, streams=streams)

    monkeypatch.setattr(module, "WeightSource", noted)
    opened(config(cluster_min="0"), monkeypatch)
    opened(config(cluster_min="0", cluster_stream="off", cluster_stream_rate="2"), monkeypatch)
    assert made == [(0.0, True), (2e6, False)]


def test_a_load_begins_again_only_where_a_member_is_lost(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(module, "LOSS_SECONDS", 5.0)
    made: list[Host] = []
    loads: list[tuple[str, ...]] = []
    real = module.Coordinator

    def kept(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        made.append(joined(found, monkeypatch, folder).start())
        return found

    def open_model(path: Path, config: Config, progress: Any, connects: Any) -> Any:
        loads.append(config.target_devices)
        made[0].stop()
        raise DeviceError(f"load {len(loads)} failed")

    monkeypatch.setattr(module, "Coordinator", kept)
    monkeypatch.setattr(module, "open_model", open_model)
    settings = config(cluster_min="1", cluster_wait="10")
    with served_cluster(settings) as cluster:
        assert cluster is not None
        # The second load is not that of a member: its failure is the server's.
        with pytest.raises(DeviceError, match="load 2 failed"):
            cluster.open_model(MODEL, dataclasses.replace(settings, cluster_wait=0.5), print, lambda text: None)
    assert loads == [("cpu:0", "member://box/cpu:0"), ("cpu:0",)]


def test_the_address_is_named_in_errors() -> None:
    with (
        coordinator("other") as other,
        pytest.raises(ListenError, match=rf"^--cluster-listen 127\.0\.0\.1:{port_of(other)}: "),
        served_cluster(config(cluster_listen=f"127.0.0.1:{port_of(other)}")),
    ):
        pass
    with (
        pytest.raises(UsageError, match=r"^--cluster-listen nowhere: expected HOST:PORT$"),
        served_cluster(config(cluster_listen="nowhere")),
    ):
        pass


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


@pytest.mark.parametrize(("rate", "present", "taken"), [(115.1, 0.0, True), (114.9, 0.0, False), (130.0, 120.0, False)])
def test_a_faster_placement_is_taken_by_itself(
    rate: float, present: float, taken: bool, folder: Path, monkeypatch: Patch
) -> None:
    def plan(decode: float) -> Any:
        on = SimpleNamespace(shard=SimpleNamespace(device="cpu:0"))
        prediction = SimpleNamespace(decode_rate=decode, shards=(on,))
        problem = SimpleNamespace(devices=(), links={}, offload="off")
        return SimpleNamespace(prediction=prediction, problem=problem, known=SimpleNamespace(ways={}))

    asked: list[frozenset[str]] = []

    def due(self: Any, now: float, idle: frozenset[str], *, running: int, waiting: int) -> bool:
        if idle:
            asked.append(idle)
        return len(asked) == 1 and bool(idle)

    with serving(folder, monkeypatch, lambda names: True, cluster_replan="auto") as (cluster, model, (box, _)):
        box.stop()
        monkeypatch.setattr(module.AutoReplan, "due", due)
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


def test_what_keeps_a_model_from_moving_lets_it_be_loaded_anew(folder: Path, monkeypatch: Patch, caplog: Any) -> None:
    caplog.set_level("INFO")
    with serving(folder, monkeypatch, lambda names: True) as (cluster, model, _):
        called = threading.Event()
        model.immovable = "--kvflash"
        cluster.reload = called.set
        cluster.replan()
        assert called.wait(30) and not model.moves
    reasons = [r.__dict__["fields"]["reason"] for r in caplog.records if "loaded anew" in r.getMessage()]
    assert reasons == ["--kvflash keeps it from moving"]


def test_a_model_is_placed_anew_only_once_it_is_loaded() -> None:
    with served_cluster(config(cluster_min="0")) as cluster:
        assert cluster is not None
        with pytest.raises(ServerError, match=r"^the model is not loaded yet$"):
            cluster.replan()
    with served_cluster(config(cluster_replan="never")) as cluster:
        assert cluster is not None
        cluster.reload = lambda: None
        with pytest.raises(ServerError, match=r"^the server was started with --cluster-replan never$"):
            cluster.replan()


def test_a_new_placement_waits_for_nobody(monkeypatch: Patch) -> None:
    def loaded(cluster: ServedCluster) -> None:
        cluster.reload = lambda: None

    settings, _, waited = opened(config(cluster_min="3", cluster_wait="86400"), monkeypatch, loaded)
    assert settings.target_devices == ("cpu:0",) and waited == [""]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cluster": "", "cluster_min": "2"}, "--cluster-min: requires --cluster"),
        ({"cluster": "", "cluster_wait": "2"}, "--cluster-wait: requires --cluster"),
        ({"cluster": "", "cluster_replan": "never"}, "--cluster-replan: requires --cluster"),
        ({"cluster": "", "cluster_on_loss": "replan"}, "--cluster-on-loss: requires --cluster"),
        ({"cluster": "", "cluster_on_loss_context": "512"}, "--cluster-on-loss-context: requires --cluster"),
        ({"cluster": "", "cluster_listen": "0.0.0.0:7443"}, "--cluster-listen: requires --cluster"),
        (
            {"cluster_listen": "127.0.0.1:7443", "target_devices": "cpu:0,cpu:1", "target_layer_split": "1,1"},
            "--layer-split: not with --cluster, whose members' devices are not known yet",
        ),
    ],
)
def test_settings_that_contradict_each_other(fields: dict[str, str], message: str) -> None:
    base = {"cluster": "home", "target_devices": "cpu:0"}
    with pytest.raises(UsageError) as caught:
        resolve({**base, **fields}, env={})
    assert message.removeprefix("--layer-split") in str(caught.value)


def test_a_cluster_serves_one_model(folder: Path, capsys: Output) -> None:
    models = folder / "models"
    models.mkdir()
    for name in ("one.gguf", "two.gguf"):
        (models / name).symlink_to(MODEL)
    assert main(["serve", "--models-dir", str(models), "--cluster", "home"]) == 2
    assert capsys.readouterr().err == "luce: --cluster home: serves one model, not 2\n"
    assert not (folder / "luce").exists()


def test_a_closed_standard_output_is_said(monkeypatch: Patch, caplog: Any) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("sys.stdout", Closed())
    with caplog.at_level("INFO", "luce.cluster"), served_cluster(config()):
        pass
    assert "`luce cluster token` prints the command" in caplog.text


def test_the_status_has_the_placement_while_the_model_is_loaded(monkeypatch: Patch, caplog: Any) -> None:
    settings = config(cluster_min="0")
    made: list[Any] = [ScriptedModel(settings)]
    way = LinkProfile(0.001, 1e8)
    made[0].plan = dataclasses.replace(made[0].plan, known=MeasuredDevices({}, {"member://box/cpu:0": way}))
    monkeypatch.setattr(module, "open_model", lambda *arguments: made.pop())
    with served_cluster(settings) as cluster:
        assert cluster is not None and cluster.status().plan is None
        with caplog.at_level("INFO", "luce.cluster"):
            model: Any = cluster.open_model(MODEL, settings, lambda share: None, lambda text: None)
        measured = [r.__dict__["fields"] for r in caplog.records if r.getMessage() == "member measured"]
        assert measured == [{"device": "member://box/cpu:0", "bytes_per_second": 1e8}]
        assert cluster.status().plan == plan_status(model)
        model.engine.close()
        # The cluster does not keep the memory of a model that is placed anew.
        del model
        gc.collect()
        assert cluster.status().plan is None


def test_predicted_and_measured_speed(monkeypatch: Patch) -> None:
    model: Any = ScriptedModel(Config())
    plan, prediction = plan_status(model), model.plan.prediction
    assert [(stage.device, stage.layers) for stage in plan.stages] == [("cpu:0", "0..2"), ("cpu:1", "3..3")]
    assert [stage.predicted_ms for stage in plan.stages] == [1000 * shard.decode.total for shard in prediction.shards]
    assert (plan.predicted_decode_tok_s, plan.predicted_prompt_tok_s) == (
        prediction.decode_rate,
        prediction.prompt_rate,
    )
    assert (plan.measured_decode_tok_s, plan.measured_prompt_tok_s) == (None, None)
    done = Timings(prompt=2.0, predicted=4.0, prompt_tokens=100, cached_tokens=40, predicted_tokens=20)
    stats = dataclasses.replace(model.engine.stats(), finished=done)
    monkeypatch.setattr(model.engine, "stats", lambda: stats)
    assert (plan_status(model).measured_decode_tok_s, plan_status(model).measured_prompt_tok_s) == (5.0, 30.0)
    model.plan = None
    plan = plan_status(model)
    assert (plan.predicted_decode_tok_s, plan.stages[0].predicted_ms, plan.direct_links_ms) == (None, None, None)
    model.engine.close()


@pytest.mark.parametrize(
    ("before", "behind", "saved"),
    [
        ("member://a/cpu:0", "member://b/cpu:0", 2.0),
        ("member://a/cpu:0", "member://a/cpu:1", 0.0),
        ("cpu:0", "member://b/cpu:0", 0.0),
        ("tcp://a:1/cpu:0", "member://b/cpu:0", 0.0),
    ],
)
def test_what_connections_between_members_would_save(before: str, behind: str, saved: float) -> None:
    model: Any = ScriptedModel(Config())
    link = LinkPrediction(before, behind, 256, decode=0.004, piece=0.1)
    prediction = dataclasses.replace(model.plan.prediction, links=(link,))
    model.plan = dataclasses.replace(model.plan, prediction=prediction)
    assert plan_status(model).direct_links_ms == saved
    model.engine.close()
