"""Tokens of a prompt that compression always keeps, and the older messages of conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luce.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

#: of the last user message at most QUESTION tokens are kept, of a longer one its last ENDING tokens; of each system
#: message its first INSTRUCTIONS tokens
QUESTION, ENDING, INSTRUCTIONS = 1024, 256, 1024
#: messages at the end of a conversation that are never old, and fewest tokens of all older ones that are compressed
RECENT, FEWEST = 2, 512
# Contents of fewer bytes are kept: the template itself may contain their text.
_SHORTEST = 256
# Stands for a control token: no text in UTF-8 has this byte.
_CONTROL = b"\xff"
_INSTRUCTING = ("system", "developer")


def continues(messages: Sequence[Message]) -> bool:
    """Whether a conversation contains a reply, a call of a tool or a tool's result."""
    return any(
        message.get("role") in ("assistant", "tool", "function")
        or message.get("tool_calls")
        or message.get("function_call")
        or any(
            isinstance(part, Mapping) and part.get("type") in ("tool_use", "tool_result")
            for part in _parts(message.get("content"))
        )
        for message in messages
    )


def protected(tokenizer: Tokenizer, ids: Sequence[int], messages: Sequence[Message] = ()) -> NDArray[np.bool_]:
    """The tokens of a prompt that are always kept: bool [n].

    In every prompt these are the control tokens. In a prompt that a chat template made from `messages` they are also

    - the template's own text: headers, definitions of tools, the header of the reply;
    - the first INSTRUCTIONS tokens of each system message;
    - the last user message, or its last ENDING tokens if it has more than QUESTION;
    - contents that the template wrote otherwise than they came.
    """
    pieces = _pieces(tokenizer, ids)
    if not messages:
        return np.array([piece == _CONTROL for piece in pieces], np.bool_)
    kept = np.ones(len(ids), np.bool_)
    last = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    for number, inside in _contents(pieces, messages):
        if number == last:
            inside = inside[:-ENDING] if len(inside) > QUESTION else inside[:0]
        elif messages[number].get("role") in _INSTRUCTING:
            inside = inside[INSTRUCTIONS:]
        kept[inside] = False
    return kept


def old_messages(
    tokenizer: Tokenizer, ids: Sequence[int], messages: Sequence[Message], threshold: int
) -> tuple[tuple[int, int], ...]:
    """Begin and end of the contents of older messages in a prompt, ascending; those of at least `threshold` tokens.

    The first message, system messages and the last RECENT messages are not old. There are none if all older messages
    together have less than FEWEST tokens.
    """
    found = [
        (int(inside[0]), int(inside[-1]) + 1)
        for number, inside in _contents(_pieces(tokenizer, ids), messages)
        if 0 < number < len(messages) - RECENT and len(inside) and messages[number].get("role") not in _INSTRUCTING
    ]
    if sum(end - begin for begin, end in found) < FEWEST:
        return ()
    return tuple(sorted((begin, end) for begin, end in found if end - begin >= threshold))


def _pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[bytes]:
    return [_CONTROL if tokenizer.is_control(token) else tokenizer.token_bytes(token) for token in ids]


def _contents(pieces: Sequence[bytes], messages: Sequence[Message]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The contents in a prompt, from the end: the number of the message, and the numbers of the tokens inside.

    A message has several contents if it comes in parts; one that the template has changed is not found.
    """
    ends = np.cumsum([len(piece) for piece in pieces])
    starts = np.concatenate([[0], ends[:-1]])
    text, limit = b"".join(pieces), int(ends[-1])
    # From the end, as definitions of tools come first: a content that quotes one is not taken for it.
    for number, message in reversed(list(enumerate(messages))):
        for content in reversed(_texts(message.get("content"))):
            data = content.strip().encode(errors="replace")
            begin = text.rfind(data, 0, limit) if len(data) >= _SHORTEST else -1
            if begin < 0:
                continue
            limit = begin
            yield number, np.flatnonzero((starts >= begin) & (ends <= begin + len(data)))


def _parts(content: Any) -> Sequence[Any]:
    return content if isinstance(content, list | tuple) else ()


def _texts(content: Any) -> list[str]:
    """The texts of a content, each of which a template writes as it is."""
    if isinstance(content, str):
        return [content]
    texts = [part if isinstance(part, str) else part.get("text") for part in _parts(content) if part]
    return [text for text in texts if isinstance(text, str)]
