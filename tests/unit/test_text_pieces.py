"""Texts in pieces have the ids of the whole text, whatever the pre-tokenizer and wherever a window ends."""

from __future__ import annotations

import functools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from luce.errors import ContextError, RequestError
from luce.text.pieces import moves
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
    "\n\n" + " " * 80 + "\r",
    "\n\n" + " " * 80 + "\r\n",
    "日本" * 40,
    "e\u0301" * 40,
    "\u0301" * 70,
    "각" * 60,
]
RUNS += ["ᄀ\u1161\u11a8" * 30, "🙂" * 60, "\n" + " " * 70 + "\n" + " " * 70 + "x", "\t" * 70, "!" * 60 + "'s"]
#: marks out of order, vowels and consonants of Hangul, letters that compose though none is a mark, and such that NFC
#: takes apart
COMPOSING = [
    "\u0301\u0323",
    "q\u0301\u0323",
    "\u0344\u0345\u0323",
    "x\u0f73\u0f71",
    "\u0f73\u0f71",
    "ᄀ\u1161\u11a8",
    "ᄀᄂ\u1161",
]
COMPOSING += [
    "\u11a8\u1161ᄀ",
    "가\u11a8",
    "か\u3099",
    "\u0958",
    "\u09c7\u09be",
    "\u1025\u102e",
    "\u0cc6\u0cc2\u0cd5",
    "\ufb1d\u05b0",
]
COMPOSING += ["\U0001d15e", "\U00011099\U000110ba", "\U000114b9\U000114ba", "\u2126\u0301"]
TEXT = st.lists(st.text(ALPHABET, max_size=40) | st.sampled_from(RUNS), max_size=8).map("".join)
WINDOW = 48


@functools.cache
def merging(pre: str) -> dict[str, object]:
    """A vocabulary in which any two bytes of ALPHABET merge, and many pairs of these."""
    used = [spelling()[byte] for byte in sorted(set(ALPHABET.encode()))]
    two = [f"{left} {right}" for left in used for right in used]
    draw = random.Random(7)
    draw.shuffle(two)
    known = [merge.replace(" ", "") for merge in two]
    four = {f"{draw.choice(known)} {draw.choice(known)}" for _ in range(3000)} | {"aa aa", "ĠĠ ĠĠ", "ĊĊ ĊĊ"}
    return byte_level((*two, *sorted(four))) | {"tokenizer.ggml.pre": pre}


Pair = tuple[Tokenizer, Tokenizer]


def pair(keys: dict[str, object], *, composes: bool = False) -> Pair:
    """A tokenizer that reads a text as a whole, and one that reads it in pieces."""
    return Tokenizer(keys, nfc=composes, window=1 << 20), Tokenizer(keys, nfc=composes, window=WINDOW)


def same(pairs: dict[str, Pair], text: st.SearchStrategy[str] = TEXT) -> None:
    """Both of each pair have the same ids for 400 texts: drawing these takes longer than reading them."""

    @settings(max_examples=400, suppress_health_check=list(HealthCheck), deadline=None)
    @given(text)
    def check(text: str) -> None:
        for name, (whole, pieces) in pairs.items():
            assert pieces.encode(text, specials=True) == whole.encode(text, specials=True), name

    check()


@pytest.mark.parametrize("composes", [False, True])
def test_all_pre_tokenizers(composes: bool) -> None:
    same({pre: pair(merging(pre), composes=composes) for pre in PRES})


@pytest.mark.parametrize("pre", ["qwen35", "gpt-2"])
@pytest.mark.parametrize("lead", ["x", "日", "q\u0323"])
@pytest.mark.parametrize("run", COMPOSING)
def test_characters_that_compose(run: str, lead: str, pre: str) -> None:
    # Without merges: the first token behind a wrong cut is the right one, as two marks begin with the same byte.
    keys = byte_level() | {"tokenizer.ggml.pre": pre}
    whole, pieces = pair(keys, composes=True)
    for length in range(WINDOW + 4):
        text = lead * length + run * 30
        assert pieces.encode(text, specials=True) == whole.encode(text, specials=True), length


def test_a_mark_far_behind_a_cut_composes_with_the_character_there() -> None:
    # The dot goes below the last b, whose first byte the a before it then merges with.
    whole, pieces = pair(merging("qwen35"), composes=True)
    for marks in range(100):
        text = "ab" * 50 + "\u0301" * marks + "\u0323"
        assert pieces.encode(text, specials=True) == whole.encode(text, specials=True), marks


def test_python_knows_the_characters_that_composing_moves() -> None:
    # U+0323 composes with the `a` past a character of another combining class, and not past a starter.
    starters = [char for char in map(chr, range(0x300, 0x20000)) if not "\ud800" <= char < "\ue000" and not moves(char)]
    composed = normalizers.NFC().normalize_str("".join(f"\na{char}\u0323" for char in starters))
    assert not [line for line in composed.split("\n")[1:] if not line.startswith("a")]


@pytest.mark.parametrize("pre", PRES)
@pytest.mark.parametrize("word", ["'sab", "'llab", "'SAB", "x", "7", " x", "\n", "\nx", " \n"])
@pytest.mark.parametrize("run", "!\n 7x")
def test_runs_that_end_near_a_cut(run: str, word: str, pre: str) -> None:
    # Few merges: the first token behind a wrong cut is the right one, as in "!" and "'sab" for "!'" and "sab".
    keys = byte_level(("s a", "l a", "S A", "a b", "Ġ x", "Ċ x", "Ċ Ċ", "Ġ Ġ")) | {"tokenizer.ggml.pre": pre}
    whole, pieces = pair(keys)
    for length in range(WINDOW + 4):
        text = run * length + word + "x" * WINDOW
        assert pieces.encode(text, specials=True) == whole.encode(text, specials=True), length


def test_reference_vocabularies() -> None:
    same({name: pair(metadata(name), composes=nfc(name)) for name in NAMES})


@pytest.mark.parametrize("prefix", [False, True])
def test_texts_that_are_one_word(prefix: bool) -> None:
    words = ["▁", "a", "b", "é", "日", "▁a", "ab", "ba", "aa", "bab", "▁ab", "aab", "▁▁", "▁▁▁", "éa", "abab", "日a"]
    keys = sentencepiece({word: -float(i) for i, word in enumerate(words)}, control=("<s>",), add_space_prefix=prefix)
    text = st.lists(st.text("ab é日\n€", max_size=60) | st.sampled_from([*RUNS, "<s>"]), max_size=8).map("".join)
    same({"sentencepiece": pair(keys)}, text)


def test_special_tokens_across_windows() -> None:
    keys = byte_level(control=("<|end|>", "<|end|>x", "<|e"), visible=("<think>", "<think><think>"))
    pieces = ["<|end|>", "<|e", "x", "<think>", "<", "|", "end|>", "think>", "a" * 30, "\ud800", "é"]
    same({"byte level": pair(keys)}, st.lists(st.sampled_from(pieces), max_size=60).map("".join))


@pytest.mark.parametrize("run", ["a", "7", " ", "日", "word "])
def test_reading_stops_between_windows(run: str) -> None:
    tokenizer = Tokenizer(merging("qwen2"), window=WINDOW)
    asked = []

    def stopped() -> bool:
        asked.append(None)
        return len(asked) > 5

    with pytest.raises(RequestError, match="the client has left"):
        tokenizer.encode(run * 5000, specials=True, limit=PromptLimit(None, stopped))
    assert len(asked) == 6
    with pytest.raises(ContextError, match="at least"):
        tokenizer.encode(run * 200_000, specials=True, limit=PromptLimit(100))


@pytest.mark.parametrize(
    "run", ["a", "!", "日", "🙂", "e\u0301", "ᄀ\u1161\u11a8", "ᄀ\u1161 ", "각", "\u0958", "か\u3099"]
)
def test_every_run_can_be_cut(run: str) -> None:
    # A window that cannot be cut is doubled.
    tokenizer = Tokenizer(byte_level(), nfc=True, window=WINDOW)
    asked = []
    tokenizer.encode(run * 2000, specials=True, limit=PromptLimit(None, lambda: asked.append(None) is not None))
    assert len(asked) >= len(run) * 2000 // WINDOW


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
