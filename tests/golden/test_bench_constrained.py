"""tools/bench_constrained.py: it measures what it says, on any model, and refuses what it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from luce.errors import UsageError
from tests.support.reference import Reference
from tools import bench_constrained

TARGET = Path(__file__).resolve().parents[2] / "models" / "tiny" / "target.gguf"
SCHEMA = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 200}


def test_steps_with_and_without_a_constraint() -> None:
    report = bench_constrained.step_times(str(TARGET), SCHEMA, "", (1, 3), 5, target_devices="cpu:0", draft="ngram")
    assert [(run["sequences"], run["sampling"]) for run in report["runs"]] == [
        (count, way) for count in (1, 3) for way in bench_constrained.SAMPLING
    ]
    for run in report["runs"]:
        constrained, free = run["constrained"], run["free"]
        best = min(free["step"], run["free again"]["step"])
        assert run["cost"] == constrained["step"] / best - 1 and constrained["step"] > 0
        assert constrained["mask"] > 0 and constrained["wait"] > 0 and "mask" not in free
        assert constrained["tokens_per_step"] >= 1 and free["tokens_per_step"] >= 1
    bench_constrained.show(report)


def test_times_of_masks(capsys: pytest.CaptureFixture[str]) -> None:
    report = bench_constrained.mask_times(str(TARGET), bench_constrained.NESTED, 20)
    assert report["times"].keys() == {"mask", "chain of 8", "check of 8", "forced", "push"}
    assert all(0 < own["median"] <= own["p99"] <= own["max"] for own in report["times"].values())
    bench_constrained.show(report)
    assert "compiled in" in capsys.readouterr().out


def test_a_vocabulary_that_is_larger_than_the_models() -> None:
    small = str(Reference("gemma4-e-F32").path)
    with pytest.raises(UsageError, match=r"^--tokenizer .*target\.gguf: \d+ tokens, but the model has \d+$"):
        bench_constrained.step_times(small, SCHEMA, str(TARGET), (1,), 5, target_devices="cpu:0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["masks", "absent.gguf"], "bench_constrained: "),
        (["steps", str(TARGET), "--schema", "absent.json"], "bench_constrained: --schema absent.json: "),
        (["steps", str(TARGET), "--max-ctx"], "bench_constrained: expected flags with one value each, got --max-ctx"),
    ],
)
def test_mistakes_end_in_one_line(arguments: list[str], message: str) -> None:
    command = [sys.executable, bench_constrained.__file__, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode and ran.stderr.startswith(message) and ran.stderr.count("\n") == 1


def test_one_json_object() -> None:
    command = [sys.executable, bench_constrained.__file__, "masks", str(TARGET), "-n", "5", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout)["vocabulary"] == "target.gguf"
