"""The reasoning of a reply: how long it may be, and the tokens that end it then. Pure.

The engine appends these tokens in place of chosen ones. What is appended depends on the tokens of the reply alone, so a
reply is the same with and without drafts: a draft that goes on with the reasoning is not accepted there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

#: how reasoning ended: the model ended it, or the engine did because its budget was used up
CloseKind = Literal["natural", "hard"]


@dataclass(frozen=True)
class ReasoningLimit:
    """The ids between which a reply reasons, and how many tokens may stand between them."""

    #: what opens the reasoning, at the reply's start
    opening: tuple[int, ...]
    #: each of these ends it
    closers: frozenset[int]
    #: what ends it when the budget is used up: one of `closers`, and what the family writes behind it
    closing: tuple[int, ...]
    #: what leads to that end, if the budget has room for it; its tokens count in the budget
    lead_in: tuple[int, ...] = ()
    #: white space, which may stand before `opening`
    blank: frozenset[int] = frozenset()
    #: whether the prompt has opened the reasoning
    inside: bool = False
    #: most tokens between the markers; None: no limit
    budget: int | None = None
    #: tokens of the reply's limit that the reasoning leaves to what follows it
    reply_reserve: int = 0


class ReasoningState:
    """Where one reply is in its reasoning. `max_new_tokens`: most tokens of the reply."""

    def __init__(self, limit: ReasoningLimit, max_new_tokens: int) -> None:
        self._limit = limit
        self._max_new_tokens = max_new_tokens
        self._stage: Literal["before", "opening", "inside", "behind"] = "before"
        #: tokens of the reply, and tokens of `opening` among them
        self._length = self._opened = 0
        #: length of the reply at which the reasoning is ended, and what leads to its end
        self._end: float = inf
        self._lead_in: tuple[int, ...] = ()
        #: tokens that come next to end the reasoning, whatever the model would choose
        self.ending: tuple[int, ...] = ()
        #: how the reasoning ended; None: it did not, or there was none
        self.close_kind: CloseKind | None = None
        if limit.inside:
            self._begin()

    @property
    def forced(self) -> int | None:
        """The token that comes next whatever the model would choose; None: the model chooses."""
        return self.ending[0] if self.ending else None

    def refuse_forced(self) -> None:
        """Let the model choose again: a constraint does not allow the token that is forced."""
        self.ending = ()

    def push(self, token: int) -> None:
        """Append a token to the reply."""
        limit, hard = self._limit, bool(self.ending)
        self._length += 1
        self.ending = self.ending[1:]
        if self._stage == "inside":
            if token in limit.closers:
                self._stage, self.close_kind = "behind", "hard" if hard else "natural"
            elif not hard:
                self._check()
        elif self._stage == "opening" or (self._stage == "before" and token not in limit.blank):
            if token != limit.opening[self._opened]:
                self._stage = "behind"
                return
            self._stage, self._opened = "opening", self._opened + 1
            if self._opened == len(limit.opening):
                self._begin()

    def _begin(self) -> None:
        limit, self._stage = self._limit, "inside"
        room: float = inf if limit.budget is None else limit.budget
        if limit.budget is not None or limit.reply_reserve:
            room = min(room, self._max_new_tokens - limit.reply_reserve - len(limit.closing) - self._length)
        self._lead_in = limit.lead_in if len(limit.lead_in) <= room else ()
        self._end = self._length + room - len(self._lead_in)
        self._check()

    def _check(self) -> None:
        if self._length >= self._end:
            self.ending = self._lead_in + self._limit.closing
