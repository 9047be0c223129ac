"""Random replies of a grammar of calls."""

from __future__ import annotations

import numpy as np

from luce.engine.sequence import Constraint
from luce.models.calls import Bare, Tagged
from luce.text.constraint import GrammarConstraint
from tests.support.masks import allowed_ids
from tests.support.tool_templates import byte_tokenizer, format_named


def ends(constraint: Constraint) -> bool:
    """Whether the reply may end here."""
    return isinstance(constraint, GrammarConstraint) and (constraint.over or constraint.may_end)


def walk(name: str, constraint: Constraint, seed: int, *, special: bool = True) -> list[int] | None:
    """The ids of a random reply in the vocabulary of `byte_tokenizer`; None if it does not end in 3000 tokens. Marks,
    brackets and the end of a string without quotation marks are drawn often."""
    tokenizer, random = byte_tokenizer(name, special=special), np.random.default_rng(seed)
    arguments = format_named(name).arguments
    end = (
        arguments.value[1] if isinstance(arguments, Tagged) else arguments.quote if isinstance(arguments, Bare) else ""
    )
    closing = tokenizer.encode(end, specials=True)
    ids: list[int] = []

    def push(token: int) -> None:
        constraint.push(token)
        ids.append(token)

    while len(ids) < 3000:
        now = allowed_ids(constraint) - tokenizer.eos_ids
        if constraint.over or not now or (ends(constraint) and random.random() < 0.3):
            return ids
        if closing and random.random() < 0.2:
            for token in closing:
                if token in now:
                    push(token)
                    now = allowed_ids(constraint)
            continue
        marks = [token for token in now if token >= 256 or chr(token) in '}]",</\n']
        push(int(random.choice(sorted(marks if marks and random.random() < 0.5 else now))))
    return None


def spelled(name: str, ids: list[int], *, special: bool = True) -> str:
    """The text of ids, special tokens by their name."""
    tokenizer = byte_tokenizer(name, special=special)
    return b"".join(
        tokenizer.token_text(token).encode() if tokenizer.is_special(token) else tokenizer.token_bytes(token)
        for token in ids
    ).decode()
