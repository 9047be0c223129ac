"""`luce cluster` with a coordinator in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from luce import __version__
from luce.backend.placement_gains import Gain
from luce.cli.main import main
from luce.cluster import wire
from luce.cluster.admin import answering
from luce.cluster.cluster_status import ModelFacts
from luce.cluster.coordinator import Coordinator
from luce.cluster.join_token import decode_token
from luce.hub.reporting import size_text
from luce.runtime.host import host_memory
from tests.support.clusters import coordinator, joined
from tests.support.daemons import within

Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directories of this test's own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def home() -> Iterator[Coordinator]:
    """A coordinator that answers commands."""
    with coordinator() as made, answering(made, lambda: None):
        yield made


def test_a_cluster_without_members(home: Coordinator, capsys: Output) -> None:
    assert main(["cluster", "status"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"cluster home at {home.addresses[0]}: epoch 0, 0 open tokens"


def test_status_token_remove_and_rotate(
    home: Coordinator, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    assert main(["cluster", "token", "--expires", "1", "--label", "attic"]) == 0
    text = capsys.readouterr().out
    assert decode_token(text.split()[2]).addresses == home.addresses and "within 1 minutes" in text
    host = joined(home, monkeypatch, folder).start()
    assert home.wait_for_members(1, 30) == 1
    assert main(["cluster", "status", "--cluster", "home"]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[:2] == ["box", "idle"] and "cpu:0" in row
    assert main(["cluster", "status", "--json"]) == 0
    (member,) = json.loads(capsys.readouterr().out)["members"]
    assert (member["name"], member["state"], member["address"]) == ("box", "idle", "127.0.0.1")
    assert main(["cluster", "rotate"]) == 0
    assert capsys.readouterr().out == "the coordinator has a new key, which box has\n"
    assert main(["cluster", "replan"]) == 0 and "is placed anew" in capsys.readouterr().out
    assert main(["cluster", "remove", "box"]) == 0 and capsys.readouterr().out == "box is removed\n"
    host.end()
    assert main(["cluster", "remove", "box"]) == 7
    assert capsys.readouterr().err == "luce: box: no such member; the members: there are none\n"


PLAN = wire.PlanStatus(
    (wire.StageStatus("cpu:0", "0..3", 2.5), wire.StageStatus("member://box/cpu:0", "4..7")),
    80.0,
    4000.0,
    75.25,
    None,
    0.5,
)


def test_what_members_without_layers_would_bring_is_shown(
    home: Coordinator, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    host = joined(home, monkeypatch, folder).start()
    assert within(30, lambda: home.status().members[0].state == "idle")
    home.model_facts = lambda: ModelFacts(PLAN, gains={"box": Gain(0.234, -0.05), "den": Gain(1.0, 1.0)})
    assert (home.status().members[0].gain_decode, home.status().members[0].gain_prompt) == (0.234, -0.05)
    assert main(["cluster", "status"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "box has no layers; `luce cluster replan` would bring: decode +23%, prompts -5%"
    home.model_facts = lambda: ModelFacts(PLAN)
    assert main(["cluster", "status"]) == 0 and "no layers" not in capsys.readouterr().out
    home.model_facts = lambda: ModelFacts(PLAN, unmeasured={"box"})
    assert home.status().members[0].unmeasured
    assert main(["cluster", "status"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "box has no layers and is not measured yet; `luce cluster replan` measures it"
    # One that is away has nothing to measure.
    host.stop()
    assert within(30, lambda: home.status().members[0].state == "gone") and not home.status().members[0].unmeasured


def test_the_placement_is_shown_with_predicted_and_measured_speed(
    home: Coordinator, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    host = joined(home, monkeypatch, folder).start()
    assert within(30, lambda: bool(home.status().members[0].round_trip_ms))
    rate = {"member://box/cpu:0": 125e6}
    home.model_facts = lambda: ModelFacts(PLAN, {}, rate)
    assert main(["cluster", "status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "125.0 MB/s" in lines[1] and f" of {size_text(host_memory().total)}" in lines[1] and __version__ in lines[1]
    assert [line.split() for line in lines[4:7]] == [
        ["device", "layers", "predicted", "for", "a", "token"],
        ["cpu:0", "0..3", "2.50", "ms"],
        ["member://box/cpu:0", "4..7"],
    ]
    assert lines[7:] == [
        "predicted: decode 80.0 tok/s, prompts 4,000.0 tok/s",
        "measured: decode 75.2 tok/s, prompts not known",
        "connections between members would save 0.50 ms of a token",
    ]
    host.stop()


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_watch_reads_again_and_again(
    more: list[str], home: Coordinator, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    seen: list[str] = []

    def sleep(seconds: float) -> None:
        seen.append(capsys.readouterr().out)
        if len(seen) == 2:
            raise KeyboardInterrupt
        home.new_token(60)

    monkeypatch.setattr("luce.cli.cluster.time", SimpleNamespace(sleep=sleep))
    assert main(["cluster", "status", "--watch", *more]) == 130
    if more:
        assert [json.loads(text)["open_tokens"] for text in seen] == [0, 1]
    else:
        assert [text.splitlines()[-1].partition(", ")[2] for text in seen] == ["0 open tokens", "1 open tokens"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status", "box"], "luce cluster status box: takes no MEMBER"),
        (["remove"], "luce cluster remove: name a MEMBER; `luce cluster status` lists them"),
        (["status", "--expires", "5"], "luce cluster status: --expires is for token"),
        (["rotate", "--label", "x"], "luce cluster rotate: --label is for token"),
        (["status", "--lan"], "luce cluster status: --lan is for token"),
        (["token", "--watch"], "luce cluster token: --watch is for status"),
        (["token", "--json"], "luce cluster token: --json is for status"),
        (["token", "--expires", "0", "--cluster", "home"], "--expires 0: expected a number in [0.1, 10080]"),
    ],
)
def test_what_it_does_not_take(arguments: list[str], message: str, folder: Path, capsys: Output) -> None:
    (folder / "luce/cluster/home").mkdir(parents=True, mode=0o700)
    assert main(["cluster", *arguments]) == 2 and capsys.readouterr().err == f"luce: {message}\n"


def test_which_cluster(folder: Path, capsys: Output) -> None:
    assert main(["cluster", "status"]) == 2
    none = "luce: this machine has no cluster; `luce serve MODEL --cluster NAME` makes one\n"
    assert capsys.readouterr().err == none
    for name in ("den", "home"):
        with coordinator(name):
            pass
    assert main(["cluster", "status"]) == 2
    assert capsys.readouterr().err == "luce: this machine has several clusters: den, home; name one with --cluster\n"
    assert main(["cluster", "status", "--cluster", "den"]) == 7
    assert capsys.readouterr().err == "luce: cluster den: no server of it runs on this machine\n"
    assert main(["cluster", "status", "--cluster", "attic"]) == 2
    assert not (folder / "luce/cluster/attic").exists()
