"""Places where a text may be cut, against texts with known ends."""

from __future__ import annotations

import pytest

from luce.gguf.reader import open_gguf
from luce.text.cut_points import CHARACTER, INSIDE, LINE, SENTENCE, WORD, cut_ranks
from luce.text.tokenizer import Tokenizer
from tests.support.reference import Reference
from tests.support.scripted_model import END, tokenizer

#: token i is the byte i
TOKENIZER = tokenizer()
NAMES = {CHARACTER: "-", INSIDE: "i", WORD: "w", SENTENCE: "s", LINE: "l"}


def ranks(ids: list[int]) -> str:
    return "".join(NAMES[int(rank)] for rank in cut_ranks(TOKENIZER, ids))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab c", "liwwl"),
        ("a. b", "lisw" + "l"),
        ("3.5", "liil"),
        ("a\nb", "lwll"),
        ("é!", "l-il"),
        ("好好", "l--i--l"),
        ("", "l"),
    ],
)
def test_ends_of_lines_sentences_and_words(text: str, expected: str) -> None:
    assert ranks(list(text.encode())) == expected


# The small vocabulary spells the wide mark with several tokens.
@pytest.mark.parametrize(("name", "wide"), [("qwen35-a", ()), ("gemma4-e", ("好。",))])
def test_sentences_end_with_their_marks(name: str, wide: tuple[str, ...]) -> None:
    text = 'He said "Go." She asked: why? Version 3.5 came! 好。 好 end.Next one'
    with open_gguf(Reference(f"{name}-F32").path) as file:
        real = Tokenizer(file.metadata)
    ids = real.encode(text, specials=False)
    before = [b"".join(map(real.token_bytes, ids[:i])).decode(errors="replace") for i in range(1, len(ids))]
    found = [known for known, rank in zip(before, cut_ranks(real, ids)[1:-1], strict=True) if rank == SENTENCE]
    assert found == [text[: text.index(end) + len(end)] for end in ('Go."', "why?", "came!", *wide)]


def test_a_control_token_is_a_line() -> None:
    assert ranks([97, END, 98, 99]) == "lllil"
