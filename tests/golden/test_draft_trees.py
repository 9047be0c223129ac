"""DDTree in the engine: replies are those of plain decoding, on every placement, whatever a draft proposes."""

from __future__ import annotations

from typing import Any

import pytest

import luce
from tests.support.draft_replies import FIT, KINDS, PLACES, SETTINGS, beside, drafted, expected, replies
from tests.support.warm import WARM

DAEMON = {"target_devices": "cpu:0,cpu:1", "target_shard_ipc_bin": str(WARM)}
REMOTE = {"target_devices": "cpu:0", "draft_device": "cpu:1", "draft_ipc_bin": str(WARM)}
PLACED: dict[str, dict[str, Any]] = {**PLACES, "daemon": DAEMON, "remote draft": REMOTE}


@pytest.mark.parametrize(
    ("kind", "place", "budget", "width"),
    [
        ("fitted", "one", 15, 16),
        ("fitted", "one", 5, 0),
        ("fitted", "three", 15, 16),
        ("fitted", "daemon", 15, 16),
        ("fitted", "remote draft", 15, 16),
        ("fitted", "elsewhere", 40, 9),
        ("fitted", "short context", 15, 16),
        ("random", "three", 15, 8),
    ],
)
def test_replies_are_those_of_plain_decoding(kind: str, place: str, budget: int, width: int) -> None:
    reference, draft, right = KINDS[kind]
    tree = {"ddtree": True, "ddtree_budget": budget, "verify_width": width}
    with luce.load(reference.path, draft=draft, **tree, **SETTINGS, **PLACED[place]) as model:
        assert replies(model, reference) == expected(reference)
        assert model.engine.wait_idle(30)
        stats = drafted(model)
    assert stats.state == "on" and stats.proposed > (100 if width else 0)
    assert stats.facts["ddtree_budget"] == min(budget, 15)
    if right and width:
        assert stats.accepted > 10


def test_a_tree_finds_more_than_a_pipeline() -> None:
    """A tree has the likeliest texts, so of two as large it is right more often."""
    prompt, found = FIT.expected["prompt_long"].tolist(), []
    for ddtree in (False, True):
        settings = {"target_devices": "cpu:0", "max_ctx": 512, "draft": str(FIT.path), "verify_width": 8}
        with luce.load(FIT.target.path, ddtree=ddtree, **settings) as model:
            reply = model.generate(prompt, max_tokens=60, temperature=1, seed=1, ignore_eos=True)
            tokens = [token.id for token in reply]
            found.append((tokens, drafted(model).tokens_per_step))
    assert found[0][0] == found[1][0]
    assert found[1][1] >= found[0][1]


def test_no_budget_drafts_nothing() -> None:
    settings = {"target_devices": "cpu:0", "max_ctx": 512, "draft": str(FIT.path), "ddtree": True, "ddtree_budget": 0}
    with luce.load(FIT.target.path, **settings) as model:
        prompt = FIT.expected["prompt_17"].tolist()
        tokens = [token.id for token in model.generate(prompt, max_tokens=16, temperature=0, ignore_eos=True)]
        assert tokens == FIT.target.expected["greedy_17"][:16].tolist()
        assert drafted(model).proposed == 0


@pytest.mark.parametrize(
    ("kind", "width", "device"),
    [
        ("fitted", 16, "host"),
        *(
            pytest.param(kind, width, "gpu", marks=pytest.mark.gpu)
            for kind in ("fitted", "random", "bfloat16")
            for width in (0, 6, 16)
        ),
    ],
)
def test_replies_beside_a_prompt_that_is_read(
    kind: str, width: int, device: str, request: pytest.FixtureRequest
) -> None:
    reference, draft, _ = KINDS[kind]
    place = str(request.getfixturevalue("gpu").name) if device == "gpu" else "cpu:0"
    ways: list[dict[str, Any]] = [
        {},
        {"draft": draft, "verify_width": width},
        {"draft": draft, "verify_width": width, "ddtree": True},
    ]
    found = []
    for drafting in ways:
        with luce.load(reference.path, target_devices=place, **drafting, **SETTINGS) as model:
            found.append(beside(model, reference))
    assert found[0] == found[1] == found[2]
    with luce.load(reference.path, target_devices=place, **SETTINGS) as model:
        prompt = reference.expected["prompt_17"].tolist()
        alone = [token.id for token in model.generate(prompt, max_tokens=48, temperature=0, ignore_eos=True)]
    assert found[0][0] == alone
