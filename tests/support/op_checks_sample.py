"""Checks of masks, of argmax and of the best candidates on any device."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from luce.ops.draw import draw_among, draw_tokens, uniform, with_drawn
from luce.ops.sample import argmax, argmax_logsumexp, mask_logits, top_k_keys, unpack_candidates
from luce.runtime.device import Device
from luce.runtime.draws import Draw, RowDraws
from luce.runtime.host import HostDevice
from luce.runtime.step import MAX_CANDIDATES


def first_best(row: NDArray[np.float32]) -> int:
    """The definition: a scan that takes a larger number, or a number after NaN."""
    best = 0
    for index, value in enumerate(row.tolist()):
        if not math.isnan(value) and (math.isnan(row[best]) or value > row[best]):
            best = index
    return best


def rows_of_interest(vocab: int) -> NDArray[np.float32]:
    """Random rows, ties near and far, NaN and infinities in all combinations that fit."""
    rng = np.random.default_rng(vocab)
    rows = [rng.standard_normal(vocab), np.zeros(vocab), np.full(vocab, -np.inf), np.full(vocab, np.nan)]
    for fill in (np.nan, -np.inf, -1.0):
        row = np.full(vocab, fill)
        row[vocab // 2 :: max(1, vocab // 5)] = -2.0
        rows.append(row)
        row = np.full(vocab, fill)
        row[-1] = -np.inf
        rows.append(row)
    ties = rng.integers(0, 3, vocab).astype(float)
    rows.append(ties)
    nans = rng.standard_normal(vocab)
    nans[rng.random(vocab) < 0.5] = np.nan
    nans[0] = np.nan
    rows.append(nans)
    infinite = rng.standard_normal(vocab)
    infinite[vocab // 3] = infinite[-1] = np.inf
    rows.append(infinite)
    return np.stack(rows).astype(np.float32)


def check_argmax(device: Device, vocab: int) -> None:
    """Every row's index, as rows of their own and as a slice of a wider matrix."""
    logits = rows_of_interest(vocab)
    expected = [first_best(row) for row in logits]
    ids = argmax(device, device.upload(logits))
    assert ids.dtype == np.int32
    assert device.download(ids).tolist() == expected
    wide = np.full((len(logits), vocab + 7), np.inf, np.float32)
    wide[:, 2 : 2 + vocab] = logits
    assert device.download(argmax(device, device.upload(wide)[:, 2 : 2 + vocab])).tolist() == expected


def check_top_k(device: Device, vocab: int) -> None:
    """Every row's candidates in order, as rows of their own and as a slice of a wider matrix."""
    logits = rows_of_interest(vocab)
    found = unpack_candidates(device.download(top_k_keys(device, device.upload(logits))))
    count = min(vocab, MAX_CANDIDATES)
    for row, ids, values in zip(logits, found.ids, found.logits, strict=True):
        # NaN first, then the largest number, then the lowest index.
        expected = np.lexsort((np.arange(vocab), -np.nan_to_num(row, nan=np.inf), ~np.isnan(row)))[:count]
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_array_equal(values, row[expected])
    wide = np.full((len(logits), vocab + 7), np.inf, np.float32)
    wide[:, 2 : 2 + vocab] = logits
    again = unpack_candidates(device.download(top_k_keys(device, device.upload(wide)[:, 2 : 2 + vocab])))
    np.testing.assert_array_equal(again.ids, found.ids)


def check_argmax_logsumexp(device: Device, vocab: int, scale: float, softcap: float) -> None:
    """Norms against float64, far from zero on both sides, with banned tokens; ids and logits also of ties, NaN and
    infinities; as rows of their own and as a slice of a wider matrix."""
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((5, vocab)) * 8).astype(np.float32)
    logits[1] += 200
    logits[2] -= 200
    logits[3, : vocab // 2] = -np.inf
    logits[4] = 7
    values = logits.astype(np.float64) * scale
    values = softcap * np.tanh(values / softcap) if softcap else values
    expected = np.logaddexp.reduce(values, axis=1)
    logits = np.concatenate([logits, rows_of_interest(vocab)])
    best = [first_best(row) for row in logits]
    wide = np.full((len(logits), vocab + 3), np.nan, np.float32)
    wide[:, 1 : 1 + vocab] = logits
    for rows in (device.upload(logits), device.upload(wide)[:, 1 : 1 + vocab]):
        ids, bits, norms = device.download(argmax_logsumexp(device, rows, scale, softcap))
        assert ids.tolist() == best
        np.testing.assert_array_equal(bits.view(np.float32), logits[np.arange(len(logits)), best])
        np.testing.assert_allclose(norms[:5].view(np.float32), expected, rtol=2e-6)


def check_mask_logits(device: Device, vocab: int, words: int) -> None:
    """Some rows of a matrix, as rows of their own and as a slice of a wider one: masked tokens are -inf, also NaN and
    infinite ones and those behind the last word; every other bit of the memory stays as it was. What is chosen then is
    what is chosen of logits that were masked on the host."""
    rng = np.random.default_rng(vocab + words)
    logits = rows_of_interest(vocab)
    rows = rng.permutation(len(logits))[:-2].astype(np.int32)
    masks = rng.integers(0, 2**32, (len(rows), words), dtype=np.uint32)
    masks[0], masks[1] = 0, 0xFFFFFFFF
    masks[2] = 0
    masks[2, words // 2] = 1 << 31
    expected = logits.copy()
    for row, mask in zip(rows, masks, strict=True):
        for token in range(vocab):
            word = int(mask[token // 32]) if token < 32 * words else 0
            if not word >> token % 32 & 1:
                expected[row, token] = -np.inf
    wide = rng.standard_normal((len(logits), vocab + 7)).astype(np.float32)
    around = wide.copy()
    wide[:, 2 : 2 + vocab] = logits
    around[:, 2 : 2 + vocab] = expected
    for given, at, wanted in ((logits.copy(), 0, expected), (wide, 2, around)):
        memory = device.upload(given)
        view = memory[:, at : at + vocab]
        mask_logits(device, view, device.upload(rows), device.upload(masks))
        found = device.download(memory)
        np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))
        assert device.download(argmax(device, view)).tolist() == [first_best(row) for row in expected]
        keys = device.download(top_k_keys(device, view))
        masked_on_host = top_k_keys(HostDevice(), expected)
        np.testing.assert_array_equal(keys, masked_on_host)


#: draws of seven replies, and a row that is not drawn
DRAWS = [
    Draw(0, 1.0, 64),
    Draw(2**64 - 1, 0.7, 40, 0.95),
    None,
    Draw(7, 1.3, 5, 0.6, 0.05),
    Draw(1 << 40, 0.2, 64, 0.999, 0.0),
    Draw(12345, 2.0, 1),
    Draw(99, 5.0, 64, 1.0, 0.3),
    Draw(3, 1e-30, 64),
]


def mixed(bits: int) -> int:
    """SplitMix64's output function, as its paper has it."""
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return bits ^ bits >> 31


def drawn_token(logits: NDArray[np.float32], draw: Draw, position: int) -> int:
    """The definition: the largest of log p + Gumbel noise among the tokens that top-k, top-p and min-p keep."""
    order = np.lexsort((np.arange(len(logits)), -logits))[: draw.top_k]
    p = np.exp((logits[order].astype(np.longdouble) - logits[order[0]]) / draw.temperature)
    p /= p.sum()
    before = np.cumsum(p) - p
    kept = (p > 0) & (before < draw.top_p) & (p >= draw.min_p * p[0])
    golden = 0x9E3779B97F4A7C15
    begin = mixed((mixed(draw.seed) + position * golden) % 2**64)
    bits = [mixed((begin + (int(token) + 1) * golden) % 2**64) >> 12 for token in order]
    noise = -np.log(-np.log((np.array(bits, np.longdouble) + 0.5) / 2**52))
    with np.errstate(divide="ignore"):
        scores = np.where(kept, np.log(p) + noise, -np.inf)
    return int(order[scores.argmax()])


def check_draw(device: Device, vocab: int) -> None:
    """Tokens as the definition and as the host draw them, at many positions; no other row's id changes."""
    found = set()
    for seed in range(6):
        logits = (np.random.default_rng(seed).standard_normal((len(DRAWS), vocab)) * (seed + 1)).astype(np.float32)
        if seed % 2:
            # Where a grammar leaves few tokens.
            logits[:, vocab // 8 + 1 :] = -np.inf
        positions = np.array([0, 1, 2, 17, 300, 70000, 1 << 20, 1 << 30], np.int32) + np.int32(seed)
        drawn = check_drawn(device, logits, positions, RowDraws.of(DRAWS))
        rows = [(row, draw, at) for row, draw, at in zip(logits, DRAWS, positions.tolist(), strict=True) if draw]
        assert drawn == [drawn_token(*own) for own in rows]
        found |= {int((row > row[token]).sum()) for token, (row, _, _) in zip(drawn, rows, strict=True)}
    # Not the likeliest ones alone.
    assert len(found) >= min(vocab, 5)


def check_drawn(
    device: Device, logits: NDArray[np.float32], positions: NDArray[np.int32], draws: RowDraws
) -> list[int]:
    """As draw_among has it, in place and apart. Returns what was drawn."""
    rows = np.flatnonzero(draws.drawn)
    keys = top_k_keys(device, device.upload(logits[rows]))
    best = unpack_candidates(device.download(keys))
    expected = draw_among(best.ids, best.logits, draws[rows], positions[rows])
    before = np.arange(len(logits), dtype=np.int32) + 10**6
    ids = device.upload(before)
    drawn = draw_tokens(device, keys, draws, positions, ids)
    assert drawn.dtype == np.int32 and device.download(drawn).tolist() == expected.tolist()
    before[rows[expected >= 0]] = expected[expected >= 0]
    assert device.download(ids).tolist() == before.tolist()
    # A device may still read the ids.
    joined = with_drawn(before, draws, np.full(len(rows), -1, np.int32))
    assert (joined[rows] == -1).all() and (before >= 0).all()
    tokens: list[int] = expected.tolist()
    return tokens


def check_near_draws(device: Device) -> None:
    """Two tokens whose masses, of float32 logits, make up for their noise almost exactly: in other bits of exp, log or
    temperature the other token would be drawn."""
    temperature, ids, count = 5.3, np.arange(2), 1 << 19
    positions = np.arange(count, dtype=np.int32)
    noise = -np.log(uniform(np.full((count, 1), 8, np.uint64), positions[:, None], ids))
    lead = temperature * np.log(noise[:, 0] / noise[:, 1])
    logits = np.zeros((count, 2), np.float32)
    logits[positions, (lead < 0).astype(np.intp)] = np.abs(lead)
    gaps = logits[:, 0].astype(np.float64) - logits[:, 1] - lead
    order = np.argsort(np.abs(gaps))
    # Nearer ones, where the series of exp and log decide, and nearly as near ones, where they do not.
    farther = np.searchsorted(np.abs(gaps[order]), 1e-9)
    chosen = order[np.r_[:200, farther : farther + 200]]
    assert np.abs(gaps[chosen]).max() < 2e-9
    drawn = check_drawn(device, logits[chosen], positions[chosen], RowDraws.of([Draw(8, temperature, 64)] * 400))
    assert drawn[200:] == (gaps[chosen[200:]] < 0).tolist()


def check_draw_of_no_rows(device: Device) -> None:
    """No row is drawn: all ids stay."""
    ids = device.upload(np.array([3, 4], np.int32))
    keys = top_k_keys(device, device.zeros((0, 70)))
    assert draw_tokens(device, keys, RowDraws.of([None, None]), np.zeros(2, np.int32), ids).shape == (0,)
    assert device.download(ids).tolist() == [3, 4]


def check_draw_of_no_numbers(device: Device) -> None:
    """A row whose largest logit is not finite has no token, and the next step gets the id that it had."""
    logits = np.zeros((5, 200), np.float32)
    logits[0, 3], logits[1, 7], logits[2] = np.nan, np.inf, -np.inf
    draws = RowDraws.of([Draw(1, 1.0, 40)] * 5)
    check_drawn(device, logits, np.arange(5, dtype=np.int32), draws)
    ids = device.upload(np.full(5, 9, np.int32))
    keys = top_k_keys(device, device.upload(logits))
    drawn = device.download(draw_tokens(device, keys, draws, np.arange(5, dtype=np.int32), ids)).tolist()
    assert drawn[:3] == [-1] * 3 and min(drawn[3:]) >= 0
    assert device.download(ids).tolist() == [9, 9, 9, *drawn[3:]]
