"""Stop strings: the end of a text does not depend on its tokens, and no text is held back without need."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from luce.text.output import ReplyText
from luce.text.tokenizer import Tokenizer
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
