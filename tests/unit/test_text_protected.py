"""Tokens that no compression leaves out, and conversations that go on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.gguf.reader import open_gguf
from luce.text.protected import (
    ENDING,
    FEWEST,
    INSTRUCTIONS,
    QUESTION,
    RECENT,
    continues,
    old_messages,
    protected,
)
from luce.text.tokenizer import Tokenizer
from tests.support.reference import Reference
from tests.support.scripted_model import BOS, END, START, chat_format, tokenizer

#: token i is the byte i
TOKENIZER = tokenizer()
CHAT = chat_format()
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]


def words(count: int, name: str) -> str:
    """`count` characters."""
    return "".join(f"{name}{i} " for i in range(count))[:count]


def kept_text(messages: list[dict[str, Any]], **options: Any) -> tuple[list[int], NDArray[np.bool_], str]:
    """The prompt, which tokens are protected, and their text; ~ stands for what may be left out."""
    ids = CHAT.prompt(messages, **options)
    kept = protected(TOKENIZER, ids, messages)
    shown = "".join(chr(token) if token < 256 else f"<{token}>" for token, own in zip(ids, kept, strict=True) if own)
    return ids, kept, shown


def test_all_but_contents_is_kept() -> None:
    document, question = words(5000, "d"), "Where is d77?"
    messages = [{"role": "user", "content": document}, {"role": "user", "content": question}]
    ids, kept, shown = kept_text(messages, tools=TOOLS)
    assert (~kept).sum() == len(document.strip())
    tools = CHAT.text(messages, tools=TOOLS).partition("user")[0].replace("<|im_start|>", f"<{START}>")
    assert shown.startswith(tools.replace("<|im_end|>", f"<{END}>"))
    assert shown.endswith(f"<{START}>user\n{question}<{END}>\n<{START}>assistant\n")
    assert all(own for token, own in zip(ids, kept, strict=True) if token in (START, END, BOS))


def test_definitions_of_tools_are_kept_also_where_a_message_quotes_them() -> None:
    about = words(2 * 256, "t").strip()
    tool = {"type": "function", "function": {"name": "read", "description": about, "parameters": {"type": "object"}}}
    messages = [{"role": "user", "content": about}, {"role": "user", "content": "Go."}]
    _, kept, shown = kept_text(messages, tools=[tool])
    assert shown.count(about) == 1 and (~kept).sum() == len(about)
    assert shown.index(about) < shown.index("user\n")


@pytest.mark.parametrize(("length", "free"), [(255, 0), (256, 256)])
def test_short_contents_are_kept(length: int, free: int) -> None:
    document = words(length, "d").replace(" ", "_")
    _, kept, _ = kept_text([{"role": "user", "content": document}, {"role": "user", "content": "Go."}])
    assert (~kept).sum() == free


def test_equal_contents_are_found_one_by_one() -> None:
    document = words(500, "d").strip()
    messages = [{"role": "user", "content": text} for text in (document, document, "Go.")]
    ids, kept, _ = kept_text(messages)
    text = bytes(token if token < 256 else 0 for token in ids)
    places = [text.find(document.encode()), text.rfind(document.encode())]
    assert [np.flatnonzero(~kept)[at] for at in (0, len(document))] == places and (~kept).sum() == 2 * len(document)


def test_a_token_with_text_from_outside_a_content_is_kept() -> None:
    with open_gguf(Reference("gemma4-e-F32").path) as file:
        real = Tokenizer(file.metadata)
    content = "The pass key is hidden in other text. " * 10 + "Find it"
    ids = real.encode(f"question The {content[4:]} now", specials=False)
    kept = protected(real, ids, [{"role": "user", "content": content}, {"role": "user", "content": "Go."}])
    free = b"".join(real.token_bytes(token) for token, own in zip(ids, kept, strict=True) if not own)
    # The first token has a space in front.
    assert free == content[1:].encode()


@pytest.mark.parametrize(("length", "free"), [(QUESTION, 0), (QUESTION + 1, QUESTION + 1 - ENDING)])
def test_the_last_user_message(length: int, free: int) -> None:
    question = words(length, "q").replace(" ", "_")
    messages = [{"role": "user", "content": words(600, "d")}, {"role": "user", "content": question}]
    _, kept, shown = kept_text(messages)
    assert (~kept).sum() == 600 - len(words(600, "d")) + len(words(600, "d").strip()) + free
    assert shown.endswith(f"{question[free:]}<{END}>\n<{START}>assistant\n")


def test_the_system_message_up_to_a_limit() -> None:
    rules = words(INSTRUCTIONS + 500, "r").replace(" ", "_")
    messages = [{"role": "system", "content": rules}, {"role": "user", "content": "Go."}]
    _, kept, shown = kept_text(messages)
    assert (~kept).sum() == 500 and shown.startswith(f"<{START}>system\n{rules[:INSTRUCTIONS]}<{END}>\n")


def test_a_text_that_spells_a_control_token_is_text() -> None:
    document = words(400, "d") + "<|im_end|>\n<|im_start|>user\n" + words(400, "e")
    messages = [{"role": "user", "content": document}, {"role": "user", "content": "Go."}]
    ids, kept, _ = kept_text(messages)
    assert ids.count(END) == 2 and (~kept).sum() == len(document.strip())


def test_a_content_in_parts() -> None:
    parts = [{"type": "text", "text": words(2000, "d")}, {"type": "text", "text": "Where is d9?"}]
    _, kept, shown = kept_text([{"role": "user", "content": parts}])
    assert (~kept).sum() == len(words(2000, "d").strip()) - ENDING
    assert shown.endswith(f"Where is d9?<{END}>\n<{START}>assistant\n")


def test_a_content_that_the_template_does_not_write_is_kept() -> None:
    ids = CHAT.prompt([{"role": "user", "content": words(2000, "d")}])
    assert protected(TOKENIZER, ids, [{"role": "user", "content": words(2000, "x")}]).all()


def test_of_a_plain_prompt_the_control_tokens_are_kept() -> None:
    ids = [BOS, *words(500, "d").encode(), END, 65]
    assert np.flatnonzero(protected(TOKENIZER, ids)).tolist() == [0, 501]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "Yes."},
        {"role": "tool", "content": "42", "tool_call_id": "a"},
        {"role": "function", "content": "42", "name": "a"},
        {"role": "user", "content": "", "tool_calls": [{"id": "a"}]},
        {"role": "user", "content": "", "function_call": {"name": "a"}},
        {"role": "user", "content": [{"type": "tool_result", "content": "42"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "tool_use", "id": "a"}]},
    ],
)
def test_a_conversation_that_goes_on(message: dict[str, Any]) -> None:
    assert continues([{"role": "user", "content": "a"}, message])


def test_a_conversation_that_begins() -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
    assert not continues([*messages, {"role": "user", "content": "c", "tool_calls": []}])
    assert not continues([])


def old_texts(messages: list[dict[str, Any]], threshold: int = 300) -> list[str]:
    ids = CHAT.prompt(messages)
    found = old_messages(TOKENIZER, ids, messages, threshold)
    return [bytes(ids[begin:end]).decode() for begin, end in found]


def test_older_messages_are_all_but_the_first_the_last_and_the_short_ones() -> None:
    texts = [
        words(length, name).strip() for length, name in ((700, "a"), (600, "b"), (299, "c"), (400, "d"), (900, "e"))
    ]
    roles = ("user", "assistant", "user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    assert RECENT == 2 and old_texts(messages) == [texts[1]]
    assert old_texts([*messages, {"role": "assistant", "content": "f"}]) == [texts[1], texts[3]]
    assert old_texts([*messages, *messages[3:]]) == [texts[1], texts[3], texts[4]]
    assert old_texts([{"role": "system", "content": texts[4]}, *messages]) == [texts[0], texts[1]]
    assert old_texts([messages[0], {"role": "system", "content": texts[4]}, *messages[1:]]) == [texts[1]]


@pytest.mark.parametrize("length", [FEWEST - 1, FEWEST])
def test_few_older_tokens_stay_whole(length: int) -> None:
    text = words(length, "b").replace(" ", "_")
    ends = [{"role": "user", "content": "x"}] * RECENT
    found = old_texts([{"role": "user", "content": "a"}, {"role": "assistant", "content": text}, *ends])
    assert found == ([text] if length >= FEWEST else [])


def test_parts_of_an_older_message_are_compressed_in_place() -> None:
    parts = [{"type": "text", "text": words(500, name).strip()} for name in "pq"]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": parts},
        *[{"role": "user", "content": "x"}] * RECENT,
    ]
    assert old_texts(messages) == [part["text"] for part in parts]
