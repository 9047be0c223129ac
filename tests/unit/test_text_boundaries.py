"""Boundaries of prompts, with vocabularies of each kind of markers."""

from __future__ import annotations

from typing import Any

import pytest

from luce.errors import UnsupportedError
from luce.models.spec import CHATML, MessageMarkers
from luce.text.boundaries import Boundaries
from luce.text.tokenizer import CONTROL, NORMAL, Tokenizer
from tests.support.scripted_model import metadata

LETTERS = 256
#: markers of a family, and tokens of its vocabulary
KINDS = {
    "chatml": CHATML,
    "turns": MessageMarkers(starts=("<|turn>",), ends=("<turn|>",)),
    "tags": MessageMarkers(
        starts=("<user>", "<assistant>", "<system>"), ends=("</system>", "</user>", "</assistant>"), special=False
    ),
}


def specials(kind: str) -> tuple[str, ...]:
    """The texts of a kind's markers."""
    return (*KINDS[kind].starts, *KINDS[kind].ends)


def tokenizer(*specials: str, type: int = CONTROL) -> Tokenizer:
    """Single bytes, and the given tokens."""
    plain = metadata()
    tokens, types = plain["tokenizer.ggml.tokens"], plain["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list) and isinstance(types, list)
    return Tokenizer(
        {
            **plain,
            "tokenizer.ggml.tokens": [*tokens[:LETTERS], *specials, "<|end|>"],
            "tokenizer.ggml.token_type": [*types[:LETTERS], *[type] * len(specials), CONTROL],
            "tokenizer.ggml.bos_token_id": LETTERS + len(specials),
            "tokenizer.ggml.eos_token_id": LETTERS + len(specials),
        }
    )


def found(text: str, tokens: Tokenizer, kind: str = "chatml") -> list[str]:
    """The text before each boundary."""
    ids = tokens.encode(text, specials=True)
    cuts = Boundaries(tokens, KINDS[kind]).find(ids)
    return ["".join(tokens.token_text(i) for i in ids[:cut]).replace("Ċ", "\n") for cut in cuts]


@pytest.mark.parametrize(
    ("kind", "turns"),
    [
        ("chatml", ["<|im_start|>system\nS<|im_end|>\n<|im_start|>", "user\nU<|im_end|>\n<|im_start|>", "assistant\n"]),
        ("chatml", ["<|im_start|>user\nU<|im_end|>\n<|im_start|>", "assistant\nA<|im_end|>\n<|im_start|>", "user\n"]),
        ("turns", ["<|turn>system\nS<turn|>\n<|turn>", "user\nU<turn|>\n<|turn>", "model\n"]),
        ("tags", ["<system>\nS</system>\n<user>", "U</user>\n<assistant>", "\nA"]),
        ("tags", ["<user>U</user><assistant>", "A</assistant><user>", "V"]),
    ],
)
def test_boundaries_lie_behind_the_start_of_a_message(kind: str, turns: list[str]) -> None:
    assert found("".join(turns), tokenizer(*specials(kind)), kind) == [turns[0], turns[0] + turns[1]]


@pytest.mark.parametrize(("gap", "count"), [(0, 1), (4, 1), (5, 0)])
def test_up_to_four_tokens_may_lie_between_messages(gap: int, count: int) -> None:
    text = "<|im_start|>user\nU<|im_end|>" + "\n" * gap + "<|im_start|>assistant\n"
    assert len(found(text, tokenizer(*specials("chatml")))) == count


def test_a_message_without_an_end_has_no_boundary() -> None:
    assert found("<|im_start|>system\nS<|im_start|>user\nU", tokenizer(*specials("chatml"))) == []


def test_without_markers_there_are_no_boundaries() -> None:
    tokens = tokenizer(*specials("chatml"))
    ids = tokens.encode("<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n", specials=True)
    assert Boundaries(tokens, None).find(ids) == ()


def test_special_markers_must_be_special_tokens() -> None:
    text = "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert found(text, tokenizer("<|im_start|>")) == []
    assert found(text, tokenizer("<|im_start|>", "<|im_end|>", type=NORMAL)) == []


def test_markers_of_several_tokens() -> None:
    assert found("<user>U</user>\n<assistant>A", tokenizer(), "tags") == ["<user>U</user>\n<assistant>"]


@pytest.mark.parametrize("missing", ["<", "usr/>", "".join(map(chr, range(33, 127)))])
def test_a_vocabulary_that_cannot_spell_the_markers_is_refused(missing: str) -> None:
    keys = metadata()
    kept = [not set(str(text)) & set(missing) for text in keys["tokenizer.ggml.tokens"][:LETTERS]]  # type: ignore[index]
    for name, extra in (("tokens", "<|end|>"), ("token_type", CONTROL)):
        values: Any = keys[f"tokenizer.ggml.{name}"]
        keys[f"tokenizer.ggml.{name}"] = [v for v, keep in zip(values, kept, strict=False) if keep] + [extra]
    end = sum(kept)
    tokens = Tokenizer(keys | {"tokenizer.ggml.bos_token_id": end, "tokenizer.ggml.eos_token_id": end})
    with pytest.raises(UnsupportedError, match=r"^tokenizer\.ggml\.tokens: the vocabulary cannot spell '</system>'"):
        Boundaries(tokens, KINDS["tags"])
