"""Pairs of target and draft, their placements, and the check that drafted replies are those of plain decoding."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import luce
from tests.support.drafts import DraftReference
from tests.support.reference import Reference
from tests.support.warm import WARM

#: the models that tools/train_tiny trains, and their prompts
TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
FIT = DraftReference("qwen35-a-draft-fit-F32")
SECOND = DraftReference("qwen35-a-draft2-hf")
BLOCKS = Reference("qwen35-b-Q4_K_M")


@dataclass(frozen=True)
class Pair:
    """A target and its --draft."""

    target: Path
    draft: str
    #: fewest draft tokens accepted in a verification, in the mean: their share of those proposed falls with its width
    right: float
    #: prompts and tokens that run by default
    part: tuple[int, int]
    #: the draft proposes trees
    tree: bool = False


def of(target: Reference, draft: str, *, right: float = 0.0, tree: bool = False) -> Pair:
    """A pair of models that have learned nothing: a draft is right where it was fitted to the text, or by chance."""
    return Pair(target.path, draft, right, (8, 32), tree)


PAIRS = {
    "trained model": Pair(TINY / "target.gguf", str(TINY / "drafter.gguf"), 1.5, (12, 64)),
    "trained draft": Pair(TINY / "target.gguf", str(TINY / "draft.gguf"), 1.5, (12, 64)),
    "trained draft's trees": Pair(TINY / "target.gguf", str(TINY / "draft.gguf"), 1.5, (12, 64), tree=True),
    "prompt lookup": Pair(TINY / "target.gguf", "ngram", 1.5, (12, 64)),
    "fitted draft": of(FIT.target, str(FIT.path), right=0.2),
    "random draft": of(FIT.target, str(DraftReference("qwen35-a-draft-var-F32").path)),
    "fitted draft's trees": of(FIT.target, str(FIT.path), right=0.2, tree=True),
    "random draft's trees": of(FIT.target, str(DraftReference("qwen35-a-draft-var-F32").path), tree=True),
    "DFlash2 draft": of(FIT.target, str(SECOND.path)),
    "DFlash2 draft's trees": of(FIT.target, str(SECOND.path), tree=True),
    "bfloat16 draft": of(BLOCKS, str(DraftReference("qwen35-b-draft-BF16").path)),
    "mtp": of(BLOCKS, "mtp"),
}
#: with how many rows a sequence is verified there, several of them in a step
PLACES: dict[str, dict[str, Any]] = {
    "one": {"target_devices": "cpu:0", "verify_width": 9},
    "three": {"target_devices": "cpu:0,cpu:1,cpu:2", "verify_width": 4},
    "daemon": {"target_devices": "cpu:0,cpu:1", "target_shard_ipc_bin": str(WARM), "verify_width": 16},
    "draft in a daemon": {"target_devices": "cpu:0,cpu:1", "draft_ipc_bin": str(WARM), "verify_width": 9},
}
CASES = [(name, place) for name in PAIRS for place in PLACES if (name, place) != ("prompt lookup", "draft in a daemon")]


def some(cases: Iterable[tuple[str, str]]) -> list[Any]:
    """Parameters `name` and `place`: every pair on one device and half of them on every other placement; the nightly
    check has the other half. Neighbours in PAIRS differ by one thing, and are in different halves."""
    pairs, places = list(PAIRS), list(PLACES)

    def chosen(name: str, place: str) -> bool:
        return place == places[0] or pairs.index(name) % 2 == places.index(place) % 2

    return [pytest.param(*case, marks=() if chosen(*case) else pytest.mark.repeated) for case in cases]


def prompts(model: luce.Model, count: int) -> list[list[int]]:
    """Text of all tasks that a trained model goes on with; of models that have learned nothing, beginnings of a text
    that a draft may be fitted to, and random ids."""
    if model.path.parent == TINY:
        texts = json.loads((TINY / "prompts.json").read_text()).values()
        every = [model.tokenize(text) for task in texts for text in task]
        return every[:: len(every) // count][:count]
    expected = Reference(model.path.stem).expected
    text = np.concatenate([expected["prompt_long"], expected["greedy_long"]]).tolist()
    random = np.random.default_rng(9)
    begun = [text[: len(expected["prompt_long"]) + i % 16] for i in range(count // 2)]
    return [
        *begun,
        *(random.integers(0, model.spec.vocab, random.integers(1, 120)).tolist() for _ in range(count - len(begun))),
    ]


def replies(model: luce.Model, count: int, tokens: int) -> Iterator[list[int]]:
    """Greedy replies, of as many sequences at once as there are slots."""
    running = [
        model.generate(prompt, max_tokens=tokens, temperature=0, ignore_eos=True) for prompt in prompts(model, count)
    ]
    for generation in running:
        yield [token.id for token in generation]


#: of every load
SETTINGS: dict[str, Any] = {"max_ctx": 768, "max_queue": 1000, "cache_ram": 0}
#: of loads for many tokens, which take half the time from packed weights, as users have them
PACKED = {**SETTINGS, "cpu_weights": "packed"}


def settings(target: Path) -> dict[str, Any]:
    """Those of a load of a target."""
    return PACKED if target.parent == TINY else SETTINGS


@cache
def plain(target: Path, count: int, tokens: int) -> list[list[int]]:
    """What plain decoding gives, one sequence after another on one device."""
    with luce.load(target, target_devices="cpu:0", parallel=1, **settings(target)) as model:
        return list(replies(model, count, tokens))


def check(name: str, place: str, count: int, tokens: int) -> None:
    """So many replies of a pair in a place are those of plain decoding, token for token."""
    pair = PAIRS[name]
    expected = plain(pair.target, count, tokens)
    chosen = {**settings(pair.target), **PLACES[place]}
    with luce.load(pair.target, draft=pair.draft, ddtree=pair.tree, parallel=4, **chosen) as model:
        for number, reply in enumerate(replies(model, count, tokens)):
            assert reply == expected[number], f"prompt {number}"
        stats = model.engine.stats().draft
    assert stats is not None and stats.state == "on"
    print(f"{name}, {place}: {stats.accepted} of {stats.proposed} draft tokens accepted in {stats.steps} verifications")
    assert stats.proposed > count * tokens // 10
    # Where the draft can learn, some of its tokens are accepted, but not all: rows are taken back.
    assert pair.right * stats.steps <= stats.accepted < stats.proposed
