"""Masks on a device: two steps' masks never share memory that one of them still needs."""

from __future__ import annotations

import numpy as np

from luce.runtime.host import HostDevice
from luce.runtime.step import RowMasks
from luce.shard.device_masks import DeviceMasks


def test_masks_of_many_steps_of_many_sizes() -> None:
    device, random = HostDevice(), np.random.default_rng(0)
    masks = DeviceMasks(device)
    for _ in range(50):
        m, vocab = int(random.integers(1, 9)), int(random.integers(1, 200))
        rows = np.sort(random.permutation(m)[: random.integers(0, m + 1)]).astype(np.int32)
        words = random.integers(0, 2**32, (len(rows), -(-vocab // 32)), dtype=np.uint32)
        logits = random.standard_normal((m, vocab)).astype(np.float32)
        expected = logits.copy()
        for row, mask in zip(rows.tolist(), words, strict=True):
            for token in range(vocab):
                if not int(mask[token // 32]) >> token % 32 & 1:
                    expected[row, token] = -np.inf
        masks.apply(logits, RowMasks(rows, words))
        np.testing.assert_array_equal(logits, expected)
    masks.close()
