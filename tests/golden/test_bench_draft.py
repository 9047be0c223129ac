"""tools/bench_draft.py: what a trained pair's steps give, the same on every placement, and their times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from luce.errors import LuceError
from tests.support.reference import Reference
from tests.support.warm import WARM
from tools import bench_draft

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
#: drafts of the trained target, and the least tokens a step of code with each
LEAST = {"drafter": 2.5, "draft": 4.0, "draft2": 4.5}
PLACES: list[dict[str, Any]] = [
    {"target_devices": "cpu:0"},
    {"target_devices": "cpu:0,cpu:1,cpu:2"},
    {"target_devices": "cpu:0,cpu:1", "target_shard_ipc_bin": str(WARM)},
    {"target_devices": "cpu:0", "draft_ipc_bin": str(WARM)},
]
TARGET = Reference("qwen35-b-Q4_K_M").path


def measured(draft: str, tokens: int, count: int, tasks: tuple[str, ...], **fields: Any) -> dict[str, Any]:
    every = json.loads(bench_draft.PROMPTS.read_text())
    prompts = {task: every[task] for task in tasks}
    fields |= {"draft": str(TINY / f"{draft}.gguf"), "max_ctx": 1024}
    return bench_draft.acceptance(str(TINY / "target.gguf"), prompts, tokens, count, **fields)


@pytest.mark.parametrize("draft", LEAST)
def test_every_placement_accepts_the_same(draft: str) -> None:
    found = [measured(draft, 32, 1, ("code", "text", "copy"), **place) for place in PLACES]
    assert [len(report["devices"]) for report in found] == [1, 3, 2, 1]
    tasks = found[0]["tasks"]
    assert all(report["tasks"] == tasks for report in found)
    for task in tasks.values():
        histogram = {int(count): steps for count, steps in task["histogram"].items()}
        assert sum(histogram.values()) == task["steps"]
        assert sum(count * steps for count, steps in histogram.items()) <= 31
        assert task["tokens_per_step"] > 1.2 and len(histogram) > 2


@pytest.mark.parametrize("draft", LEAST)
def test_tokens_of_a_step_of_code(draft: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(draft, 96, 6, ("code",), target_devices="cpu:0")
    assert capsys.readouterr().err == "luce: loading target.gguf\nluce: code: 6 replies of up to 96 tokens\n"
    assert found["state"] == "on"
    assert found["tasks"]["code"]["tokens_per_step"] >= LEAST[draft]


@pytest.mark.parametrize("draft", LEAST)
def test_a_copy_gives_ten_tokens_a_step(draft: str) -> None:
    """A block, and what is looked up behind it."""
    found = measured(draft, 96, 4, ("copy",), target_devices="cpu:0")
    assert found["tasks"]["copy"]["tokens_per_step"] >= 10


def test_steps_of_a_made_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = tmp_path / "draft.gguf"
    bench_draft.make(TARGET, draft, Type.Q8_0, 2, (4, 2, 32), 8)
    for place in (PLACES[0], PLACES[2]):
        found = bench_draft.step_times(str(TARGET), (1, 2, 8, 16), 20, 6, draft=str(draft), **place)
        # What it does is told on standard error where that is no terminal either.
        told = ["loading {}", "measuring steps without a drafter", "loading {} with its drafter"]
        told += ["measuring steps of 2 rows", "measuring steps of 8 rows"]
        assert capsys.readouterr().err == "".join(f"luce: {line}\n" for line in told).replace("{}", TARGET.name)
        # A block of 8 has no 16 rows, and one row is a plain step.
        assert [width["rows"] for width in found["widths"]] == [2, 8]
        assert found["plain"]["step"] > 0
        for width in found["widths"]:
            assert 0 < width["draft"] < width["step"] and width["of_plain"] > 0
            assert 1 <= width["tokens_per_step"] <= width["rows"]
        # To a daemon: the step, and what the head makes of a block, which is there.
        counts = [found["plain"]["messages"], *(width["messages"] for width in found["widths"])]
        assert counts == [0, 0, 0] if place is PLACES[0] else 1 <= counts[0] < counts[1] == counts[2]


def test_several_sequences_with_acceptance_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = tmp_path / "draft.gguf"
    bench_draft.make(TARGET, draft, Type.Q8_0, 2, (4, 2, 32), generation=2)
    found = bench_draft.load_table(
        str(TARGET), (1, 2), (0.0, 1.0), 20, 64, rounds=2, draft=str(draft), target_devices="cpu:0", max_ctx=200
    )
    rows = found["load"]
    assert [(row["sequences"], row["acceptance"]) for row in rows] == [(1, 0.0), (1, 1.0), (2, 0.0), (2, 1.0)]
    for row in rows:
        assert row["equal"] and row["state"] == "on"
        assert row["gain"] > 0 and row["gain_spread"] >= 0 and row["plain_spread"] >= 0
        assert 0 < row["plain_step"] < 60
        # What is verified depends on times, at 0 perhaps nothing; then nothing is accepted, and everything at 1.
        if row["acceptance"] == 0:
            assert row["tokens_per_step"] in (0, 1)
        else:
            assert 1 <= row["tokens_per_step"] <= 8
    bench_draft.show(found)
    assert capsys.readouterr().out.count("yes") == 4
    with pytest.raises(LuceError, match="too short to run at once"):
        bench_draft.load_table(str(TARGET), (1,), (0.0,), 20, 1, draft=str(draft), target_devices="cpu:0")


def test_bad_calls(tmp_path: Path) -> None:
    with pytest.raises(LuceError, match="too short"):
        bench_draft.step_times(str(TARGET), (8,), 20, 0, draft="ngram", target_devices="cpu:0", max_ctx=28)
    (tmp_path / "texts.json").write_text('{"code": 3}')
    both = [str(TARGET), "--draft", "nothing.gguf"]
    for arguments, message in (
        (["steps", *both, "--max-ctx"], "expected flags with one value each, got --max-ctx"),
        (["steps", *both, "--wrong", "1"], "--wrong"),
        (["acceptance", *both, "--prompts", str(tmp_path / "none.json")], "none.json: [Errno 2]"),
        (["acceptance", *both, "--prompts", str(tmp_path / "texts.json")], "expected a list of texts for each task"),
        (["make", str(tmp_path / "none.gguf"), "out.gguf"], "none.gguf: No such file"),
        (["make", str(TARGET), str(tmp_path / "nowhere" / "out.gguf")], "No such file"),
    ):
        ran = subprocess.run([sys.executable, bench_draft.__file__, *arguments], capture_output=True, text=True)
        assert ran.returncode and message in ran.stderr.splitlines()[-1], ran.stderr
        # What it was doing may stand above the error, but no traceback.
        assert all(line.startswith("luce: ") for line in ran.stderr.splitlines()[:-1]), ran.stderr
