"""Replies come back as the tokens they were made of."""

from __future__ import annotations

from luce.text.token_memory import TokenMemory
from luce.text.tokenizer import Tokenizer
from tests.support.scripted_model import END, START, THINK, THOUGHT, metadata

A, B, AB, MESSAGE = ord("a"), ord("b"), 261, "assistant\n"


def tokenizer() -> Tokenizer:
    """Bytes and specials of the scripted model, and one merged token: encoding "ab" always gives it."""
    plain = metadata()
    tokens, types = plain["tokenizer.ggml.tokens"], plain["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list) and isinstance(types, list)
    return Tokenizer(
        {
            **plain,
            "tokenizer.ggml.tokens": [*tokens, "ab"],
            "tokenizer.ggml.token_type": [*types, 1],
            "tokenizer.ggml.merges": ["a b"],
        }
    )


def test_texts_between_special_tokens_are_remembered() -> None:
    tokens = tokenizer()
    assert tokens.encode("ab", specials=False) == [AB]
    memory = TokenMemory(tokens)
    memory.remember([START, *b"x\n", A, B, THINK, AB, A, THOUGHT, B, END])
    assert memory.recall("x\nab") == (*b"x\n", A, B)
    assert memory.recall("aba") == (AB, A)
    assert memory.recall("b") == (B,)
    assert memory.recall("ab") is None


def test_texts_with_incomplete_characters_are_not_remembered() -> None:
    memory = TokenMemory(tokenizer())
    memory.remember([*"é".encode(), END, "é".encode()[0]])
    assert memory.recall("é") == tuple("é".encode())
    assert memory.recall("\ufffd") is None


def test_the_oldest_texts_are_forgotten() -> None:
    memory = TokenMemory(tokenizer(), capacity=10)
    for text in (b"xxxx", b"yyyy"):
        memory.remember(list(text))
    assert memory.recall("xxxx") is not None
    memory.remember(list(b"zzzz"))
    assert memory.recall("yyyy") is None
    assert memory.recall("xxxx") is not None
    memory.remember(list(b"wwwwwwwwwwww"))
    assert memory.recall("wwwwwwwwwwww") is None


def test_remember_returns_the_positions_of_texts() -> None:
    memory = TokenMemory(tokenizer())
    (first, begin, end), second, third = memory.remember([START, *b"x\n", A, B, THINK, AB, A, THOUGHT, B, END])
    assert (begin, end) == (1, 5) and second[1:] == (6, 8) and third[1:] == (9, 10)
    # Known by its text, not by its ids.
    assert memory.remember([*b"x\n", AB]) == ((first, 0, 3),)
    assert not memory.remember([START, "é".encode()[0], END])


def test_texts_of_earlier_runs_are_looked_up_once() -> None:
    memory, asked = TokenMemory(tokenizer()), list[str]()
    ((digest, _, _),) = TokenMemory(tokenizer()).remember([A, B])

    def elsewhere(wanted: str) -> list[int] | None:
        asked.append(wanted)
        return [A, B] if wanted == digest else None

    memory.look_up = elsewhere
    assert memory.recall("ab") == memory.recall("ab") == (A, B)
    assert memory.recall("ba") is memory.recall("\ud800") is None
    assert asked[0] == digest and len(asked) == len(set(asked)) == 3


def test_ids_of_another_text_are_not_believed() -> None:
    memory = TokenMemory(tokenizer())
    memory.look_up = lambda digest: [A, A]
    assert memory.recall("ab") is None and memory.recall("aa") == (A, A)
