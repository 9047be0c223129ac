"""Tokens of a prompt that compression always keeps, and prompts that continue a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luce.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

#: of the last user message at most QUESTION tokens are kept, of a longer one its last ENDING tokens; of each system
#: message its first INSTRUCTIONS tokens
QUESTION, ENDING, INSTRUCTIONS = 1024, 256, 1024
# Contents of fewer bytes are kept: the template itself may contain their text.
_SHORTEST = 256
# Stands for a control token: no text in UTF-8 has this byte.
_CONTROL = b"\xff"


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
    pieces = [_CONTROL if tokenizer.is_control(token) else tokenizer.token_bytes(token) for token in ids]
    if not messages:
        return np.array([piece == _CONTROL for piece in pieces], np.bool_)
    ends = np.cumsum([len(piece) for piece in pieces])
    starts = np.concatenate([[0], ends[:-1]])
    text, limit = b"".join(pieces), int(ends[-1])
    kept = np.ones(len(ids), np.bool_)
    last = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    # From the end, as definitions of tools come first: a content that quotes one is not taken for it.
    for number, message in reversed(list(enumerate(messages))):
        for content in reversed(_texts(message.get("content"))):
            data = content.strip().encode(errors="replace")
            begin = text.rfind(data, 0, limit) if len(data) >= _SHORTEST else -1
            if begin < 0:
                continue
            limit = begin
            inside = np.flatnonzero((starts >= begin) & (ends <= begin + len(data)))
            if number == last:
                inside = inside[:-ENDING] if len(inside) > QUESTION else inside[:0]
            elif message.get("role") in ("system", "developer"):
                inside = inside[INSTRUCTIONS:]
            kept[inside] = False
    kept[[i for i, piece in enumerate(pieces) if piece == _CONTROL]] = True
    return kept


def _parts(content: Any) -> Sequence[Any]:
    return content if isinstance(content, list | tuple) else ()


def _texts(content: Any) -> list[str]:
    """The texts of a content, each of which a template writes as it is."""
    if isinstance(content, str):
        return [content]
    texts = [part if isinstance(part, str) else part.get("text") for part in _parts(content) if part]
    return [text for text in texts if isinstance(text, str)]
