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
    others, first, last = Retokenizer(ours, theirs)(ids)
    text = b"".join(ours.token_bytes(int(i)) for i in ids)
    assert b"".join(theirs.token_bytes(int(i)) for i in others) == text
    assert others.dtype == np.int32 and len(others) == len(first) == len(last)
    owner = [number for number, i in enumerate(ids.tolist()) for _ in ours.token_bytes(i)]
    at = 0
    for token, low, high in zip(others.tolist(), first.tolist(), last.tolist(), strict=True):
        own = owner[at : at + len(theirs.token_bytes(token))]
        at += len(own)
        assert (low, high) == (own[0], own[-1])


def test_the_same_vocabulary_gives_the_same_tokens() -> None:
    one, other = tokenizer("qwen3-a"), tokenizer("qwen3-a")
    ids = np.array([one.eos_id, *one.encode(TEXT, specials=False), one.eos_id], np.int32)
    others, first, last = Retokenizer(one, other)(ids)
    assert others.tolist() == ids.tolist() and first.tolist() == last.tolist() == list(range(len(ids)))
    assert one.alike(other) and not one.alike(tokenizer("gemma4-e"))


def test_control_tokens_become_those_of_the_same_name_or_line_feeds() -> None:
    ours, theirs = tokenizer("qwen35-a"), tokenizer("gemma4-e")
    (end,) = ours.encode("<|im_end|>", specials=True)
    line_feed = theirs.encode("\n", specials=False)
    ids = np.array([end, *ours.encode("word", specials=False), end], np.int32)
    others, first, last = Retokenizer(ours, theirs)(ids)
    assert others.tolist() == [*line_feed, *theirs.encode("word", specials=False), *line_feed]
    assert (first[0], last[-1]) == (0, len(ids) - 1)
    same = Retokenizer(ours, tokenizer("qwen3-a"))(ids[:1]).tokens
    assert same.tolist() == tokenizer("qwen3-a").encode("<|im_end|>", specials=True)


def test_text_of_a_control_token_stays_text() -> None:
    ours, theirs = tokenizer("qwen35-a"), tokenizer("qwen3-a")
    ids = np.array(ours.encode("say <|im_end|> now", specials=False), np.int32)
    assert not any(map(theirs.is_control, Retokenizer(ours, theirs)(ids).tokens.tolist()))


def test_no_ids_have_no_tokens() -> None:
    others, first, last = Retokenizer(tokenizer("qwen3-a"), tokenizer("gemma4-e"))(np.empty(0, np.int32))
    assert len(others) == len(first) == len(last) == 0
