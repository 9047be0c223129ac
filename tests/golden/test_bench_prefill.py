"""tools/bench_prefill.py: kept tokens, recalled numbers and times, of whole and of compressed prompts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import luce
from luce.errors import LuceError
from tests.support.warm import WARM
from tools import bench_prefill
from tools.bench_retrieval import TASKS, cases

TINY = Path(__file__).parents[2] / "models" / "tiny"
PAIR = TINY / "target.gguf", TINY / "drafter.gguf"


def test_a_report() -> None:
    whole, compressed = bench_prefill.bench(*PAIR, (1024,), (1, 0.2), depths=3, target_devices="cpu:0")
    assert (whole["tokens"], whole["kept"], whole["drafter"]) == (1024, 1024, 0)
    assert 0 < compressed["kept"] < 700 and 0 < compressed["drafter"] < compressed["first"]
    assert whole["recalled"] == compressed["recalled"] == 3 and compressed["by_depth"] == "XXX"


PLACES: dict[str, dict[str, Any]] = {
    "three shards": {"target_devices": "cpu:0,cpu:1,cpu:2"},
    "daemon": {"target_devices": "cpu:0,cpu:1", "target_shard_ipc_bin": f"cpu={WARM}", "isolate_shards": True},
}


def test_all_tasks_on_all_placements(record_property: Callable[[str, object], None]) -> None:
    """Whole beside compressed; the tokens of the replies are the same."""

    def report(**settings: Any) -> list[dict[str, Any]]:
        chosen = {"cpu_weights": "packed", **settings}
        lines = bench_prefill.bench(*PAIR, (768,), (1, 0.3), 2, "", tuple(TASKS), **chosen)
        return [{name: line[name] for name in line if name not in ("first", "drafter")} for line in lines]

    one = report(target_devices="cpu:0")
    assert [(line["task"], line["ratio"]) for line in one] == [(task, ratio) for task in TASKS for ratio in (1, 0.3)]
    # Two prompts of each depth ask for two numbers.
    assert [len(line["replies"]) for line in one] == [2, 2, 4, 4, 2, 2, 2, 2] and {line["depths"] for line in one} == {
        2
    }
    for line in one:
        record_property(f"{line['task']} {line['ratio']}", f"{line['recalled']} of {line['depths']}")
    right = {(line["task"], line["ratio"]): line["recalled"] for line in one}
    # The tiny model confuses two numbers at the last depth, and cannot count.
    assert all(right[task, ratio] == 2 for task in ("needle", "lookup") for ratio in (1, 0.3))
    for settings in PLACES.values():
        assert report(**settings) == one


def test_what_a_prompt_tells() -> None:
    with luce.load(PAIR[0], target_devices="cpu:0", kv_cache_dir="off", max_ctx=1024) as model:
        for task in TASKS:
            told = list(cases(model, 600, (0.0, 1.0), task=task))
            assert all(len(case.ids) == 600 for case in told)
            for case in told:
                text = model.detokenize(case.ids)
                if task == "count":
                    assert text.count("The bell of the old tower rings.") == int(case.answer)
                else:
                    assert case.answer.strip() in text


def test_the_command() -> None:
    command = [sys.executable, "-m", "tools.bench_prefill", str(PAIR[0]), "--prefill-drafter", str(PAIR[1])]
    options = ["--lengths", "600", "--ratios", "0.2", "--depths", "1", "--set", "target_devices=cpu:0"]
    ran = subprocess.run([*command, *options, "--json"], capture_output=True, text=True, cwd=TINY.parents[1])
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["ratio"] == 0.2
    ran = subprocess.run([*command, "--tasks", "sums"], capture_output=True, text=True, cwd=TINY.parents[1])
    assert ran.returncode == 2 and "--tasks: there is no sums" in ran.stderr
    ran = subprocess.run(
        [*command, "--lengths", "600", "--set", "threads=-1"], capture_output=True, text=True, cwd=TINY.parents[1]
    )
    assert ran.returncode == 2 and ran.stderr.startswith("bench_prefill: "), ran.stderr


def test_a_small_model_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luce.compress.scorer.LayerwiseModel.tail_attention", lambda *_, **__: 1 / 0)
    with pytest.raises(LuceError, match=r"drafter\.gguf: off after 3 failures: ZeroDivisionError"):
        bench_prefill.bench(*PAIR, (600,), (0.2,), depths=3, target_devices="cpu:0")
