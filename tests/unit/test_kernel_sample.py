"""kernels/sample.cu on the emulated device."""

from __future__ import annotations

import numpy as np
import pytest

from luce.ops.sample import argmax
from luce.runtime.device import Device
from tests.support.op_checks_sample import check_argmax


@pytest.mark.parametrize("vocab", [1, 2, 31, 257, 4096, 4097, 9000])
def test_argmax(emulated: Device, vocab: int) -> None:
    check_argmax(emulated, vocab)


def test_argmax_of_no_rows(emulated: Device) -> None:
    assert argmax(emulated, emulated.zeros((0, 5000))).shape == (0,)


def test_argmax_of_a_real_vocabulary(emulated: Device) -> None:
    logits = np.zeros((1, 248320), np.float32)
    logits[0, [248319, 99999]] = 1
    assert emulated.download(argmax(emulated, emulated.upload(logits))).tolist() == [99999]
