"""Stop strings: the end of a text does not depend on its tokens, and no text is held back without need."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from luce.text.output import ReplyText
from luce.text.tokenizer import Tokenizer
from tests.support.harmony import marks as harmony_marks
from tests.support.harmony import tokenizer as harmony_tokenizer
from tests.support.vocabulary import byte_level

# Every text over "abé" of up to three characters, as a single token.
WORDS = ["".join(word) for n in (1, 2, 3) for word in itertools.product("abé", repeat=n)]
TOKENIZER = Tokenizer(byte_level(visible=tuple(WORDS)))
IDS = {word: 256 + i for i, word in enumerate(WORDS)}


def search(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that ends first, of several the longest; and that stop string."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


STOPS = st.lists(st.text("abé", min_size=1, max_size=4), max_size=4)
TOKENS = st.lists(st.sampled_from([*IDS.values(), *"é".encode()]), max_size=12)


@settings(max_examples=600)
@given(TOKENS, STOPS)
def test_every_chunking_gives_the_result_for_the_whole_text(tokens: list[int], stops: list[str]) -> None:
    reply = ReplyText(TOKENIZER, stops)
    text = "".join(map(reply.push, tokens)) + reply.flush()
    whole = b"".join(map(TOKENIZER.token_bytes, tokens)).decode(errors="replace")
    assert (text, reply.stopped) == search(whole, stops)


@settings(max_examples=400)
@given(st.lists(st.sampled_from(list(IDS.values())), max_size=12), STOPS)
def test_only_the_beginning_of_a_stop_string_is_held_back(tokens: list[int], stops: list[str]) -> None:
    reply, shown, whole = ReplyText(TOKENIZER, stops), "", ""
    for token in tokens:
        shown += reply.push(token)
        whole += TOKENIZER.token_text(token)
        if reply.stopped is not None:
            break
        prefixes = [stop[:n] for stop in stops for n in range(1, len(stop))]
        assert whole == shown + max(filter(whole.endswith, prefixes), key=len, default="")


def test_nothing_comes_after_a_stop_string() -> None:
    reply = ReplyText(TOKENIZER, ["ab"])
    assert [reply.push(IDS[word]) for word in ("éa", "bé", "b")] == ["é", "", ""]
    assert reply.flush() == "" and reply.stopped == "ab"


def test_an_unfinished_character_is_shown_at_the_end_and_can_complete_a_stop_string() -> None:
    reply = ReplyText(TOKENIZER, [])
    assert [reply.push(IDS["a"]), reply.push(0xC3), reply.flush()] == ["a", "", "\ufffd"]
    reply = ReplyText(TOKENIZER, ["a\ufffd"])
    assert [reply.push(IDS["ba"]), reply.push(0xC3), reply.flush()] == ["b", "", ""]
    assert reply.stopped == "a\ufffd"


def harmony(text: str, *stops: str) -> tuple[str, str | None]:
    """The text of a reply of channels, spelled, and its stop string."""
    reply = ReplyText(harmony_tokenizer(), stops, marks=harmony_marks())
    found = "".join(map(reply.push, harmony_tokenizer().encode(text, specials=True))) + reply.flush()
    return harmony_marks().spelled(found), reply.stopped


def test_a_stop_string_is_not_found_in_a_header() -> None:
    said = "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>final<|message|>the end"
    for stop in ("analysis", "assistant", "final", "<|message|>", "A<|end|><|start|>assi", "lthe"):
        assert harmony(said, stop) == (said, None)
    assert harmony(said, "A") == ("<|channel|>analysis<|message|>", "A")
    assert harmony(said, "e e") == (said.removesuffix("e end"), "e e")
    assert harmony(said, "<|end|>") == ("<|channel|>analysis<|message|>A", "<|end|>")
    # What was held back for a stop string comes in front of the header, and a header that does not end hides no more.
    assert harmony("x th<|start|>assistant", "the") == ("x th<|start|>assistant", None)
    assert harmony("<|channel|>the<|end|>the", "the") == ("<|channel|>the<|end|>", "the")
