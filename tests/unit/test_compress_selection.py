"""Which tokens are kept, against the rules by enumeration."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from luce.compress.selection import (
    CHUNK,
    REACH,
    Keep,
    PromptTokens,
    Selection,
    Spans,
    chunk_scores,
    chunks_to_keep,
    count_tokens,
    gather,
    head_and_tail,
)

SHARES = (0.01, 0.05, 0.1, 0.29, 0.5, 0.7, 0.999, 1.0)


def text(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Tokens without an n-gram that occurs twice, and scores."""
    rng = np.random.default_rng(seed)
    return rng.permutation(n).astype(np.int32), rng.random(n)


def chunks_of(spans: Spans, n: int) -> set[int]:
    kept = np.zeros(n, np.bool_)
    for begin, end in spans:
        kept[begin:end] = True
    found = {chunk for chunk in range(-(-n // CHUNK)) if kept[chunk * CHUNK : (chunk + 1) * CHUNK].all()}
    assert sum(min(CHUNK, n - chunk * CHUNK) for chunk in found) == kept.sum()
    return found


@pytest.mark.parametrize("keep", SHARES)
def test_the_number_of_chunks_is_the_share_rounded_down(keep: float) -> None:
    """In exact arithmetic of the decimal number: 0.29 of 100 are 29, which floats make 28."""
    for chunks in (*range(1, 120), 4096, 8192):
        assert chunks_to_keep(chunks, keep) == max(1, int(chunks * Fraction(str(keep))))
    assert int(100 * 0.29) == 28 and chunks_to_keep(100, 0.29) == 29
    assert chunks_to_keep(10, 1e-12) == 1


def test_both_ends_leave_a_chunk_to_the_scores() -> None:
    assert head_and_tail(33) == (8, 24) and head_and_tail(1000) == (8, 24)
    for kept in range(1, 33):
        head, tail = head_and_tail(kept)
        budget = max(1, kept - 1)
        assert (head, tail) == (8 * budget // 32, budget - 8 * budget // 32)


@pytest.mark.parametrize("keep", SHARES)
@pytest.mark.parametrize("n", [9, 31, 32, 33, 1000, 1024, 4001])
def test_what_is_kept(n: int, keep: float) -> None:
    tokens, scores = text(n)
    selection = Selection(PromptTokens.plain(tokens), scores)
    count = chunks_to_keep(selection.chunks, keep)
    spans = selection.spans(count)
    assert all(begin < end for begin, end in spans)
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(spans)), "merged, ascending"
    kept = chunks_of(spans, n)
    assert len(kept) == count
    if count < selection.chunks:
        head, tail = head_and_tail(count)
        forced = {*range(head), *range(selection.chunks - tail, selection.chunks)}
        means = [scores[chunk * CHUNK : (chunk + 1) * CHUNK].mean() for chunk in range(selection.chunks)]
        best = sorted(set(range(selection.chunks)) - forced, key=lambda chunk: (-means[chunk], chunk))
        assert kept == forced | set(best[: max(0, count - len(forced))])
    else:
        assert spans == ((0, n),)
    assert gather(tokens, spans) == [token for begin, end in spans for token in tokens[begin:end]]
    assert count_tokens(spans) == len(gather(tokens, spans))


def test_of_equal_scores_the_first_chunk_is_kept() -> None:
    tokens, _ = text(3200)
    kept = chunks_of(Selection(PromptTokens.plain(tokens), np.ones(3200)).spans(50), 3200)
    assert kept == {*range(8), *range(76, 100), *range(8, 26)}


def test_a_larger_share_keeps_all_that_a_smaller_one_does_once_the_ends_are_full() -> None:
    tokens, scores = text(6400, 1)
    selection = Selection(PromptTokens.plain(tokens), scores)
    kept = [chunks_of(selection.spans(count), 6400) for count in range(33, 201)]
    assert all(smaller < larger for smaller, larger in itertools.pairwise(kept))


def test_anchors_and_protected_tokens_are_kept_beyond_the_share() -> None:
    tokens, scores = text(6400, 2)
    tokens[3200:3204] = tokens[6380:6384]
    scores[3000:3400] = 0
    protected = np.zeros(6400, np.bool_)
    protected[[1000, 1001, 5000]] = True
    spans = Selection(replace(PromptTokens.plain(tokens), protected=protected), scores).spans(3)
    assert (98 * 32, 103 * 32) in spans
    assert (1000, 1002) in spans and (5000, 5001) in spans


@pytest.mark.parametrize(
    ("ranks", "begin", "end"),
    [
        ({}, 960, 992),
        ({955: 2, 999: 2}, 955, 999),
        ({955: 2, 957: 1, 999: 2, 993: 1}, 955, 999),
        ({955: 2, 957: 2, 999: 2, 993: 2}, 957, 993),
        ({951: 9, 1001: 9}, 960, 992),
        ({960: 1, 992: 1, 965: 9, 985: 9}, 960, 992),
        ({952: 1, 1000: 1}, 952, 1000),
    ],
    ids=["anywhere", "one", "the better", "the nearer", "out of reach", "never inside", "the last in reach"],
)
def test_cuts_move_outwards_to_the_best_place(ranks: dict[int, int], begin: int, end: int) -> None:
    """Chunk 30 is kept, tokens 960 to 992."""
    tokens, scores = text(3200, 5)
    scores[960:992] = 9
    prompt = PromptTokens.plain(tokens)
    for place, rank in ranks.items():
        prompt.cut_ranks[place] = rank
    assert REACH == 8 and (begin, end) in Selection(prompt, scores).spans(3)


def test_cuts_stay_inside_the_text_and_merge_spans() -> None:
    tokens, scores = text(320, 6)
    prompt = PromptTokens.plain(tokens)
    scores[:32] = 9
    # One chunk is left to the scores, the last one is the tail; both grow to their limit.
    prompt.cut_ranks[40] = prompt.cut_ranks[288 - 8] = 1
    assert Selection(prompt, scores).spans(2) == ((0, 40), (280, 320))
    prompt.protected[[45, 55]] = True
    prompt.cut_ranks[50] = 2
    assert Selection(prompt, scores).spans(2) == ((0, 56), (280, 320))


def test_short_texts_stay_whole() -> None:
    for n in range(1, 9):
        tokens, scores = text(n)
        assert Selection(PromptTokens.plain(tokens), scores).spans(1) == ((0, n),)
    assert Selection(PromptTokens.plain(np.empty(0, np.int32)), np.empty(0)).spans(1) == ()


def test_the_last_chunk_counts_its_own_tokens() -> None:
    scores = np.concatenate([np.full(32, 1.0), np.full(3, 5.0)])
    assert chunk_scores(scores).tolist() == [1.0, 5.0]


@pytest.mark.parametrize("most", [64, 96, 500, 3000])
def test_the_largest_selection_that_fits(most: int) -> None:
    tokens, scores = text(3200, 3)
    selection = Selection(PromptTokens.plain(tokens), scores)
    spans = selection.largest(most)
    assert count_tokens(spans) == most // CHUNK * CHUNK
    protected = np.arange(3200) % 2 == 0
    assert count_tokens(
        Selection(replace(PromptTokens.plain(tokens), protected=protected), scores).largest(most)
    ) >= min(most, 1600)


def test_anchors_go_where_they_do_not_fit() -> None:
    tokens, scores = text(3200, 4)
    for chunk in range(10, 60, 7):
        tokens[chunk * CHUNK : chunk * CHUNK + 4] = tokens[-4:]
    selection = Selection(PromptTokens.plain(tokens), scores)
    assert count_tokens(selection.spans(1)) > 1000
    assert count_tokens(selection.largest(1000)) == 992
    assert count_tokens(selection.largest(2000)) == 1984 and count_tokens(selection.spans(1)) < 2000


@pytest.mark.parametrize("share", [1e-9, 0.1, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("n", [40, 3200, 3217])
def test_a_share_of_the_scores_takes_the_fewest_chunks(n: int, share: float) -> None:
    """By trying every number of chunks, with the sums of the tokens' scores."""
    tokens, scores = text(n, seed=n)
    scores **= 8
    selection = Selection(PromptTokens.plain(tokens), scores)

    def covered(count: int) -> float:
        return sum(float(scores[begin:end].sum()) for begin, end in selection.spans(count)) / float(scores.sum())

    found = selection.count(Keep(share, mass=True))
    assert covered(found) >= share - 1e-12
    assert all(covered(count) < share for count in range(1, found))
    for most in (0.01, 0.3, 1.0):
        assert selection.count(Keep(share, mass=True, most=most)) == min(found, chunks_to_keep(selection.chunks, most))


def test_few_tokens_with_all_of_the_attention_are_enough() -> None:
    tokens, scores = text(6400)[0], np.zeros(6400)
    scores[3000:3010] = 1
    selection = Selection(PromptTokens.plain(tokens), scores)
    count = selection.count(Keep(0.99, mass=True))
    # Head and tail, and the two chunks that hold them.
    assert count == 8 + 24 + 2 and {93, 94} <= chunks_of(selection.spans(count), 6400)
    assert selection.count(Keep(0.5)) == 100


def test_no_attention_at_all_keeps_one_chunk() -> None:
    assert Selection(PromptTokens.plain(text(640)[0]), np.zeros(640)).count(Keep(0.9, mass=True)) == 1


def test_the_covered_share_is_that_of_the_kept_tokens() -> None:
    tokens, scores = text(1000)
    selection = Selection(PromptTokens.plain(tokens), scores)
    spans = selection.spans(6)
    inside = [position for begin, end in spans for position in range(begin, end)]
    assert selection.covered(spans) == pytest.approx(scores[inside].sum() / scores.sum(), rel=1e-12)
    assert selection.covered(((0, 1000),)) == pytest.approx(1)
    assert Selection(PromptTokens.plain(tokens), np.zeros(1000)).covered(spans) == 1
