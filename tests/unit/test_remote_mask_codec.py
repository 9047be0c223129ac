"""Masks in messages: every mask arrives as it was sent, in few bytes, and nothing else is taken."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from luce.errors import BackendError
from luce.remote.mask_codec import ALLOWED, FORBIDDEN, REMEMBERED, WORDS, MaskDecoder, MaskEncoder, WireMasks
from luce.runtime.step import RowMasks

VOCAB = 10_013


def mask(seed: int, share: float, vocab: int = VOCAB) -> NDArray[np.uint32]:
    random = np.random.default_rng(seed)
    words = np.zeros(-(-vocab // 32), np.uint32)
    for token in np.flatnonzero(random.random(vocab) < share).tolist():
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


@dataclass
class Wire:
    """Both ends, with the messages between them."""

    encoder: MaskEncoder
    decoder: MaskDecoder

    def send(self, *words: NDArray[np.uint32]) -> WireMasks:
        rows = np.arange(1, 2 * len(words), 2, dtype=np.int32)
        message = self.encoder.encode(RowMasks(rows, np.array(words, np.uint32).reshape(len(words), -1)), VOCAB)
        found = self.decoder.decode(message, 2 * len(words) + 1)
        np.testing.assert_array_equal(found.rows, rows)
        np.testing.assert_array_equal(found.words, np.array(words).reshape(len(words), -1))
        return message


def wire() -> Wire:
    return Wire(MaskEncoder(), MaskDecoder(VOCAB))


def test_each_form_is_the_shortest_there_is() -> None:
    ends = wire()
    message = ends.send(mask(1, 0.01), mask(2, 0.99), mask(3, 0.5), mask(3, 0.5), mask(4, 0.0), mask(5, 1.1))
    assert message.forms.tolist() == [ALLOWED, FORBIDDEN, WORDS, REMEMBERED, ALLOWED, FORBIDDEN]
    assert message.counts.tolist()[2:] == [len(mask(3, 0.5)), 1, 0, 0]
    again = ends.send(mask(3, 0.5))
    assert again.forms.tolist() == [REMEMBERED] and again.data.nbytes == 4


@given(st.lists(st.tuples(st.integers(0, 90), st.sampled_from([0.1, 0.5, 0.9])), max_size=200))
def test_any_sequence_of_masks_arrives(sent: list[tuple[int, float]]) -> None:
    ends = wire()
    for seed, share in sent:
        ends.send(mask(seed, share))


def test_more_masks_than_both_sides_remember() -> None:
    ends = wire()
    for _ in range(2):
        for seed in range(70):
            assert ends.send(mask(seed, 0.5)).forms.tolist() == [WORDS]
    assert ends.send(mask(69, 0.5)).forms.tolist() == [REMEMBERED]


def test_no_masks() -> None:
    found = MaskDecoder(VOCAB).decode(
        MaskEncoder().encode(RowMasks(np.empty(0, np.int32), np.empty((0, 313), np.uint32)), VOCAB), 3
    )
    assert len(found.rows) == len(found.words) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"rows": np.array([0, 0], np.int32)},
        {"rows": np.array([1, 0], np.int32)},
        {"rows": np.array([-1, 0], np.int32)},
        {"rows": np.array([0, 5], np.int32)},
        {"rows": np.array([[0, 1]], np.int32)},
        {"rows": np.array([0], np.int32)},
        {"rows": np.array([0, 1], np.int64)},
        {"forms": np.array([0, 9], np.uint8)},
        {"forms": np.array([0, WORDS], np.uint8)},
        {"forms": np.array([0, REMEMBERED], np.uint8)},
        {"forms": np.array([0], np.uint8)},
        {"counts": np.array([2, -1], np.int32)},
        {"counts": np.array([1, 1], np.int32)},
        {"data": np.array([1, VOCAB, 3], np.int32)},
        {"data": np.array([1, -1, 3], np.int32)},
        {"data": np.array([1.0, 2.0, 3.0], np.float32)},
    ],
)
def test_what_is_no_mask_is_refused(change: dict[str, NDArray[np.generic]]) -> None:
    good = WireMasks(
        np.array([0, 1], np.int32),
        np.array([ALLOWED, FORBIDDEN], np.uint8),
        np.array([2, 1], np.int32),
        np.arange(3, dtype=np.int32),
    )
    MaskDecoder(VOCAB).decode(good, 5)
    with pytest.raises(BackendError):
        MaskDecoder(VOCAB).decode(msgspec.structs.replace(good, **change), 5)
