"""Texts in pieces have the ids of the whole text, whatever the pre-tokenizer and wherever a window ends."""

from __future__ import annotations

import functools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from luce.errors import ContextError, RequestError
from luce.text.prompt_limit import PromptLimit
from luce.text.tokenizer import Tokenizer
from tests.support.vocabulary import NAMES, byte_level, metadata, nfc, sentencepiece, spelling

PRES = ("default", "gpt-2", "smollm", "qwen2", "qwen35", "llama-bpe", "laguna")
ALPHABET = "aeinsS 'N0159.,!?\"\n\r\t\v\x85\xa0\u3000éÀßж\u05b0नम日本語가각ᄀ\u1161\u11a8½²ª\u0301\u0323\u200d🙂”"
#: runs that are longer than a window, which cannot be cut between words
RUNS = ["a" * 90, "ab" * 50, "1" * 90, "7 " * 40, "!" * 90, "'s" * 40, " " * 90, "\n" * 90, " \n" * 45, "\r\n" * 40]
RUNS += [
    "!" + "\n" * 80,
    "!\n" + " " * 80 + "\n",
    "\n\n" + " " * 80,
    "日本" * 40,
    "e\u0301" * 40,
    "\u0301" * 70,
    "각" * 60,
]
RUNS += ["ᄀ\u1161\u11a8" * 30, "🙂" * 60, "\n" + " " * 70 + "\n" + " " * 70 + "x", "\t" * 70, "!" * 60 + "'s"]
TEXT = st.lists(st.text(ALPHABET, max_size=40) | st.sampled_from(RUNS), max_size=8).map("".join)
WINDOW = 48


@functools.cache
def pairs(pre: str) -> dict[str, object]:
    """A vocabulary in which any two bytes of ALPHABET merge, and many pairs of these."""
    used = [spelling()[byte] for byte in sorted(set(ALPHABET.encode()))]
    two = [f"{left} {right}" for left in used for right in used]
    draw = random.Random(7)
    draw.shuffle(two)
    known = [merge.replace(" ", "") for merge in two]
    four = {f"{draw.choice(known)} {draw.choice(known)}" for _ in range(3000)} | {"aa aa", "ĠĠ ĠĠ", "ĊĊ ĊĊ"}
    return byte_level((*two, *sorted(four))) | {"tokenizer.ggml.pre": pre}


def same(keys: dict[str, object], *, composes: bool = False, text: st.SearchStrategy[str] = TEXT) -> None:
    whole, pieces = Tokenizer(keys, nfc=composes, window=1 << 20), Tokenizer(keys, nfc=composes, window=WINDOW)

    @settings(max_examples=400, suppress_health_check=list(HealthCheck), deadline=None)
    @given(text)
    def check(text: str) -> None:
        assert pieces.encode(text, specials=True) == whole.encode(text, specials=True)

    check()


@pytest.mark.parametrize("composes", [False, True])
@pytest.mark.parametrize("pre", PRES)
def test_all_pre_tokenizers(pre: str, composes: bool) -> None:
    same(pairs(pre), composes=composes)


@pytest.mark.parametrize("name", NAMES)
def test_reference_vocabularies(name: str) -> None:
    same(metadata(name), composes=nfc(name))


@pytest.mark.parametrize("prefix", [False, True])
def test_texts_that_are_one_word(prefix: bool) -> None:
    words = ["▁", "a", "b", "é", "日", "▁a", "ab", "ba", "aa", "bab", "▁ab", "aab", "▁▁", "▁▁▁", "éa", "abab", "日a"]
    keys = sentencepiece({word: -float(i) for i, word in enumerate(words)}, control=("<s>",), add_space_prefix=prefix)
    text = st.lists(st.text("ab é日\n€", max_size=60) | st.sampled_from([*RUNS, "<s>"]), max_size=8).map("".join)
    same(keys, text=text)


def test_special_tokens_across_windows() -> None:
    keys = byte_level(control=("<|end|>", "<|end|>x", "<|e"), visible=("<think>", "<think><think>"))
    pieces = ["<|end|>", "<|e", "x", "<think>", "<", "|", "end|>", "think>", "a" * 30, "\ud800", "é"]
    same(keys, text=st.lists(st.sampled_from(pieces), max_size=60).map("".join))


@pytest.mark.parametrize("run", ["a", "7", " ", "日", "word "])
def test_reading_stops_between_windows(run: str) -> None:
    tokenizer = Tokenizer(pairs("qwen2"), window=WINDOW)
    asked = []

    def stopped() -> bool:
        asked.append(None)
        return len(asked) > 5

    with pytest.raises(RequestError, match="the client has left"):
        tokenizer.encode(run * 5000, specials=True, limit=PromptLimit(None, stopped))
    assert len(asked) == 6
    with pytest.raises(ContextError, match="at least"):
        tokenizer.encode(run * 200_000, specials=True, limit=PromptLimit(100))


@pytest.mark.parametrize("text", ["7" * 400_000, "word " * 200_000, "x" * 1_000_000, "é" * 1_000_000])
def test_a_text_that_is_too_long_is_refused_by_its_size(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(byte_level(("a b", "1 2"), control=("<|end|>",)), nfc=True)
    monkeypatch.setattr(Tokenizer, "encode", None)
    with pytest.raises(ContextError, match="at least"):
        tokenizer.refuse_long(text, PromptLimit(100))
    tokenizer.refuse_long(text, PromptLimit(1_000_000))


@given(st.text(ALPHABET))
def test_the_lower_bound_is_one(text: str) -> None:
    for name in NAMES[:3]:
        tokenizer, tokens = reference(name), []
        limit = PromptLimit(None, lambda: False)
        tokens = tokenizer.encode(text, specials=True)
        # A limit of the excess below the length must let the text pass.
        tokenizer.refuse_long(text, PromptLimit(len(tokens) - 32768, limit.stopped))


@functools.cache
def reference(name: str) -> Tokenizer:
    return Tokenizer(metadata(name), nfc=nfc(name))
