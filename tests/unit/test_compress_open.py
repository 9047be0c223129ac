"""Small models beside a target: which device they get, what is refused, and weights that several users share."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from luce.compress.open import SharedScorer, plan_scorer
from luce.compress.scorer import scorer_bytes
from luce.config.settings import Config
from luce.errors import FormatError, LuceError, UsageError
from luce.layers.weight_pool import WeightPool
from luce.runtime.host import HostDevice
from tests.support.reference import Reference
from tests.support.scorers import ScriptedScorer

SMALL = str(Reference("qwen3-a-F32").path)
HOST = Config(cpu_weights="float32")


@pytest.mark.parametrize(
    ("device", "devices", "name"),
    [("auto", (0, 1), "cpu:1"), ("auto", (), "cpu:0"), ("cpu:3", (0,), "cpu:3")],
)
def test_its_device(device: str, devices: tuple[int, ...], name: str) -> None:
    targets = [HostDevice(index) for index in devices]
    with contextlib.ExitStack() as opened:
        plan = plan_scorer(opened, HOST, SMALL, targets, device)
        assert str(plan.device.name) == name and plan.device not in targets
        assert plan.facts == {"file": SMALL, "device": name, "bytes": plan.bytes}
        (claim,) = plan.claims
        assert claim.device is plan.device and 0 < claim.bytes == plan.bytes < plan.free


@pytest.mark.parametrize(
    ("path", "device", "problem"),
    [
        (SMALL, "cuda:7", "--prefill-drafter-device cuda:7: "),
        (SMALL, "tcp://far:1/cpu:0", "prefill drafter on tcp://far:1/cpu:0: network daemons require --shard-key-file"),
        ("/nowhere/a.gguf", "auto", "/nowhere/a.gguf"),
        (__file__, "auto", Path(__file__).name),
    ],
)
def test_what_cannot_be_used_says_so(path: str, device: str, problem: str) -> None:
    with contextlib.ExitStack() as opened, pytest.raises((UsageError, FormatError, LuceError), match=problem):
        plan_scorer(opened, HOST, path, [], device)


def test_the_alpha_of_the_settings() -> None:
    """By 1 the model reads of most blocks the one with the best score alone; by 0 it reads all."""
    tokens = np.random.default_rng(0).integers(0, Reference("qwen3-a-F32").spec.vocab, 1200).astype(np.int32)
    found, sizes = [], []
    for alpha in (0.0, 1.0):
        with contextlib.ExitStack() as opened:
            plan = plan_scorer(opened, dataclasses.replace(HOST, prefill_alpha=alpha), SMALL, [])
            scorer = opened.enter_context(contextlib.closing(plan.load(None)))
            found.append(scorer(tokens))
            sizes.append(plan.bytes)
    assert not np.allclose(found[0], found[1], rtol=1e-3) and sizes[0] < sizes[1]


def test_the_layers_of_the_settings() -> None:
    config = dataclasses.replace(HOST, prefill_layers=2, prefill_scored_layers=1)
    with contextlib.ExitStack() as opened:
        plan = plan_scorer(opened, config, SMALL, [])
    assert (plan.reading.layers, plan.reading.scored) == (2, 1)


def test_users_share_one_model() -> None:
    loaded: list[ScriptedScorer] = []

    def load() -> ScriptedScorer:
        loaded.append(ScriptedScorer())
        return loaded[-1]

    shared = SharedScorer(load)
    one, other = shared.open(), shared.open()
    tokens = np.arange(5, dtype=np.int32)
    assert one(tokens).tolist() == other(tokens, segment=3).tolist() == [0, 1, 2, 3, 4]
    one.close()
    one.close()
    assert len(loaded) == 1 and not loaded[0].closed
    other.close()
    assert loaded[0].closed == 1
    shared.open().close()
    assert [scorer.closed for scorer in loaded] == [1, 1]


def test_a_load_that_fails_leaves_no_user() -> None:
    scorers = iter([None, ScriptedScorer()])

    def load() -> ScriptedScorer:
        found = next(scorers)
        if found is None:
            raise LuceError("full")
        return found

    shared = SharedScorer(load)
    with pytest.raises(LuceError, match="full"):
        shared.open()
    user = shared.open()
    user.close()


@pytest.mark.parametrize(
    ("residency", "shares", "room", "parked"),
    [
        ("auto", False, "resident", False),
        ("auto", False, "parked", True),
        # Neither fits: the error names what the resident weights need.
        ("auto", False, "none", False),
        ("auto", True, "parked", False),
        ("persistent", False, "parked", False),
        ("request-scoped", False, "resident", True),
        ("request-scoped", True, "resident", False),
    ],
)
def test_weights_are_parked_where_only_so_the_target_fits(
    residency: str, shares: bool, room: str, parked: bool
) -> None:
    config = dataclasses.replace(HOST, draft_residency=residency)
    with contextlib.ExitStack() as opened, contextlib.ExitStack() as other:
        pool = WeightPool()
        if shares:
            pool.plan(plan_scorer(other, config, SMALL, []).file, HostDevice())
        plan = plan_scorer(opened, config, SMALL, [], weights=pool)
        whole = replace(plan.reading, parked=False)
        resident = scorer_bytes(plan.file, plan.spec, plan.device, plan.longest, whole)
        small = scorer_bytes(plan.file, plan.spec, plan.device, plan.longest, replace(whole, parked=True))
        assert sum(small) < sum(resident)
        most = {"resident": sum(resident), "parked": sum(small), "none": 0}[room]
        beside = plan.beside(config, lambda claims: sum(claim.bytes for claim in claims) <= most)
        assert beside.reading.parked is parked and (beside.facts.get("weights") == "parked") is parked
        assert beside.bytes == sum((small if parked else resident)[shares:])
        assert beside.identity(plan.file) == plan.identity(plan.file)
