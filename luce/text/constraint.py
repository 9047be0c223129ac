"""The state of a grammar behind the tokens of one reply."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from luce.engine.sequence import Constraint
from luce.errors import BackendError, RequestError
from luce.text.reasoning import ReasoningTokens

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarConstraint(Constraint):
    """A grammar's state behind the tokens of one reply. The tokenizer has the first `known` of the model's `vocab` ids,
    of which `ends` end a reply.

    With `triggers` the reply is free until one of these tokens comes; the grammar begins with it, and holds until
    nothing can follow. Then the reply is free again, or over if it is `once`.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        known: int,
        vocab: int,
        ends: frozenset[int],
        reasoning: ReasoningTokens | None = None,
        *,
        triggers: frozenset[int] = frozenset(),
        once: bool = False,
    ) -> None:
        self._matcher = matcher
        self._known = known
        self._vocab = vocab
        self._ends = ends
        self._reasoning = reasoning
        self._inside = reasoning is not None and reasoning.inside
        self._ended = False
        self._triggers = triggers
        self._once = once
        #: the matcher at its beginning, for the next time that a trigger comes
        self._first = matcher.deep_copy() if triggers else None
        self._waits = bool(triggers)

    @property
    def open(self) -> bool:
        """As in Constraint: before a trigger, in reasoning too."""
        return self._waits and not self._ended

    @property
    def over(self) -> bool:
        """As in Constraint."""
        return self._ended or (not self._waits and not self._inside and self._matcher.is_stopped())

    @property
    def may_end(self) -> bool:
        """As in Constraint."""
        return self._waits or (not self._inside and bool(self._matcher.is_accepting()))

    def allows(self, token: int) -> bool:
        """As in Constraint."""
        if self._waits:
            return True
        if self._inside:
            return token not in self._ends
        if self._reasoning is not None and token == self._reasoning.opens:
            return True
        if token in self._ends:
            return self.may_end
        return bool(self._matcher.validate_tokens([token]) == 1)

    def mask(self) -> NDArray[np.bool_]:
        """As in Constraint."""
        if self._waits:
            return np.arange(self._vocab) < self._known
        if self._inside:
            mask = np.arange(self._vocab) < self._known
            mask[list(self._ends)] = False
            return mask
        words = self._words()
        mask = np.zeros(self._vocab, np.bool_)
        bits = np.unpackbits(words.view(np.uint8), count=self._known, bitorder="little")
        mask[: self._known] = bits.view(np.bool_)
        if self._reasoning is not None:
            mask[self._reasoning.opens] = True
        return mask

    def push(self, token: int) -> None:
        """As in Constraint."""
        if self._waits:
            if token in self._ends:
                self._ended = True
            elif token in self._triggers:
                self._waits = False
                self._consume(token)
            return
        reasoning = self._reasoning
        if self._inside:
            if reasoning is not None and token == reasoning.closes:
                self._inside, self._reasoning = False, None
            return
        if reasoning is not None and token == reasoning.opens:
            self._inside = True
            return
        # The body has begun, which is no place for reasoning.
        self._reasoning = None
        if token in self._ends:
            self._ended = True
        else:
            self._consume(token)

    def copy(self) -> GrammarConstraint:
        """As in Constraint."""
        made = copy.copy(self)
        made._matcher = self._matcher.deep_copy()
        return made

    def check(self) -> None:
        """Make the first mask. Raises RequestError if the library gives up."""
        self._words()

    def _consume(self, token: int) -> None:
        if not self._matcher.validate_tokens([token]):
            raise BackendError(f"token {token} was chosen, which the grammar does not allow")
        self._matcher.consume_token(token)
        self._check()
        if self._first is not None and not self._once and self._matcher.is_stopped():
            self._matcher, self._waits = self._first.deep_copy(), True

    def _words(self) -> NDArray[np.uint32]:
        words = np.zeros(-(-self._known // 32), np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        return words

    def _check(self) -> None:
        # The library raises nothing: after an error, such as a limit on the schema's size, its masks are empty.
        if self._matcher.is_error():
            raise refused(first_line(self._matcher.get_error()))


def refused(reason: str, code: str = "invalid_value") -> RequestError:
    """400 for a format of replies that cannot be enforced."""
    return RequestError(f"response_format: {reason}", param="response_format", code=code)


def first_line(text: str) -> str:
    """The first line of the library's message, cut."""
    return text.strip().partition("\n")[0][:300]
