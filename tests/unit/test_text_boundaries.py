"""Boundaries of prompts, with vocabularies of each kind of markers."""

from __future__ import annotations

import pytest

from luce.text.boundaries import Boundaries
from luce.text.tokenizer import CONTROL, NORMAL, Tokenizer
from tests.support.scripted_model import metadata

LETTERS = 256
KINDS = {
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "gemma": ("<|turn>", "<turn|>"),
    "laguna": ("<user>", "</user>", "<assistant>", "</assistant>", "<system>", "</system>"),
}


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


def found(text: str, tokens: Tokenizer) -> list[str]:
    """What lies before each boundary."""
    ids = tokens.encode(text, specials=True)
    cuts = Boundaries(tokens).find(ids)
    return ["".join(tokens.token_text(i) for i in ids[:cut]).replace("Ċ", "\n") for cut in cuts]


@pytest.mark.parametrize(
    ("kind", "turns"),
    [
        ("qwen", ["<|im_start|>system\nS<|im_end|>\n<|im_start|>", "user\nU<|im_end|>\n<|im_start|>", "assistant\n"]),
        ("qwen", ["<|im_start|>user\nU<|im_end|>\n<|im_start|>", "assistant\nA<|im_end|>\n<|im_start|>", "user\n"]),
        ("gemma", ["<|turn>system\nS<turn|>\n<|turn>", "user\nU<turn|>\n<|turn>", "model\n"]),
        ("laguna", ["<system>\nS</system>\n<user>", "U</user>\n<assistant>", "\nA"]),
        ("laguna", ["<user>U</user><assistant>", "A</assistant><user>", "V"]),
    ],
)
def test_boundaries_lie_behind_what_opens_a_message(kind: str, turns: list[str]) -> None:
    assert found("".join(turns), tokenizer(*KINDS[kind])) == [turns[0], turns[0] + turns[1]]


@pytest.mark.parametrize(("gap", "count"), [(0, 1), (4, 1), (5, 0)])
def test_up_to_four_tokens_may_lie_between_messages(gap: int, count: int) -> None:
    text = "<|im_start|>user\nU<|im_end|>" + "\n" * gap + "<|im_start|>assistant\n"
    assert len(found(text, tokenizer(*KINDS["qwen"]))) == count


def test_a_message_without_an_end_has_no_boundary() -> None:
    assert found("<|im_start|>system\nS<|im_start|>user\nU", tokenizer(*KINDS["qwen"])) == []


def test_marks_that_are_no_tokens_of_their_own_are_no_marks() -> None:
    text = "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert found(text, tokenizer("<|im_start|>")) == []
    assert found(text, tokenizer("<|im_start|>", "<|im_end|>", type=NORMAL)) == []


def test_marks_of_several_tokens() -> None:
    assert found("<user>U</user>\n<assistant>A", tokenizer()) == ["<user>U</user>\n<assistant>"]
