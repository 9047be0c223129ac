"""The kernel that measures reads (luce.bench.limits) reads every word once."""

from __future__ import annotations

import numpy as np
import pytest

from luce.bench.limits import read_all
from tests.support.emulated import EmulatedDevice


@pytest.mark.parametrize("words", [4, 4 * 1000, 4 * 5000 + 4])
def test_every_word_is_read(emulated: EmulatedDevice, words: int) -> None:
    data = np.random.default_rng(words).integers(0, 1 << 32, words, np.uint32)
    found = emulated.empty(512, np.uint32)
    read_all(emulated, emulated.upload(data), found)
    assert np.bitwise_xor.reduce(emulated.download(found)) == np.bitwise_xor.reduce(data)
