"""Seconds of a drafted step, by the formulas in NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from luce.planner.draft_time import DraftWork, draft_time
from luce.planner.figures import DeviceFigures, LinkFigures
from luce.planner.prediction import PlacedShard, predict
from luce.planner.problem import Drafting, HeadWork, LayerWork, Load, ModelWork, Problem

DEVICE = DeviceFigures(
    "cuda:0", "here", False, 1 << 40, 8e11, ((1, 1e12), (16, 9e12)), 4e-6, 5e-5, LinkFigures(1e-5, 1)
)
LAYERS = tuple(LayerWork(10**7 * n, 17 * 10**6 * n, 11, 4096 // n, 2048) for n in (1, 2, 4))
HEAD = HeadWork(3 * 10**8, 5 * 10**8, 3)


def step(layers: tuple[LayerWork, ...], rows: int, depth: int) -> float:
    """A step of so many rows: float64, all layers at once."""
    size, macs, kv = (
        np.array([getattr(layer, name) for layer in layers], np.float64) for name in ("bytes", "macs", "kv")
    )
    rate = np.exp(np.interp(np.log(rows), np.log([1, 16]), np.log([1e12, 9e12])))
    launches = sum(layer.launches for layer in layers) + HEAD.launches
    products = np.maximum(size / 8e11, 2 * macs * rows / rate).sum() + max(
        HEAD.bytes / 8e11, 2 * HEAD.macs * rows / rate
    )
    return float(5e-5 + 4e-6 * launches + products + (rows * kv * depth / 8e11).sum())


@pytest.mark.parametrize(("passes", "rows"), [(1, 16), (4, 1), (8, 1)])
def test_a_proposal_takes_its_passes(passes: int, rows: int) -> None:
    work = DraftWork(LAYERS, HEAD, passes, rows, context=4096)
    assert draft_time(DEVICE, work, 1000).total == pytest.approx(passes * step(LAYERS, rows, 1000))
    # It sees no more than its context.
    assert draft_time(DEVICE, work, 10**6).total == pytest.approx(passes * step(LAYERS, rows, 4096))


@pytest.mark.parametrize("objective", ["decode", "prompt", "balanced"])
def test_drafts_make_steps_longer_and_fewer(objective: str) -> None:
    model = ModelWork(64, (0,) * 3, 0, HEAD, LAYERS)
    problem = Problem(model, Load(1, 8192, 2048, 100, rows=7), (DEVICE,), {}, objective)  # type: ignore[arg-type]
    shard = PlacedShard("cuda:0", range(3))
    plain = predict(problem, [shard])
    found = predict(replace(problem, drafting=Drafting(tokens=2.5, seconds=3e-3)), [shard])
    assert plain is not None and found is not None
    verified = step(LAYERS, 7, 2048) + 2e-5
    assert plain.decode == pytest.approx(verified)
    assert found.decode == pytest.approx(verified + 3e-3)
    assert found.decode_rate == pytest.approx(2.5 / (verified + 3e-3))
    assert (found.prompt, found.prompt_rate) == (plain.prompt, plain.prompt_rate)
    token = (verified + 3e-3) / 2.5
    values = {"decode": token, "prompt": found.prompt, "balanced": found.prompt + 100 * token}
    assert found.value == pytest.approx(values[objective])


def test_time_that_is_not_known_is_not_counted() -> None:
    problem = Problem(ModelWork(64, (0,) * 3, 0, HEAD, LAYERS), Load(1, 8192, 2048), (DEVICE,), {}, "decode")
    plain = predict(problem, [PlacedShard("cuda:0", range(3))])
    found = predict(replace(problem, drafting=Drafting(seconds=None)), [PlacedShard("cuda:0", range(3))])
    assert plain is not None and found is not None
    assert found.decode == plain.decode
