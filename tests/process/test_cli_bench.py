"""`luce bench` with layers in a daemon."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from luce.bench.limits import Limits
from luce.cli import bench
from luce.cli.main import main
from tests.support.daemons import HERE, children

COMMAND = ["bench", str(Path(__file__).parents[1] / "reference/qwen35-a-Q8_0.gguf"), "-p", "9", "-n", "4"]
COMMAND += ["--sequences", "2", "-r", "1", "--target-devices", "cpu:0,cpu:1,cpu:2", "--target-layer-split", "1,1,2"]
COMMAND += ["--target-shard-ipc-bin", str(HERE)]


@pytest.fixture(autouse=True)
def invented_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "limits", lambda device, rows: Limits(2e9, 1e9, dict.fromkeys(rows, 1e12)))


def test_layers_in_a_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [device["limits"] is None for device in report["devices"]] == [False, True, True]
    for load in report["loads"]:
        shards = [(shard["device"], shard["layers"]) for shard in load["shards"]]
        assert shards == [("cpu:0", [0, 1]), ("cpu:1", [2, 3]), ("cpu:2", [4, 7])]
    assert [result["test"] for result in report["results"]] == ["prompt 9", "decode 4", "2 sequences"]
    for result in report["results"]:
        assert result["tokens_per_second"] > 0
        assert result["of_bandwidth"] is result["of_matmul_rate"] is None
    assert not children()


def test_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(COMMAND) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("in a daemon, not measured" in line for line in lines) == 2
    (row,) = (line for line in lines if "decode 4" in line)
    assert "%" not in row
