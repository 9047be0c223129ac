"""/metrics with --metrics-compat: llama.cpp's names, with the numbers that replies report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from luce.draft.ngram import NgramDrafter
from tests.support.http_server import running

PAGE = Path(__file__).parents[2] / "docs/guide/metrics.md"
#: by llama.cpp's tools/server/README.md
COUNTERS = {
    *("prompt_tokens_total", "prompt_seconds_total", "tokens_predicted_total", "tokens_predicted_seconds_total"),
    *("n_decode_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
    "spec_decode_num_drafts_total",
}
GAUGES = {"prompt_tokens_seconds", "predicted_tokens_seconds", "requests_processing", "requests_deferred"}


def samples(text: str) -> dict[str, float]:
    """The samples with llama.cpp's names. They have no labels."""
    return {name: float(value) for name, value in re.findall(r"^llamacpp:(\w+) (\S+)$", text, re.MULTILINE)}


async def test_a_setting_adds_the_names() -> None:
    async with running() as here:
        assert "llamacpp:" not in (await here.get("/metrics"))[1]
    async with running(metrics_compat=True) as here:
        text = (await here.get("/metrics"))[1]
        kinds = dict(re.findall(r"^# TYPE llamacpp:(\w+) (\w+)$", text, re.MULTILINE))
        assert kinds == dict.fromkeys(COUNTERS, "counter") | dict.fromkeys(GAUGES, "gauge")
        assert samples(text) == dict.fromkeys(COUNTERS | GAUGES, 0.0)
        assert "luce_generated_tokens_total" in text
    rows = re.findall(r"^\| `llamacpp:(\w+)` \| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    assert dict(rows) == kinds


async def test_numbers_are_those_of_the_replies() -> None:
    async with running(metrics_compat=True, verify_width=8, model={"drafter": NgramDrafter(block=7)}) as here:
        replies = [await here.chat("to and fro " * 8, max_tokens=n, ignore_eos=True) for n in (60, 20)]
        found = samples((await here.get("/metrics"))[1])
        steps = await here.metric("luce_steps_total")
    timings = [reply["timings"] for reply in replies]

    def total(name: str) -> float:
        return sum(one[name] for one in timings)

    assert found["tokens_predicted_total"] == 80
    assert found["prompt_tokens_total"] == total("prompt_n") > 0
    # Replies have milliseconds with three places.
    for name, milliseconds in (
        ("prompt_seconds_total", "prompt_ms"),
        ("tokens_predicted_seconds_total", "predicted_ms"),
    ):
        assert found[name] == pytest.approx(total(milliseconds) / 1000, abs=2e-6)
    assert found["prompt_tokens_seconds"] == pytest.approx(total("prompt_n") / found["prompt_seconds_total"])
    assert found["predicted_tokens_seconds"] == pytest.approx(80 / found["tokens_predicted_seconds_total"])
    assert found["n_decode_total"] == steps > 0
    assert found["spec_decode_num_draft_tokens_total"] == total("draft_n") > 0
    assert found["spec_decode_num_accepted_tokens_total"] == total("draft_n_accepted") > 0
    assert 0 < found["spec_decode_num_drafts_total"] <= steps
    assert found["requests_processing"] == found["requests_deferred"] == 0
