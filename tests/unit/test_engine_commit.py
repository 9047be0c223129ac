"""Replies sampled with a drafter have the distribution that the parameters ask for, whatever the drafter proposes and
with which probability: held against probabilities that are computed here, in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.config.sampling import SamplingParams
from luce.draft.drafter import Draftable, Proposal
from luce.engine.commit import Committer
from luce.engine.sampling import Sampler
from tests.support.drafters import ScriptedDrafter
from tests.support.replies import engine, submit
from tests.support.scripted_backend import ScriptedBackend

# 45 s of CPU, whose result the sources alone decide: each reply has a seed.
pytestmark = pytest.mark.provable

VOCAB = 8
PROMPT = (3, 1, 4, 1, 5)
#: logits of the token behind each token
TABLE: NDArray[np.float32] = np.random.default_rng(20).normal(0, 1.2, (VOCAB, VOCAB)).astype(np.float32)

PARAMS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "cold": {"temperature": 0.6},
    "top-k": {"temperature": 1.0, "top_k": 3},
    "top-p": {"temperature": 1.1, "top_p": 0.8},
    "min-p": {"temperature": 1.3, "min_p": 0.2},
    "bias": {"temperature": 1.0, "logit_bias": {0: 1.5, 3: -1.0, 6: -100.0}},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.4, "repeat_last_n": 5},
    "counts": {"temperature": 1.0, "frequency_penalty": 0.02, "presence_penalty": 0.7},
    "all": {
        "temperature": 0.9,
        "top_k": 6,
        "top_p": 0.9,
        "min_p": 0.05,
        "logit_bias": {2: 0.5},
        "repetition_penalty": 1.2,
        "repeat_last_n": 4,
        "frequency_penalty": 0.01,
    },
}


class Markov(ScriptedBackend):
    """What follows depends on the last token alone."""

    def logits(self, history: Many[int], missing: Many[int] = ()) -> NDArray[np.float32]:
        return TABLE[history[-1]].copy()


def draft_token(before: int, position: int) -> int:
    """The likeliest token at two of three positions, else another one."""
    return int(TABLE[before].argmax()) if position % 3 else (5 * position + before) % VOCAB


def drafts(text: Many[int], count: int) -> list[int]:
    text = list(text)
    for _ in range(count):
        text.append(draft_token(text[-1], len(text)))
    return text[-count:]


def probabilities(params: SamplingParams, history: Many[int], reply: int) -> NDArray[np.float64]:
    """Of each token behind a text whose last `reply` tokens are the reply's, by the order that SamplingParams names."""
    logits = TABLE[history[-1]].astype(np.float64)
    for token, bias in params.logit_bias.items():
        logits[token] = logits[token] + bias if bias > -100 else -np.inf
    if params.repetition_penalty != 1:
        for token in set(history[-params.repeat_last_n :]):
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token, count in Counter(history[len(history) - reply :]).items():
        logits[token] -= count * params.frequency_penalty + params.presence_penalty
    order = np.argsort(-logits, kind="stable")
    if params.top_k:
        logits[order[params.top_k :]] = -np.inf
    mass = np.exp((logits - logits.max()) / params.temperature)
    before = np.cumsum(mass[order]) - mass[order]
    mass[order[(before > params.top_p * mass.sum()) | (mass[order] < params.min_p * mass.max())]] = 0
    return np.asarray(mass / mass.sum())


def deviation(params: SamplingParams, replies: Many[Many[int]]) -> float:
    """By how many of its standard deviations Pearson's statistic is above its mean.

    Draws are grouped by what was drafted at their place, which is known before they are made, so that a draft that
    counts too often or too rarely shows. Where probabilities change from draw to draw, the sums of (drawn - expected)
    are held against the sum of the draws' covariances, and have as many degrees of freedom as that has.
    """
    differences, covariances = np.zeros((VOCAB, VOCAB)), np.zeros((VOCAB, VOCAB, VOCAB))
    for reply in replies:
        text = list(PROMPT)
        for count, token in enumerate(reply):
            expected, group = probabilities(params, text, count), draft_token(text[-1], len(text))
            assert expected[token] > 0, "a token that the parameters rule out"
            differences[group] += np.eye(VOCAB)[token] - expected
            covariances[group] += np.diag(expected) - np.outer(expected, expected)
            text.append(token)
    statistic, freedom = 0.0, 0
    for difference, covariance in zip(differences, covariances, strict=True):
        statistic += difference @ np.linalg.pinv(covariance, rcond=1e-9, hermitian=True) @ difference
        freedom += int(np.linalg.matrix_rank(covariance, tol=1e-9 * np.trace(covariance), hermitian=True))
    assert freedom > VOCAB
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


class Bushes(ScriptedDrafter):
    """Proposes two tokens at each place of the first text: what `draft_token` says, which the next place follows, and
    one more."""

    def propose_one(self, one: Draftable) -> Proposal:
        chain = super().propose_one(one).tokens
        nodes = [(token, 2 * place - 2 if place else -1) for place, token in enumerate(chain)]
        both = [node for token, parent in nodes for node in ((token, parent), ((token + 3) % VOCAB, parent))]
        tokens, parents = zip(*both[: one.max_tokens], strict=True)
        return Proposal(tokens, [0.5] * len(tokens), parents)


def draw(
    sampling: dict[str, Any],
    *,
    width: int,
    tree: bool = False,
    recurrent: bool = True,
    replies: int = 16,
    tokens: int = 480,
) -> tuple[list[list[int]], float]:
    """Replies by different seeds, four at once, and how many tokens a verification gave."""
    backend = Markov(vocab=VOCAB, recurrent=recurrent, branch_pages=30 * tree)
    drafter = (Bushes if tree else ScriptedDrafter)(drafts, vocab=VOCAB, probabilities=True)
    options = {"verify_width": width, "tree_tokens": 15 if tree else None}
    with engine(backend, eos=frozenset(), drafter=drafter, **options) as made:
        running = [
            submit(made, PROMPT, max_tokens=tokens, ignore_eos=True, seed=seed, **sampling)[0]
            for seed in range(replies)
        ]
        for reply in running:
            reply.finished()
        stats = made.stats().draft
    assert stats is not None
    assert bool(backend.moved) == tree
    return [reply.ids for reply in running], stats.tokens_per_step


@pytest.mark.parametrize("name", PARAMS)
def test_the_distribution(name: str) -> None:
    width, recurrent = (3, False) if name == "cold" else (4, True)
    found, pace = draw(PARAMS[name], width=width, recurrent=recurrent)
    assert pace > 1.2, "hardly a draft token is accepted, so the test sees nothing"
    assert deviation(SamplingParams(**PARAMS[name]), found) < 4


@pytest.mark.parametrize("name", ["temperature", "all"])
def test_the_distribution_with_trees(name: str) -> None:
    found, pace = draw(PARAMS[name], width=4, tree=True)
    assert pace > 1.2, "hardly a draft token is accepted, so the test sees nothing"
    assert deviation(SamplingParams(**PARAMS[name]), found) < 4


def redrawn(token: int, drafted: int, again: Callable[[], int], random: np.random.Generator) -> int:
    """After a wrong draft token the token that was drawn is thrown away, and another one is drawn from the row."""
    return token if token == drafted else again()


def believed(token: int, drafted: int, again: Callable[[], int], random: np.random.Generator) -> int:
    """One of twenty draft tokens is accepted whatever was drawn."""
    return drafted if random.random() < 1 / 20 else token


def doubted(token: int, drafted: int, again: Callable[[], int], random: np.random.Generator) -> int:
    """In place of one of four right draft tokens another token is drawn."""
    return again() if token == drafted and random.random() < 1 / 4 else token


@pytest.mark.parametrize("mutation", [redrawn, believed, doubted])
def test_acceptance_that_is_biased_is_seen(mutation: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    extend, choose = Committer.extend, Sampler.choose
    random, rows, nothing = np.random.default_rng(1), list[int](), np.zeros(1, np.int32)

    def extended(self: Committer, reply: Any, found: Any, scheduled: Any = None) -> None:
        rows[:] = () if scheduled is None else scheduled.draft.tokens
        extend(self, reply, found, scheduled)

    def chosen(self: Sampler, logits: NDArray[np.float32], mask: NDArray[np.uint32] | None = None) -> int:
        def again() -> int:
            return choose(Sampler(self.params, nothing, seed=int(random.integers(2**60)), ends=frozenset()), logits)

        token = choose(self, logits)
        return mutation(token, rows.pop(0), again, random) if rows else token

    monkeypatch.setattr(Committer, "extend", extended)
    monkeypatch.setattr(Sampler, "choose", chosen)
    found, _ = draw(PARAMS["temperature"], width=4)
    assert deviation(SamplingParams(temperature=1.0), found) > 6
