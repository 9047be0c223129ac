"""tools/bench_prefill.py: kept tokens, recalled numbers and times, of whole and of compressed prompts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from luce.errors import LuceError
from tools import bench_prefill

TINY = Path(__file__).parents[2] / "models" / "tiny"
PAIR = TINY / "target.gguf", TINY / "drafter.gguf"


def test_a_report() -> None:
    whole, compressed = bench_prefill.bench(*PAIR, (1024,), (1, 0.2), depths=3, target_devices="cpu:0")
    assert (whole["tokens"], whole["kept"], whole["drafter"]) == (1024, 1024, 0)
    assert 0 < compressed["kept"] < 700 and 0 < compressed["drafter"] < compressed["first"]
    assert whole["recalled"] == compressed["recalled"] == 3 and compressed["by_depth"] == "XXX"


def test_the_command() -> None:
    command = [sys.executable, "-m", "tools.bench_prefill", str(PAIR[0]), "--prefill-drafter", str(PAIR[1])]
    options = ["--lengths", "600", "--ratios", "0.2", "--depths", "1", "--set", "target_devices=cpu:0"]
    ran = subprocess.run([*command, *options, "--json"], capture_output=True, text=True, cwd=TINY.parents[1])
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["ratio"] == 0.2
    ran = subprocess.run(
        [*command, "--lengths", "600", "--set", "threads=-1"], capture_output=True, text=True, cwd=TINY.parents[1]
    )
    assert ran.returncode == 2 and ran.stderr.startswith("bench_prefill: "), ran.stderr


def test_a_small_model_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luce.compress.scorer.LayerwiseModel.tail_attention", lambda *_, **__: 1 / 0)
    with pytest.raises(LuceError, match=r"drafter\.gguf: off after 3 failures: ZeroDivisionError"):
        bench_prefill.bench(*PAIR, (600,), (0.2,), depths=3, target_devices="cpu:0")
