"""tools/bench_prompts.py: times to first tokens of prompts at the same time, and one after the other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools import bench_prompts

TINY = Path(__file__).parents[2] / "models" / "tiny" / "target.gguf"


def test_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    measure = bench_prompts.first_tokens

    def note(model: object, prompts: list[list[int]]) -> list[float]:
        asked.append((len(prompts), len(prompts[0])))
        assert len(measure(model, prompts)) == len(prompts)  # type: ignore[arg-type]
        # Of several at once, and of those that come one after the other.
        return [float(10 * n) for n in range(1, len(prompts) + 1)] if len(prompts) > 1 else [7.0]

    monkeypatch.setattr(bench_prompts, "first_tokens", note)
    lines = [*bench_prompts.bench(TINY, (5, 20), 3, 2, target_devices="cpu:0")]
    times = {"prompts": 3, "alone": 7.0, "in_turn": 21.0, "last": 30.0, "mean": 20.0}
    assert lines == [{"tokens": 5, **times}, {"tokens": 20, **times}]
    assert asked == [one for n in (5, 20) for one in [(3, n)] * 3 + [(1, n)] * 6]


def test_the_command() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "tools.bench_prompts", *arguments]
        return subprocess.run(line, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])

    short = ("--tokens", "4,20", "--prompts", "2", "--repeat", "1", "--set", "target_devices=cpu:0")
    done = run(str(TINY), *short, "--json")
    assert done.returncode == 0, done.stderr
    for tokens, line in zip((4, 20), map(json.loads, done.stdout.splitlines()), strict=True):
        assert line["tokens"] == tokens and 0 < line["mean"] <= line["last"] and 0 < line["alone"] < line["in_turn"]
    header, *rows = run(str(TINY), *short).stdout.splitlines()
    assert header.split() == ["tokens", "prompts", "alone", "in_turn", "last", "mean"] and len(rows) == 2
    wrong = run("none.gguf")
    assert wrong.returncode != 0 and "none.gguf" in wrong.stderr and "Traceback" not in wrong.stderr
    assert run(str(TINY), "--prompts", "0").returncode == 2
