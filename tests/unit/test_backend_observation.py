"""What servers observe of their devices: the ratio of measured and predicted seconds, and devices that are slow."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import luce
from luce.backend import observation
from luce.backend.observation import ShardObservation
from luce.planner.figures import DeviceFigures, LinkFigures
from luce.planner.prediction import PlacedShard, predict
from luce.planner.problem import HeadWork, LayerWork, Load, ModelWork, Problem
from luce.profiles.profile import DeviceProfile, FormatProfile, LinkProfile, Observed, Phase
from luce.profiles.profile_cache import profile_path, read_profile
from luce.shard.timing import SequenceRows
from tests.support.reference import Reference

DEVICE = DeviceFigures("cuda:0", "here", False, 1 << 40, 1e9, ((1, 1e12),), 1e-6, 1e-3, LinkFigures(0, 1e9))
LAYER = LayerWork(bytes=10**6, macs=10**7, launches=10, kv=1000, attention=1000)
MODEL = ModelWork(8, (0, 0), 0, HeadWork(5 * 10**5, 10, 0), (LAYER, LAYER))
PROBLEM = Problem(MODEL, Load(1, 4096, 100), (DEVICE,), {})
SHARD = PlacedShard("cuda:0", range(2))


class Watch:
    """An observation with a clock of its own, and what it has stored."""

    def __init__(self, device: DeviceFigures = DEVICE) -> None:
        self.now = 0.0
        self.stored: list[Observed] = []
        self.of_prompts: list[Observed] = []
        problem = replace(PROBLEM, devices=(device,))
        stored: dict[Phase, list[Observed]] = {"decode": self.stored, "prompt": self.of_prompts}
        self.observation = ShardObservation(
            problem, SHARD, lambda phase, seen: stored[phase].append(seen), lambda: self.now
        )

    def steps(self, count: int, ratio: float, position: int = 128, seconds: float = 0.0) -> None:
        # Two layers of 1 ms for weights, 10 us of launches, and 1 us for each position; the head takes 500 us.
        expected = 2 * (1e-3 + 1e-5 + position * 1e-6) + 5e-4
        for _ in range(count):
            self.now += seconds / count
            self.observation.add(SequenceRows(position, 1, 1), ratio * expected)

    def pieces(self, count: int, ratio: float, rows: int = 512, outputs: int = 0, position: int = 1000) -> None:
        # Products and attention of two layers at 1e12 operations a second, launches, and the head of an output.
        seen = position + rows / 2
        expected = 2 * (max(1e-3, 2 * 10**7 * rows / 1e12) + 1e-5 + 2 * 1000 * rows * seen / 1e12) + outputs * 5e-4
        for _ in range(count):
            self.observation.add(SequenceRows(position, rows, outputs), ratio * expected)


def test_the_ratio_is_stored_after_1000_steps_and_when_they_have_doubled() -> None:
    watch = Watch()
    watch.steps(999, 1.2)
    assert watch.stored == []
    watch.steps(1, 1.2)
    assert [it.ratio for it in watch.stored] == pytest.approx([1.2])
    # Of the last 1000 steps the median counts, at every position.
    watch.steps(999, 0.9, position=2176)
    watch.steps(1, 50.0)
    assert [it.ratio for it in watch.stored[1:]] == pytest.approx([0.9])
    watch.steps(2000, 1.0)
    assert [it.steps for it in watch.stored] == [1000, 2000, 4000]


def test_the_prediction_is_the_one_of_the_plan_without_the_step() -> None:
    predicted = predict(PROBLEM, [SHARD])
    assert predicted is not None
    seconds = predicted.shards[0].decode
    watch = Watch()
    assert watch.observation.expected(SequenceRows(100, 1, 1)) == pytest.approx(
        seconds.total - seconds.step + 2 * 28e-6
    )


def test_a_ratio_is_that_to_a_prediction_without_earlier_ones() -> None:
    # Decoding is predicted with 1.5 times the seconds of the figures, prompts with half of them.
    watch = Watch(replace(DEVICE, decode_ratio=1.5, prompt_ratio=0.5))
    watch.steps(1000, 1.8)
    watch.pieces(16, 0.4)
    assert watch.stored[0].ratio == pytest.approx(1.8)
    assert watch.of_prompts[0].ratio == pytest.approx(0.4)


def test_pieces_of_prompts_have_a_ratio_of_their_own() -> None:
    watch = Watch()
    watch.steps(999, 1.2)
    watch.pieces(15, 0.8)
    # Too short to be compared; and of verified rows nothing is known.
    watch.pieces(5, 3.0, rows=255)
    assert watch.stored == watch.of_prompts == []
    watch.pieces(1, 0.8)
    assert watch.of_prompts == [Observed(pytest.approx(0.8), 16)]
    assert watch.stored == []
    watch.pieces(8, 0.9, rows=300)
    watch.pieces(8, 0.9, position=0, outputs=1)
    assert watch.of_prompts[1:] == [Observed(pytest.approx(0.9), 32)]


def test_pieces_in_int8_are_not_compared() -> None:
    stored: list[Phase] = []
    watched = ShardObservation(PROBLEM, SHARD, lambda phase, seen: stored.append(phase), prompts=False)
    for _ in range(16):
        watched.add(SequenceRows(0, 512, 0), 1.0)
    assert stored == []


def test_what_is_unpacked_for_each_piece_counts() -> None:
    # Weights have no room to stay unpacked.
    layer = replace(LAYER, unpacked=10**6)
    device = replace(DEVICE, unpack=1e9, free=3 * 10**6)
    problem = replace(PROBLEM, model=replace(MODEL, layers=(layer, layer)), devices=(device,))
    less = replace(problem, devices=(DEVICE,))
    rows = SequenceRows(0, 512, 0)
    with_it, without = (
        ShardObservation(one, SHARD, lambda phase, seen: None).expected(rows) for one in (problem, less)
    )
    assert with_it - without == pytest.approx(2e-3)


def test_a_device_that_is_slow_for_five_minutes_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch()
    watch.steps(1000, 1.8, seconds=290)
    # It was fast in between.
    watch.steps(100, 1.0)
    watch.steps(1000, 1.8, seconds=290)
    assert not caplog.text
    watch.steps(1000, 1.8, seconds=290)
    watch.steps(1000, 1.8, seconds=290)
    assert caplog.text.count("cuda:0 takes 1.8 times as long as predicted") == 1
    assert "luce doctor --measure" in caplog.text


def test_a_model_observes_its_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A reply of a tiny model is compared, kept, and corrects the next plan."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(observation, "STEPS", 20)
    monkeypatch.setattr(observation, "PIECES", 2)
    reference = Reference("qwen3-a-F32")
    figures = FormatProfile(1e9, {1: 1e9, 512: 1e10}, None, 0.1, False)
    profile = DeviceProfile("cpu:0", "x", time.time(), 1e-5, 1e-9, LinkProfile(1e-6, 1e9), {"F32": figures})
    settings: dict[str, Any] = {"max_ctx": 512, "kv_cache_dir": "off", "target_device": "cpu:0"}
    with luce.load(reference.path, **settings) as model:
        path = profile_path(model.backend.shards[0].device)
    path.parent.mkdir(parents=True)
    path.write_bytes(msgspec.json.encode({"format": 3, "profile": profile}))
    with luce.load(reference.path, **settings) as model:
        assert model.plan is not None
        before = model.plan.prediction.decode
        prompt = model.plan.prediction.prompt
        list(model.generate([1, 2, 3], max_tokens=30, ignore_eos=True, temperature=0))
        for first in (4, 5):
            list(model.generate([first] * 300, max_tokens=1, ignore_eos=True, temperature=0))
    for thread in threading.enumerate():
        if thread.name == "luce-observed":
            thread.join()
    found = read_profile(path)
    assert found is not None
    assert found.observed["decode"].steps == 20
    assert found.observed["prompt"].steps == 2
    with luce.load(reference.path, **settings) as model:
        assert model.plan is not None
        ratio = min(2.0, max(0.5, found.observed["decode"].ratio))
        assert model.plan.prediction.decode == pytest.approx(before * ratio, rel=0.1)
        facts = model.plan.facts["profiles"]["cpu:0"]
        assert (facts["observed"], facts["observed_prompts"]) == (
            found.observed["decode"].ratio,
            found.observed["prompt"].ratio,
        )
        ratio = min(2.0, max(0.5, found.observed["prompt"].ratio))
        assert model.plan.prediction.prompt == pytest.approx(prompt * ratio, rel=0.1)
