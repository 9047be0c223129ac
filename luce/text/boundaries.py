"""Lengths at which prompts diverge: those of one conversation, or of many with the same beginning.

A boundary is a number of tokens: up to and with the marker that starts a message, before the name of its role. So it
does not depend on the role, and text that a template derives from an earlier reply comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence

from luce.errors import UnsupportedError
from luce.models.spec import MessageMarkers
from luce.text.tokenizer import Tokenizer

_Marks = tuple[tuple[int, ...], ...]

#: most tokens (line feeds, as a rule) between the end of a message and the start of the next one
_GAP = 4


class Boundaries:
    """Finds the boundaries in prompts of one tokenizer; none without markers, or if its vocabulary lacks those that are
    special tokens. Raises UnsupportedError if it cannot spell the others."""

    def __init__(self, tokenizer: Tokenizer, markers: MessageMarkers | None) -> None:
        self._tokenizer = tokenizer
        self._markers = markers
        self._ends, self._starts = self._encoded()

    def find(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The boundaries of a prompt, ascending."""
        found: list[int] = []
        ends, starts = self._ends, self._starts
        prompt, at = tuple(ids), 0
        while (end := _next(prompt, ends, at, len(prompt))) is not None:
            start = _next(prompt, starts, end, end + _GAP + 1)
            if start is None:
                break
            found.append(start)
            at = start
        return tuple(found)

    def _encoded(self) -> tuple[_Marks, _Marks]:
        """The ids of the markers that end and that start a message."""
        if self._markers is None:
            return (), ()
        ends, starts = (
            tuple(tuple(self._tokenizer.encode(text, specials=True)) for text in texts)
            for texts in (self._markers.ends, self._markers.starts)
        )
        # Markers that are one special token each cannot be part of a message.
        if self._markers.special and not all(
            len(ids) == 1 and self._tokenizer.is_special(ids[0]) for ids in (*ends, *starts)
        ):
            return (), ()
        for text, ids in zip((*self._markers.ends, *self._markers.starts), (*ends, *starts), strict=True):
            spelled = b"".join(map(self._tokenizer.token_bytes, ids)).decode(errors="replace")
            if spelled != text and not any(map(self._tokenizer.is_special, ids)):
                raise UnsupportedError(
                    f"tokenizer.ggml.tokens: the vocabulary cannot spell {text!r} of the chat's markers"
                )
        return ends, starts


def _next(ids: tuple[int, ...], marks: _Marks, low: int, high: int) -> int | None:
    """The end of the first marker that begins in [low, high)."""
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
