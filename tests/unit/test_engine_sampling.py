"""Sampling against the textbook in float64, loops and sorts over everything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from luce.config.sampling import SAMPLERS, SamplingParams
from luce.engine import sampling
from luce.engine.sampling import Sampler, device_draws, draw_of, needs_logits, score
from luce.errors import BackendError, GrammarLimitError, RequestError
from luce.ops.draw import draw_tokens
from luce.ops.sample import largest, top_k_keys
from luce.runtime.draws import RowDraws
from luce.runtime.host import HostDevice


def rows(seed: int, vocab: int, spread: float = 2.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(vocab) * spread).astype(np.float32)


def sampler(
    params: SamplingParams,
    prompt: Sequence[int] = (0,),
    *,
    reply: Sequence[int] = (),
    seed: int = 1,
    ends: Sequence[int] = (),
) -> Sampler:
    made = Sampler(params, np.array(prompt, np.int32), seed=seed, ends=frozenset(ends))
    for token in reply:
        made.push(token)
    return made


def textbook_values(
    logits: Sequence[float], params: SamplingParams, prompt: list[int], reply: list[int]
) -> list[float]:
    values = [float(x) for x in logits]
    for token, bias in params.logit_bias.items():
        values[token] += bias
    history = prompt + reply
    window = history if params.repeat_last_n < 0 else history[max(0, len(history) - params.repeat_last_n) :]
    for token in set(window):
        values[token] = (
            values[token] / params.repetition_penalty
            if values[token] > 0
            else values[token] * params.repetition_penalty
        )
    for token, count in Counter(reply).items():
        values[token] -= count * params.frequency_penalty + params.presence_penalty
    return values


def textbook_distribution(values: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """id -> probability after top-k, temperature, top-p, min-p."""
    ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if params.top_k:
        ranked = ranked[: params.top_k]
    weights = [math.exp((values[i] - values[ranked[0]]) / params.temperature) for i in ranked]
    total = math.fsum(weights)
    probabilities = [w / total for w in weights]
    kept, mass = [], 0.0
    for token, probability in zip(ranked, probabilities, strict=True):
        if (kept and mass >= params.top_p) or probability < params.min_p * probabilities[0]:
            break
        kept.append((token, probability))
        mass += probability
    return {token: probability / mass for token, probability in kept}


def draws(logits: NDArray[np.float32], params: SamplingParams, n: int, seed: int = 1) -> Counter[int]:
    """n draws at as many positions."""
    one = sampler(params, seed=seed)
    found: Counter[int] = Counter()
    for _ in range(n):
        found[one.choose(logits)] += 1
        one.push(0)
    return found


def assert_fits(found: Counter[int], expected: dict[int, float]) -> None:
    """Chi-square with cells of at least 5 expected draws, 5 standard deviations of room; the seeds are fixed."""
    n = sum(found.values())
    assert set(found) <= set(expected)
    cells: list[tuple[float, float]] = []
    seen = hoped = 0.0
    for token in sorted(expected, key=lambda t: -expected[t]):
        seen += found[token]
        hoped += n * expected[token]
        if hoped >= 5:
            cells.append((seen, hoped))
            seen = hoped = 0.0
    statistic = sum((s - h) ** 2 / h for s, h in cells)
    freedom = len(cells) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * max(freedom, 1)), (statistic, freedom)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7, top_k=5),
        SamplingParams(temperature=1.0, top_k=1000),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.0, top_p=0.01),
        SamplingParams(temperature=0.9, min_p=0.1),
        SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.05),
        SamplingParams(temperature=1.2, top_p=0.9, min_p=0.02),
    ],
    ids=lambda p: f"T{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}",
)
@pytest.mark.parametrize("vocab", [50, 3000])
def test_draws_have_the_textbook_distribution(params: SamplingParams, vocab: int) -> None:
    logits = rows(vocab, vocab)
    assert_fits(draws(logits, params, 2000), textbook_distribution(logits.tolist(), params))


def test_a_flat_distribution_needs_more_than_the_first_head() -> None:
    # 90 % of 6000 equal tokens: the lowest 5400 ids.
    params = SamplingParams(temperature=1.0, top_p=0.9)
    found = draws(np.zeros(6000, np.float32), params, 800)
    assert max(found) < 5400
    assert_fits(found, dict.fromkeys(range(5400), 1 / 5400))


@pytest.mark.parametrize("vocab", [3, 512, 513, 5000])
def test_drawing_in_sections_inverts_the_running_sum(vocab: int) -> None:
    mass = np.exp(rows(7, vocab))
    running = np.cumsum(mass.astype(np.float64))
    for uniform in [0.0, 1 - 2**-53, *np.random.default_rng(8).random(200)]:
        place = sampling.draw_index(mass, uniform)
        target = uniform * running[-1]
        # Sums differ in their last bits: the target lies in the interval of its place but for 1e-9 of the total.
        slack = 1e-9 * running[-1]
        assert running[place] + slack >= target >= running[place] - mass[place] - slack


def test_drawing_never_takes_an_entry_without_mass() -> None:
    mass = np.zeros(2000, np.float32)
    mass[[700, 1300]] = 1
    assert sampling.draw_index(mass, 0.0) == 700
    assert sampling.draw_index(mass, 0.5) == 1300
    assert sampling.draw_index(mass, 1 - 2**-53) == 1300


@given(
    values=st.lists(st.integers(-20, 20), min_size=1, max_size=700),
    share=st.floats(0, 1),
)
def test_largest_equals_a_full_sort(values: list[int], share: float) -> None:
    array = np.array(values, np.float32)
    k = max(1, int(share * len(values)))
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    assert largest(array, k).tolist() == expected


@pytest.mark.parametrize("k", [1, 40, 1024, 50000, 151936])
def test_largest_of_a_real_vocabulary(k: int) -> None:
    values = rows(3, 151936)
    assert largest(values, k).tolist() == np.lexsort((np.arange(len(values)), -values))[:k].tolist()


@given(
    seed=st.integers(0, 1000),
    prompt=st.lists(st.integers(0, 29), min_size=1, max_size=20),
    reply=st.lists(st.integers(0, 29), max_size=150),
    repetition=st.sampled_from([0.7, 1.0, 1.3]),
    last=st.sampled_from([-1, 0, 1, 8, 64]),
    frequency=st.sampled_from([-1.5, 0.0, 0.4]),
    presence=st.sampled_from([-0.5, 0.0, 1.1]),
    bias=st.dictionaries(st.integers(0, 29), st.floats(-50, 50), max_size=4),
)
def test_bias_and_penalties_equal_the_textbook(
    seed: int,
    prompt: list[int],
    reply: list[int],
    repetition: float,
    last: int,
    frequency: float,
    presence: float,
    bias: dict[int, float],
) -> None:
    params = SamplingParams(
        repetition_penalty=repetition,
        repeat_last_n=last,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias=bias,
    )
    logits = rows(seed, 30)
    before = logits.copy()
    got = sampler(params, prompt, reply=reply).adjust(logits)
    assert (logits == before).all()
    np.testing.assert_allclose(got, textbook_values(logits.tolist(), params, prompt, reply), rtol=1e-5, atol=1e-4)


def test_penalties_count_more_ids_than_the_first_table_holds() -> None:
    params = SamplingParams(presence_penalty=1.0)
    got = sampler(params, reply=list(range(300))).adjust(np.zeros(400, np.float32))
    assert got.tolist() == [-1.0] * 300 + [0.0] * 100


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    assert sampler(SamplingParams(logprobs=0)).choose(np.array([1, 3, 0, 3], np.float32)) == 1


def test_temperature_near_zero_is_greedy_without_warnings() -> None:
    logits = rows(5, 3000)
    for top_k in (0, 40):
        for temperature in (1e-320, 1e-30, 1e-6):
            params = SamplingParams(temperature=temperature, top_k=top_k)
            assert sampler(params).choose(logits) == int(logits.argmax())


def test_minus_one_turns_top_k_off_as_zero_does() -> None:
    off, also = (SamplingParams(temperature=1.5, top_k=top_k) for top_k in (0, -1))
    assert draw_of(also, 7) == draw_of(off, 7)
    assert not device_draws(also) and needs_logits(also) == needs_logits(off)
    logits = [rows(seed, 50) for seed in range(40)]
    assert [sampler(also, seed=seed).choose(row) for seed, row in enumerate(logits)] == [
        sampler(off, seed=seed).choose(row) for seed, row in enumerate(logits)
    ]


def test_a_bias_of_100_forces_and_of_minus_100_bans() -> None:
    logits = np.array([1000, 0, 5, 7], np.float32)
    assert sampler(SamplingParams(logit_bias={1: 100, 2: 100})).choose(logits) == 2
    assert sampler(SamplingParams(logit_bias={0: -100})).choose(logits) == 3
    drawn = draws(np.zeros(4, np.float32), SamplingParams(temperature=1.0, logit_bias={0: -100, 3: -100}), 200)
    assert set(drawn) == {1, 2}


def test_min_tokens_bans_the_ends_until_reached() -> None:
    logits = np.array([0, 9, 8, 1], np.float32)
    one = sampler(SamplingParams(min_tokens=2), ends=[1, 2])
    chosen = []
    for _ in range(4):
        chosen.append(one.choose(logits))
        one.push(chosen[-1])
    assert chosen == [3, 3, 1, 1]


def test_min_tokens_wins_over_a_forced_end() -> None:
    one = sampler(SamplingParams(min_tokens=1, logit_bias={1: 100}), ends=[1])
    assert one.choose(np.array([2, 0, 1], np.float32)) == 0
    one.push(0)
    assert one.choose(np.array([2, 0, 1], np.float32)) == 1


def test_a_draw_depends_on_seed_and_position_only() -> None:
    params = SamplingParams(temperature=1.0)
    logits = rows(2, 100)

    def twenty(seed: int, prompt: Sequence[int]) -> list[int]:
        one = sampler(params, prompt, seed=seed)
        found = []
        for _ in range(20):
            found.append(one.choose(logits))
            one.push(found[-1])
        return found

    assert twenty(4, [1, 2]) == twenty(4, [3, 4])
    assert twenty(4, [1, 2])[1:] == twenty(4, [1, 2, 3])[:-1]
    assert len({tuple(twenty(seed, [1])) for seed in (0, 1, -1, 2**64 - 2, 12345678901234567890)}) == 5


def test_broken_logits_are_the_backends_fault() -> None:
    params = SamplingParams(temperature=1.0)
    for bad in (np.nan, np.inf):
        logits = rows(1, 50)
        logits[7] = bad
        with pytest.raises(BackendError, match="not finite"):
            sampler(params).choose(logits)


def test_banning_every_token_is_the_clients_fault() -> None:
    params = SamplingParams(temperature=1.0, logit_bias=dict.fromkeys(range(4), -100.0))
    with pytest.raises(RequestError) as caught:
        sampler(params).choose(np.zeros(4, np.float32))
    assert caught.value.param == "logit_bias"


def test_min_tokens_that_leaves_no_token_is_the_clients_fault() -> None:
    for bias in ({}, {0: -100.0}):
        params = SamplingParams(temperature=1.0, min_tokens=1, logit_bias=bias)
        with pytest.raises(RequestError) as caught:
            sampler(params, ends=range(len(bias), 4)).choose(np.zeros(4, np.float32))
        assert caught.value.param == "min_tokens"


def ends_of(name: str) -> list[Any]:
    """The ends of a sampling value's range, and the floats next to them."""
    row = SAMPLERS[name]
    if row.kind is int:
        return [int(row.low), int(row.low) + 1, int(row.high) - 1, int(row.high)]
    inside = [math.nextafter(row.low, math.inf), math.nextafter(row.high, -math.inf), row.high]
    return inside if row.above else [row.low, *inside]


@given(
    values=st.fixed_dictionaries({name: st.sampled_from(ends_of(name)) for name in SAMPLERS}),
    bias=st.dictionaries(st.integers(0, 19), st.sampled_from([-100.0, -99.9, 0.0, 99.9, 100.0]), max_size=4),
    scale=st.sampled_from([0.0, 1e-30, 1.0, 100.0, 65504.0]),
    seed=st.integers(0, 9),
)
def test_every_end_of_every_range_gives_a_token(
    values: dict[str, Any], bias: dict[int, float], scale: float, seed: int
) -> None:
    # 65504 is float16's largest number: no layer of any family gives more.
    logits = rows(seed, 20, scale)
    one = sampler(SamplingParams(**values, logit_bias=bias), [1, 2, 3, 3], reply=[4, 5, 5] * 9, seed=values["seed"])
    with np.errstate(all="raise", under="ignore"):
        adjusted = one.adjust(logits)
        assert not np.isnan(adjusted).any() and np.isfinite(adjusted.max())
        assert np.isfinite(adjusted[one.choose(logits)])


@pytest.mark.parametrize("alternatives", [0, 1, 20, 300])
def test_log_probabilities_are_of_the_unmodified_distribution(alternatives: int) -> None:
    logits = rows(9, 300)
    exact = logits.astype(np.float64)
    expected = exact - np.log(np.exp(exact).sum())
    logprob, top = score(logits, 17, alternatives)
    assert logprob == pytest.approx(expected[17], abs=1e-5)
    assert [i for i, _ in top] == np.argsort(-exact, kind="stable")[:alternatives].tolist()
    assert [p for _, p in top] == pytest.approx(sorted(expected, reverse=True)[:alternatives], abs=1e-5)


def test_log_probabilities_do_not_overflow() -> None:
    logprob, _ = score(np.array([5e3, 5e3, -np.inf], np.float32), 0, 2)
    assert logprob == pytest.approx(-math.log(2), abs=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.1},
        {"repetition_penalty": 1.1},
        {"frequency_penalty": -0.1},
        {"presence_penalty": 0.1},
        {"logit_bias": {1: 2.0}},
        {"logprobs": 0},
        {"min_tokens": 1},
    ],
    ids=str,
)
def test_which_parameters_need_logits(change: dict[str, object]) -> None:
    plain = SamplingParams(top_k=40, top_p=0.9, min_p=0.1, seed=3, max_tokens=5, prompt_logprobs=2)
    assert not needs_logits(plain)
    assert needs_logits(replace(plain, **change))  # type: ignore[arg-type]


def drawn(logits: NDArray[np.float32], params: SamplingParams, seed: int, tokens: int = 0) -> int:
    """The token that a device draws behind a prompt of one token and `tokens` of the reply."""
    host, ids = HostDevice(), np.zeros(1, np.int32)
    keys, position = top_k_keys(host, logits[None]), np.array([1 + tokens], np.int32)
    draw_tokens(host, keys, RowDraws.of([draw_of(params, seed)]), position, ids)
    return int(ids[0])


@pytest.mark.parametrize("top_k", [1, 7, 40, 64])
@pytest.mark.parametrize("changes", [{}, {"top_p": 0.6}, {"min_p": 0.2}, {"temperature": 1e-3}, {"temperature": 2.0}])
def test_devices_draw_what_the_host_draws_from_whole_logits(top_k: int, changes: dict[str, Any]) -> None:
    params = replace(SamplingParams(temperature=0.8, top_k=top_k), **changes)
    assert device_draws(params)
    rng = np.random.default_rng(top_k)
    for seed in range(20):
        # Ties among them.
        logits = (rng.standard_normal(500) * 8).round().astype(np.float32)
        whole = sampler(params, seed=seed)
        for tokens in range(3):
            token = whole.choose(logits)
            assert drawn(logits, params, seed, tokens) == token
            whole.push(token)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {"top_k": 0},
        {"top_k": 65},
        {"logprobs": 0},
        {"min_tokens": 1},
        {"logit_bias": {1: 1.0}},
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
    ],
)
def test_who_is_not_drawn_by_a_device(changes: dict[str, Any]) -> None:
    params = replace(SamplingParams(temperature=0.7, top_k=40), **changes)
    assert not device_draws(params)
    assert needs_logits(params) == (params.temperature > 0)


def mask_of(*ids: int) -> NDArray[np.uint32]:
    """A mask of these ids, for 8 tokens."""
    return np.array([sum(1 << i for i in ids)], np.uint32)


LADDER = np.arange(8, dtype=np.float32)


@pytest.mark.parametrize(
    ("params", "ids", "chosen"),
    [
        ({"temperature": 0.0}, (1, 4), 4),
        # A forced id that is masked is not forced; one of two is.
        ({"temperature": 0.0, "logit_bias": {7: 100.0}}, (1, 4), 4),
        ({"temperature": 0.0, "logit_bias": {7: 100.0, 1: 100.0}}, (1, 4), 1),
        ({"temperature": 0.0, "logit_bias": {1: 9.0}}, (1, 4), 1),
        ({"temperature": 1.0, "top_k": 1}, (2, 3), 3),
        ({"temperature": 1e-6, "top_p": 0.5}, (0, 5), 5),
        # min_tokens bans the end, 6, unless nothing else may come.
        ({"temperature": 0.0, "min_tokens": 3}, (2, 6), 2),
        ({"temperature": 0.0, "min_tokens": 3}, (6,), 6),
    ],
)
def test_a_mask_comes_before_everything(params: dict[str, Any], ids: tuple[int, ...], chosen: int) -> None:
    made = Sampler(SamplingParams(**params), np.zeros(1, np.int32), seed=1, ends=frozenset({6}))
    assert made.choose(LADDER, mask_of(*ids)) == chosen
    assert LADDER.tolist() == list(range(8))


def test_tokens_behind_a_masks_last_word_have_no_probability() -> None:
    logits = np.arange(40, dtype=np.float32)
    for params in (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-6),
        SamplingParams(temperature=1.0, top_k=1),
    ):
        assert sampler(params).choose(logits, mask_of(*range(32))) == 31


def test_a_bias_that_leaves_a_mask_nothing_is_the_clients() -> None:
    with pytest.raises(RequestError) as caught:
        sampler(SamplingParams(temperature=0.0, logit_bias={3: -100.0})).choose(LADDER, mask_of(3))
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_of_no_token_is_a_limit_of_the_grammar(temperature: float) -> None:
    with pytest.raises(GrammarLimitError, match=r"^the grammar of the reply allows no token here$"):
        sampler(SamplingParams(temperature=temperature)).choose(LADDER, mask_of())


@given(st.integers(0, 2**32), st.sampled_from([{}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_p": 0.8, "min_p": 0.05}]))
def test_masked_candidates_give_the_token_of_masked_logits(seed: int, cuts: dict[str, float]) -> None:
    random = np.random.default_rng(seed)
    logits = rows(seed, 300)
    allowed = random.random(300) < random.choice([0.003, 0.1, 0.9])
    allowed[random.integers(300)] = True
    words = np.packbits(allowed, bitorder="little")
    mask = np.concatenate([words, np.zeros(-len(words) % 4, np.uint8)]).view(np.uint32)
    params = SamplingParams(temperature=random.uniform(0.2, 3), top_k=int(random.integers(1, 65)), **cuts)
    masked = np.where(allowed, logits, np.float32(-np.inf))
    chosen = drawn(masked, params, seed)
    assert chosen == sampler(params, seed=seed).choose(logits, mask) and allowed[chosen]


@pytest.mark.parametrize(
    ("cuts", "kept"),
    [({}, [1, 3]), ({"top_k": 2}, [1, 3]), ({"top_p": 0.7}, [1]), ({"min_p": 0.5}, [1])],
)
def test_masked_draws_have_the_distribution_of_what_is_allowed(cuts: dict[str, Any], kept: list[int]) -> None:
    # Tokens 0 and 2 are likelier than what may come: cuts behind the mask keep others than cuts before it.
    logits = np.log(np.array([0.5, 0.12, 0.35, 0.03], np.float32))
    mask = mask_of(1, 3)
    weights = {token: math.exp(float(logits[token])) for token in kept}
    total = sum(weights.values())
    drawn = Counter(
        Sampler(
            SamplingParams(temperature=1.0, **cuts), np.zeros(1 + n % 500, np.int32), seed=n // 500, ends=frozenset()
        ).choose(logits, mask)
        for n in range(20_000)
    )
    assert set(drawn) == set(kept)
    square = sum(
        (drawn[token] - 20_000 * weight / total) ** 2 / (20_000 * weight / total) for token, weight in weights.items()
    )
    # 99.9 % of a chi-squared distribution with one degree of freedom.
    assert square < 10.83
