"""kernels/sample.cu, kernels/top_k.cu and kernels/argmax_logsumexp.cu on the emulated device."""

from __future__ import annotations

import numpy as np
import pytest

from luce.ops.sample import argmax, top_k_keys, unpack_candidates
from luce.runtime.device import Device
from tests.support.op_checks_sample import check_argmax, check_argmax_logsumexp, check_top


@pytest.mark.parametrize(("vocab", "scale", "softcap"), [(1, 1, 0), (300, 0.5, 0), (4097, 1, 30), (9000, 2, 0)])
def test_argmax_logsumexp(emulated: Device, vocab: int, scale: float, softcap: float) -> None:
    check_argmax_logsumexp(emulated, vocab, scale, softcap)


@pytest.mark.parametrize("vocab", [1, 2, 31, 257, 4096, 4097, 9000])
def test_argmax(emulated: Device, vocab: int) -> None:
    check_argmax(emulated, vocab)


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 4096, 4099, 9000])
def test_top(emulated: Device, vocab: int) -> None:
    check_top(emulated, vocab)


def test_top_of_more_parts_than_a_block_takes(emulated: Device) -> None:
    # 65 parts leave 4160 keys for a second round, and two parts of these for a third.
    logits = (np.arange(65 * 4096)[None] * 7919 % 266239).astype(np.float32)
    found = unpack_candidates(emulated.download(top_k_keys(emulated, emulated.upload(logits))))
    assert found.ids[0].tolist() == np.lexsort((np.arange(logits.size), -logits[0]))[:64].tolist()


def test_top_of_no_rows(emulated: Device) -> None:
    assert top_k_keys(emulated, emulated.zeros((0, 5000))).shape == (0, 64)


def test_argmax_of_no_rows(emulated: Device) -> None:
    assert argmax(emulated, emulated.zeros((0, 5000))).shape == (0,)


def test_argmax_of_a_real_vocabulary(emulated: Device) -> None:
    logits = np.zeros((1, 248320), np.float32)
    logits[0, [248319, 99999]] = 1
    assert emulated.download(argmax(emulated, emulated.upload(logits))).tolist() == [99999]
