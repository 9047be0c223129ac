"""Checks of masks, of argmax and of the best candidates on any device."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from luce.ops.sample import argmax, argmax_logsumexp, mask_logits, top_k_keys, unpack_candidates
from luce.runtime.device import Device
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
