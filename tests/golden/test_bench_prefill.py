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
from luce.compress.compression_options import Verdict
from luce.compress.compressor import Compressor
from luce.errors import LuceError
from tests.support.warm import WARM
from tools import bench_prefill
from tools.bench_retrieval import TASKS, cases

TINY = Path(__file__).parents[2] / "models" / "tiny"
PAIR = TINY / "target.gguf", TINY / "drafter.gguf"


def test_a_report() -> None:
    whole, compressed = bench_prefill.bench(*PAIR, (1024,), (1, 0.2), depths=3, target_devices="cpu:0")
    assert (whole["tokens"], whole["kept"], whole["drafter"], whole["result"]) == (1024, 1024, 0, "off")
    assert 0 < compressed["kept"] < 700 and "compressed" in compressed["result"]
    for line in (whole, compressed):
        parts = line["drafter"] + line["selection"] + line["target"]
        # Medians of three prompts, each part rounded to a tenth of a millisecond.
        assert 0 < line["target"] <= line["first"] and line["drafter"] < line["first"] and parts > 0.5 * line["first"]
    assert compressed["drafter"] > 0 and compressed["selection"] > 0
    assert whole["recalled"] == compressed["recalled"] == 3 and compressed["by_depth"] == "XXX"


def test_auto_reads_whole_or_compresses_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small model reads its prompts again, although they were compressed with the same keep ratio before."""
    settings: dict[str, Any] = {"target_devices": "cpu:0", "prefill_keep_ratio": 0.2, "prefill_threshold": 1}
    before, auto = bench_prefill.bench(*PAIR, (1024,), (0.2, "auto"), depths=1, **settings)
    assert before["drafter"] > 0 < auto["drafter"] and (auto["ratio"], auto["result"]) == ("auto", "compressed")
    monkeypatch.setattr(Compressor, "verdict", lambda *_, **__: Verdict.SLOWER)
    (auto,) = bench_prefill.bench(*PAIR, (1024,), ("auto",), depths=1, **settings)
    assert (auto["result"], auto["kept"], auto["drafter"]) == ("slower", 1024, 0)


TIMES = {"first", "drafter", "selection", "target"}
PLACES: dict[str, dict[str, Any]] = {
    "three shards": {"target_devices": "cpu:0,cpu:1,cpu:2"},
    "daemon": {"target_devices": "cpu:0,cpu:1", "target_shard_ipc_bin": f"cpu={WARM}", "isolate_shards": True},
}


def test_all_tasks_and_all_placements(record_property: Callable[[str, object], None]) -> None:
    """Whole beside compressed; the tokens of the replies are the same."""

    def report(*tasks: str, **settings: Any) -> list[dict[str, Any]]:
        chosen = {"cpu_weights": "packed", **settings}
        lines = bench_prefill.bench(*PAIR, (768,), (1, 0.3), 2, "", tasks, **chosen)
        return [{name: line[name] for name in line if name not in TIMES} for line in lines]

    one = report(*TASKS, target_devices="cpu:0")
    assert [(line["task"], line["ratio"]) for line in one] == [(task, ratio) for task in TASKS for ratio in (1, 0.3)]
    # Two prompts of each depth ask for two numbers.
    for line in one:
        assert (line["depths"], len(line["replies"])) == (2, 4 if line["task"] == "two" else 2)
    for line in one:
        record_property(f"{line['task']} {line['ratio']}", f"{line['recalled']} of {line['depths']}")
    right = {(line["task"], line["ratio"]): line["recalled"] for line in one}
    # The tiny model confuses two numbers at the last depth, and cannot count.
    assert all(right[task, ratio] == 2 for task in ("needle", "lookup") for ratio in (1, 0.3))
    # Of the task with two questions to a prompt; to the placement a task is a prompt as others are.
    for settings in PLACES.values():
        assert report("two", **settings) == [line for line in one if line["task"] == "two"]


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
    ran = subprocess.run([*command, *options], capture_output=True, text=True, cwd=TINY.parents[1])
    names, row = ran.stdout.splitlines()
    assert names.split()[:5] == ["task", "tokens", "ratio", "result", "kept"]
    assert row.split()[:4] == ["needle", "600", "0.2", "compressed"] and row.split()[-3:-1] == ["of", "1"]
    ran = subprocess.run([*command, "--tasks", "sums"], capture_output=True, text=True, cwd=TINY.parents[1])
    assert ran.returncode == 2 and "--tasks: there is no sums" in ran.stderr
    ran = subprocess.run(
        [*command, "--lengths", "600", "--set", "threads=-1"], capture_output=True, text=True, cwd=TINY.parents[1]
    )
    assert ran.returncode == 2 and ran.stderr.startswith("bench_prefill: "), ran.stderr


def test_a_small_model_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luce.compress.scorer.LayerwiseModel.tail_attention", lambda *_, **__: 1 / 0)
    with pytest.raises(LuceError, match=r"drafter\.gguf: off after 3 failures: ZeroDivisionError"):
        list(bench_prefill.bench(*PAIR, (600,), (0.2,), depths=3, target_devices="cpu:0"))
