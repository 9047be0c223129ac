"""Ids of one vocabulary to ids of another."""

from __future__ import annotations

import numpy as np
import pytest

from luce.text.retokenize import Retokenizer
from luce.text.tokenizer import Tokenizer
from tests.support.vocabulary import metadata, nfc

TEXT = "The pass key is 71432.\n\nЁлка, naïve, 漢字! 🎄🎄 <|im_start|>def f(x):\n        return x\n"


def tokenizer(name: str) -> Tokenizer:
    return Tokenizer(metadata(name), nfc=nfc(name))


@pytest.mark.parametrize("known", ["gemma4-e", "qwen35-a", "laguna-a"])
@pytest.mark.parametrize("other", ["qwen3-a", "gemma4-e"])
def test_tokens_lie_where_their_text_does(known: str, other: str) -> None:
    ours, theirs = tokenizer(known), tokenizer(other)
    ids = np.array(ours.encode(TEXT, specials=False), np.int32)
    others, places = Retokenizer(ours, theirs)(ids)
    text = b"".join(ours.token_bytes(int(i)) for i in ids)
    assert b"".join(theirs.token_bytes(int(i)) for i in others) == text
    assert others.dtype == np.int32 and len(others) == len(places) and (np.diff(places) >= 0).all()
    ends = np.cumsum([len(ours.token_bytes(int(i))) for i in ids])
    at = 0
    for token, place in zip(others.tolist(), places.tolist(), strict=True):
        middle = at + len(theirs.token_bytes(token)) / 2
        at += len(theirs.token_bytes(token))
        assert (ends[place - 1] if place else 0) <= middle < ends[place] or middle == ends[-1]


def test_the_same_vocabulary_gives_the_same_tokens() -> None:
    one, other = tokenizer("qwen3-a"), tokenizer("qwen3-a")
    ids = np.array(one.encode(TEXT, specials=False), np.int32)
    others, places = Retokenizer(one, other)(ids)
    assert others.tolist() == ids.tolist() and places.tolist() == list(range(len(ids)))
    assert one.alike(other) and not one.alike(tokenizer("gemma4-e"))


def test_no_text_has_no_tokens() -> None:
    one, other = tokenizer("qwen3-a"), tokenizer("gemma4-e")
    for ids in ([], [one.eos_id] * 3):
        others, places = Retokenizer(one, other)(np.array(ids, np.int32))
        assert len(others) == len(places) == 0
