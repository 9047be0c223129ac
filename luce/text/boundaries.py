"""Where prompts of one conversation, or of many with the same beginning, part: behind the start of each next message.

A boundary is a number of tokens: up to and with what opens a message, before the name of its role. So it is known
before it is known who speaks, and what a template makes of an earlier reply comes behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from luce.text.tokenizer import Tokenizer

_Marks = tuple[tuple[int, ...], ...]

#: most tokens (line feeds, as a rule) between the end of a message and the start of the next one
_GAP = 4
# What ends and what opens a message, of every kind of template that is known.
_MARKERS = (
    (("<|im_end|>",), ("<|im_start|>",)),
    (("<turn|>",), ("<|turn>",)),
    (("</system>", "</user>", "</assistant>"), ("<user>", "<assistant>", "<system>")),
)


class Boundaries:
    """Finds the boundaries of prompts of one tokenizer; none if it knows no markers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def find(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The boundaries of a prompt, ascending."""
        found: list[int] = []
        ends, starts = self._marks
        prompt, at = tuple(ids), 0
        while (end := _next(prompt, ends, at, len(prompt))) is not None:
            start = _next(prompt, starts, end, end + _GAP + 1)
            if start is None:
                break
            found.append(start)
            at = start
        return tuple(found)

    @cached_property
    def _marks(self) -> tuple[_Marks, _Marks]:
        """What ends and what opens a message."""
        for ends, starts in _MARKERS:
            encoded = [tuple(self._tokenizer.encode(text, specials=True)) for text in (*ends, *starts)]
            # Marks that are one token each cannot be part of a text.
            if len(ends) > 1 or all(len(ids) == 1 and self._tokenizer.is_special(ids[0]) for ids in encoded):
                return tuple(encoded[: len(ends)]), tuple(encoded[len(ends) :])
        return (), ()


def _next(ids: tuple[int, ...], marks: _Marks, low: int, high: int) -> int | None:
    """The end of the first mark that begins in [low, high)."""
    best: tuple[int, int] | None = None
    for mark in marks:
        at = low
        while True:
            try:
                at = ids.index(mark[0], at, high if best is None else best[0])
            except ValueError:
                break
            if ids[at : at + len(mark)] == mark:
                best = at, at + len(mark)
                break
            at += 1
    return None if best is None else best[1]
