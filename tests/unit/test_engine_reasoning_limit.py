"""Budgets of reasoning: exact to the token, and the same reply with drafts, trees, in a batch and alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from luce.config.sampling import SamplingParams
from luce.draft.drafter import Draftable, Proposal
from luce.engine.events import FinishReason
from luce.engine.reasoning_limit import CloseKind, ReasoningLimit, ReasoningState
from luce.engine.sampling import Sampler
from tests.support.drafters import ScriptedDrafter
from tests.support.replies import engine, submit
from tests.support.scripted_backend import ScriptedBackend

VOCAB = 12
OPEN, CLOSE, OTHER_CLOSE, BLANK, LINE = 7, 8, 9, 10, 11
PROMPT = (3, 1, 4)
#: logits of the token behind each token; the markers that end the reasoning are rare
TABLE: NDArray[np.float32] = np.random.default_rng(7).normal(0, 1, (VOCAB, VOCAB)).astype(np.float32)
TABLE[:, [CLOSE, OTHER_CLOSE]] -= 3
LIMIT = ReasoningLimit(
    opening=(OPEN, 5), closers=frozenset({CLOSE, OTHER_CLOSE}), closing=(CLOSE, LINE, 1), blank=frozenset({BLANK})
)
LEAD = replace(LIMIT, lead_in=(2, 2, 6))


def begin(limit: ReasoningLimit, reply: Sequence[int]) -> int | None:
    """Where the reasoning of a reply begins, from the whole of it."""
    if limit.inside:
        return 0
    at = next((at for at, token in enumerate(reply) if token not in limit.blank), len(reply))
    end = at + len(limit.opening)
    return end if tuple(reply[at:end]) == limit.opening else None


def forced(limit: ReasoningLimit, most: int, reply: Sequence[int]) -> int | None:
    """The token that has to come next, from the whole reply so far."""
    at = begin(limit, reply)
    if at is None:
        return None
    spaces = [most - limit.reply_reserve - len(limit.closing) - at]
    spaces = [limit.budget, *spaces] if limit.budget is not None else spaces * (limit.reply_reserve > 0)
    if not spaces:
        return None
    room = min(spaces)
    lead = limit.lead_in if room >= len(limit.lead_in) else ()
    end = at + max(room, 0) - len(lead)
    if limit.closers & set(reply[at:end]):
        return None
    ending, place = lead + limit.closing, len(reply) - end
    return ending[place] if 0 <= place < len(ending) else None


def expected(limit: ReasoningLimit, most: int, choose: Callable[[list[int]], int]) -> list[int]:
    """A whole reply of `most` tokens."""
    reply: list[int] = []
    while len(reply) < most:
        token = forced(limit, most, reply)
        reply.append(choose(reply) if token is None else token)
    return reply


LIMITS = st.builds(
    replace,
    st.sampled_from([LIMIT, LEAD]),
    inside=st.booleans(),
    budget=st.none() | st.integers(0, 12),
    reply_reserve=st.integers(0, 20),
)


@settings(max_examples=400)
@given(LIMITS, st.integers(1, 24), st.randoms(use_true_random=False), st.booleans())
def test_what_is_forced_follows_from_the_reply(limit: ReasoningLimit, most: int, random: object, opens: bool) -> None:
    state = ReasoningState(limit, most)
    reply: list[int] = [BLANK, *limit.opening][:most] if opens and not limit.inside else []
    for token in reply:
        state.push(token)
    while len(reply) < most:
        token = forced(limit, most, reply)
        assert state.forced == token
        token = random.choice(range(VOCAB)) if token is None else token  # type: ignore[attr-defined]
        state.push(token)
        reply.append(token)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("budget", [0, 1, 8])
def test_a_budget_is_exact(budget: int, inside: bool) -> None:
    for limit, lead in ((LIMIT, 0), (LEAD, 3)):
        limit = replace(limit, inside=inside, budget=budget)
        reply = expected(limit, 20, lambda reply: 0)
        state, found = ReasoningState(limit, 20), []
        start = [] if inside else [*limit.opening]
        for _ in range(20):
            token = state.forced
            found.append((start[len(found)] if len(found) < len(start) else 0) if token is None else token)
            state.push(found[-1])
        reasoning = found[len(start) : found.index(CLOSE)]
        assert len(reasoning) == budget and reasoning.count(0) == (budget - lead if budget >= lead else budget)
        assert found[found.index(CLOSE) :] == [CLOSE, LINE, 1] + [0] * (17 - budget - len(start))
        assert state.close_kind == "hard"
        if inside:
            assert found == reply


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ([OPEN, 5, 0, CLOSE, 0], "natural"),
        ([OPEN, 5, 0, OTHER_CLOSE, 0], "natural"),
        ([BLANK, OPEN, 5, CLOSE], "natural"),
        ([OPEN, 5, 0, 0], None),
        ([OPEN, 4, CLOSE], None),
        ([0, OPEN, 5, CLOSE], None),
        ([CLOSE], None),
    ],
)
def test_what_the_model_ends_itself(reply: list[int], kind: CloseKind | None) -> None:
    state = ReasoningState(replace(LIMIT, budget=4), 99)
    for token in reply:
        assert state.forced is None
        state.push(token)
    assert state.close_kind == kind


class Markov(ScriptedBackend):
    """What follows depends on the last token alone."""

    def logits(self, history: Sequence[int], missing: Sequence[int] = ()) -> NDArray[np.float32]:
        return TABLE[history[-1]].copy()


def likely(text: Sequence[int], count: int) -> list[int]:
    """The likeliest tokens, with some wrong ones."""
    text = list(text)
    for _ in range(count):
        text.append(int(TABLE[text[-1]].argmax()) if len(text) % 4 else len(text) % VOCAB)
    return text[-count:]


class Bushes(ScriptedDrafter):
    """Two tokens at each place of a chain: the likely one, which the next place follows, and CLOSE."""

    def propose_one(self, one: Draftable) -> Proposal:
        chain = super().propose_one(one).tokens
        nodes = [(token, 2 * place - 2 if place else -1) for place, token in enumerate(chain)]
        both = [node for token, parent in nodes for node in ((token, parent), (CLOSE if token != CLOSE else 0, parent))]
        tokens, parents = zip(*both[: one.max_tokens], strict=True)
        return Proposal(tokens, [0.5] * len(tokens), parents)


CASES = [
    (replace(limit, inside=inside, budget=budget, reply_reserve=reserve), {"temperature": temperature, "seed": seed})
    for seed, (limit, inside, budget, reserve, temperature) in enumerate(
        (limit, inside, budget, reserve, temperature)
        for limit in (LIMIT, LEAD)
        for inside in (True, False)
        for budget, reserve in ((0, 0), (1, 0), (2, 5), (3, 0), (5, 0), (8, 30), (11, 0), (None, 25), (None, 0))
        for temperature in (0.0, 1.0)
    )
]
MOST = 40


def chosen(params: SamplingParams) -> Callable[[list[int]], int]:
    """What the model chooses behind a reply."""

    def choose(reply: list[int]) -> int:
        sampler = Sampler(params, np.array(PROMPT, np.int32), seed=params.seed or 0, ends=frozenset())
        for token in reply:
            sampler.push(token)
        return sampler.choose(TABLE[[*PROMPT, *reply][-1]])

    return choose


@pytest.mark.parametrize("drafter", ["none", "chain", "tree"])
@pytest.mark.parametrize("slots", [1, 4])
def test_replies_are_the_same_however_they_are_made(drafter: str, slots: int) -> None:
    tree = drafter == "tree"
    backend = Markov(vocab=VOCAB, slots=slots, branch_pages=30 * tree)
    options: dict[str, Any] = {"max_queue": 99}
    if drafter != "none":
        made_drafter = (Bushes if tree else ScriptedDrafter)(likely, vocab=VOCAB, probabilities=True)
        options |= {"drafter": made_drafter, "verify_width": 8, "tree_tokens": 15 if tree else None}
    with engine(backend, eos=frozenset(), **options) as made:
        running = [
            submit(made, PROMPT, max_tokens=MOST, ignore_eos=True, reasoning=limit, **params)[0]
            for limit, params in CASES
        ]
        hard = 0
        for reply, (limit, params) in zip(running, CASES, strict=True):
            end = reply.finished()
            sampling = SamplingParams(max_tokens=MOST, ignore_eos=True, **params)
            assert reply.ids == expected(limit, MOST, chosen(sampling))
            assert end.reason is FinishReason.LENGTH and end.timings.predicted_tokens == MOST
            hard += end.close_kind == "hard"
        stats = made.stats().draft
    assert hard > len(CASES) // 3
    if drafter != "none":
        # Chains that reach beyond the end of the reasoning are cut there, and others are accepted.
        assert stats is not None and stats.accepted > 100


def test_log_probabilities_of_forced_tokens_are_the_model_s() -> None:
    with engine(Markov(vocab=VOCAB), eos=frozenset()) as made:
        limit = replace(LIMIT, inside=True, budget=2)
        reply, _ = submit(made, PROMPT, max_tokens=6, temperature=0.0, logprobs=0, reasoning=limit)
        reply.finished()
        tokens = [token for event in reply.events if hasattr(event, "tokens") for token in event.tokens]
    history = PROMPT[-1]
    for token in tokens:
        row = TABLE[history].astype(np.float64)
        assert token.logprob == pytest.approx(row[token.id] - np.log(np.exp(row).sum()), abs=1e-5)
        history = token.id
    assert [token.id for token in tokens[2:5]] == [CLOSE, LINE, 1]


def test_an_end_in_the_reasoning_ends_the_reply() -> None:
    with engine(Markov(vocab=VOCAB, script=lambda history: 6), eos=frozenset({6})) as made:
        reply, _ = submit(made, PROMPT, max_tokens=9, temperature=0.0, logit_bias={6: 100.0}, reasoning=LIMIT)
        assert reply.finished().reason is FinishReason.EOS and reply.finished().close_kind is None


@pytest.mark.parametrize("drafted", [True, False])
def test_an_ending_of_many_tokens_takes_few_steps(drafted: bool) -> None:
    """Its tokens are drafts that are always accepted, and the drafter is not asked for them."""
    drafter = ScriptedDrafter(lambda text, count: [0] * count, vocab=VOCAB) if drafted else None
    backend = Markov(vocab=VOCAB, slots=1)
    lead = tuple(np.random.default_rng(3).integers(0, 7, 21).tolist())
    with engine(backend, eos=frozenset(), drafter=drafter, verify_width=8) as made:
        limit = replace(LIMIT, inside=True, budget=30, lead_in=lead)
        reply, _ = submit(made, PROMPT, max_tokens=36, temperature=0.0, ignore_eos=True, reasoning=limit)
        reply.finished()
        params = SamplingParams(temperature=0.0)
        assert reply.ids == expected(limit, 36, chosen(params))
        # 24 tokens end the reasoning: 3 steps of 8 at most, one of them begun before.
        assert len(backend.steps) <= 1 + 36 - 24 + 4
        assert made.stats().forced == (0, 0)
        assert drafter is None or drafter.asked <= 36 - 24
