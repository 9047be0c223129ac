"""What `luce serve --cluster` prints, what the load of its model waits for, and what its status says."""

from __future__ import annotations

import dataclasses
import gc
import io
import threading
from pathlib import Path
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
from tests.support.clusters import MODEL, Host, coordinator, joined, port_of
from tests.support.scripted_model import ScriptedModel
from tests.support.served_clusters import Loaded, config, folder

__all__ = ["folder"]
Patch, Output = pytest.MonkeyPatch, pytest.CaptureFixture[str]


def opened(
    settings: Config, patch: Patch, host: Any = lambda made: None, on_wait: Any = lambda text: None
) -> tuple[Config, list[str], list[str]]:
    """The settings with which a model is opened, the places of members' daemons, and what the load waited for, which
    `on_wait` gets too."""
    seen: list[Any] = []

    def open_model(path: Path, config: Config, progress: Any, connects: Any) -> Any:
        seen[:] = [config, list(connects)]
        return Loaded()

    patch.setattr(module, "open_model", open_model)
    waited: list[str] = []

    def waits(text: str) -> None:
        waited.append(text)
        on_wait(text)

    with served_cluster(settings) as cluster:
        assert cluster is not None
        host(cluster)
        cluster.open_model(MODEL, settings, lambda share: None, waits)
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

    def start(text: str) -> None:
        # Only once the load waits.
        if text and made[0].host is None:
            made[0].start()

    settings, places, waited = opened(config(cluster_min="1", cluster_wait="300"), monkeypatch, on_wait=start)
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


@pytest.mark.parametrize(("devices", "unmeasured"), [("auto", {"box"}), ("cpu:0", set())])
def test_members_that_no_placement_has_considered_are_not_measured(
    devices: str, unmeasured: set[str], monkeypatch: Patch
) -> None:
    # With named devices the planner does not choose by speed.
    settings = config(cluster_min="0", target_devices=devices)
    model: Any = ScriptedModel(settings)
    monkeypatch.setattr(module, "open_model", lambda *arguments: model)
    monkeypatch.setattr(module.Coordinator, "idle", {"box": ("member://box/cpu:0",)})
    with served_cluster(settings) as cluster:
        assert cluster is not None
        cluster.open_model(MODEL, settings, lambda share: None, lambda text: None)
        facts = cluster.coordinator.model_facts()
        assert facts is not None and set(facts.unmeasured) == unmeasured and facts.gains == {}
    model.engine.close()


def test_the_status_holds_while_the_model_is_placed_anew(monkeypatch: Patch) -> None:
    settings = config(cluster_min="0", target_devices="auto")
    model: Any = ScriptedModel(settings)
    #: how often a comparison or a search lasts until the model is placed anew
    during, plans = {"comparison": 0, "search": 0}, list[Any]()

    def place(moment: str) -> None:
        if during[moment]:
            during[moment] -= 1
            model.plan = dataclasses.replace(model.plan)
            cluster.open_model(MODEL, settings, lambda share: None, lambda text: None)

    class Idle(dict[str, Any]):
        def __ne__(self, other: object) -> bool:
            place("comparison")
            return not self == other

    def gains(self: Any, plan: Any, idle: Any) -> dict[str, Any]:
        plans.append(plan)
        place("search")
        return {}

    monkeypatch.setattr(module, "open_model", lambda *arguments: model)
    monkeypatch.setattr(module.Coordinator, "idle", Idle(box=("member://box/cpu:0",)))
    monkeypatch.setattr(module.KnownFigures, "gains", gains)
    with served_cluster(settings) as opened:
        assert opened is not None
        cluster = opened
        cluster.open_model(MODEL, settings, lambda share: None, lambda text: None)
        facts = cluster.coordinator.model_facts
        assert facts() is not None and facts() is not None and plans == [model.plan]
        during["comparison"] = 1
        assert facts() is not None and during["comparison"] == 0
        # What is found for an earlier placement is not that of the next one.
        during["search"] = 1
        assert facts() is not None and during["search"] == 0 and plans[-1] is not model.plan
        assert facts() is not None and plans[-1] is model.plan
        assert facts() is not None and len(plans) == 3
    model.engine.close()


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
