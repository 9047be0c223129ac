"""Tables and figures of tools/plot_bench.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import plot_bench


def result(kind: str, size: int, depth: int, rate: float) -> dict[str, Any]:
    return {
        "test": f"{kind} {size} at {depth}",
        "kind": kind,
        "size": size,
        "depth": depth,
        "tokens_per_second": rate,
        "spread": rate / 10,
        "milliseconds_per_step": 1000 / rate,
        "of_bandwidth": 0.5,
        "of_matmul_rate": None if depth else 0.25,
    }


@pytest.fixture
def report(tmp_path: Path) -> Path:
    results = [result("prompt", 512, 0, 10), result("prompt", 2048, 0, 20), result("prompt", 2048, 64, 16)]
    results += [result("decode", 8, 64, 4), result("decode", 8, 0, 5)]
    results += [result("verify", 4, 0, 8), result("verify", 4, 64, 7)]
    path = tmp_path / "some.json"
    facts = {"model": "M", "bytes": 5e9, "devices": [{"name": "One"}, {"name": "Two"}], "results": results}
    path.write_text(json.dumps(facts))
    return path


def test_points(report: Path) -> None:
    facts = json.loads(report.read_text())
    assert plot_bench.points(facts, "prompt") == [(0, 20, 2), (64, 16, 1.6)]
    assert plot_bench.points(facts, "decode") == [(64, 4, 0.4), (0, 5, 0.5)]
    assert plot_bench.points(facts, "verify") == [(4, 125, 12.5)]
    assert plot_bench.points(facts, "batch") == []


def test_table(report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot_bench.main([str(report)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "M, 5.00 GB, One, Two"
    assert lines[4] == "| prompt 512 at 0 | 10.0 | 1.0 | 100.00 | 50% | 25% |"
    assert lines[-1] == "| verify 4 at 64 | 7.0 | 0.7 | 142.86 | 50% |  |"


def test_figures(report: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `docs` is not installed")
    assert plot_bench.main([str(report), "--output", str(tmp_path / "figures")]) == 0
    names = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert names == ["decode.svg", "prompt.svg", "verify.svg"]
