"""Ids to characters, one at a time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce.text.detokenizer import Detokenizer
from luce.text.tokenizer import Tokenizer
from tests.support.vocabulary import NAMES, byte_level, metadata, sentencepiece


@pytest.mark.parametrize("name", NAMES)
def test_any_ids_give_the_text_of_all_their_bytes(name: str) -> None:
    tokenizer = Tokenizer(metadata(name))

    @settings(max_examples=300)
    @given(st.lists(st.integers(0, tokenizer.vocab - 1), max_size=30))
    def check(ids: list[int]) -> None:
        detokenizer = Detokenizer(tokenizer)
        text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
        assert text == b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")

    check()


@given(st.binary(max_size=40))
def test_bytes_decode_as_if_they_came_at_once(data: bytes) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert "".join(map(detokenizer.push, data)) + detokenizer.flush() == data.decode(errors="replace")


TOKENIZER = Tokenizer(byte_level(control=("<|end|>",), visible=("<think>",)))


def test_a_character_appears_with_its_last_byte() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.push(byte) for byte in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]
    assert detokenizer.flush() == ""


def test_control_tokens_vanish_and_others_stay() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.push(token) for token in (97, 256, 257, 0xC3, 256, 0xA9)] == ["a", "", "<think>", "", "", "é"]


def test_the_space_in_front_goes_unless_the_text_continues() -> None:
    tokenizer = Tokenizer(sentencepiece({"▁": -1.0, "a": -2.0, "▁a": -3.0}, control=("<s>",)))
    space, a, spaced = range(258, 261)

    def texts(*ids: int, continues: bool = False) -> list[str]:
        detokenizer = Detokenizer(tokenizer, continues=continues)
        return [detokenizer.push(token) for token in ids]

    assert texts(spaced, spaced) == ["a", " a"]
    assert texts(space, space, a) == ["", " ", "a"]
    assert texts(1, spaced) == ["", "a"]
    assert texts(a, spaced) == ["a", " a"]
    assert texts(spaced, 1, spaced, continues=True) == [" a", "", "a"]
