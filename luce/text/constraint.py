"""The state of a grammar behind the tokens of one reply."""

from __future__ import annotations

import copy
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from luce.engine.draft_tree import children_of
from luce.engine.sequence import Constraint, RowKind
from luce.errors import BackendError, GrammarLimitError, RequestError
from luce.text.digit_limit import DigitLimit, DigitRun
from luce.text.free_text import FreeTexts, TextState
from luce.text.grammar_library import first_line
from luce.text.reasoning import ReasoningTokens

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True)
class _Place:
    """Where a reply is, beside the state of the grammar."""

    #: whether the grammar waits for a trigger
    waits: bool
    #: whether the reply reasons
    inside: bool
    #: whether reasoning may still begin
    may_reason: bool
    #: whether the reply has ended
    ended: bool = False


class GrammarStart(NamedTuple):
    """A grammar at its beginning, with what all of its constraints share."""

    matcher: LLMatcher
    #: tokens before which the reply is free, and with which the grammar begins; empty: it begins with the reply
    triggers: frozenset[int] = frozenset()
    #: ends the numbers of JSON
    digits: DigitLimit | None = None
    #: its free texts that end with a marker of text
    texts: FreeTexts | None = None


class GrammarConstraint(Constraint):
    """A grammar's state behind the tokens of one reply. The tokenizer has the first `known` of the model's `vocab` ids,
    of which `ends` end a reply.

    With triggers the reply is free until one of these tokens comes; the grammar begins with it, and holds until nothing
    can follow. Then the reply is free again, or over if it is `once`.

    Copies of it follow drafts. The library could roll back, but its rollback does not count end tokens, fails silently
    behind the end of some grammars, and cannot undo an error. A copy takes 15 us.
    """

    def __init__(
        self,
        start: GrammarStart,
        known: int,
        vocab: int,
        ends: frozenset[int],
        reasoning: ReasoningTokens | None = None,
        *,
        once: bool = False,
    ) -> None:
        triggers = start.triggers
        self._matcher = start.matcher.deep_copy()
        self._digits = start.digits
        self._run = DigitRun()
        self._texts = start.texts
        self._text = TextState()
        #: the matcher at its beginning, for the next time that a trigger comes
        self._first = start.matcher if triggers else None
        self._known = known
        self._vocab = vocab
        self._ends = ends
        # A trigger ends the reasoning, and in front of it a reply is free anyhow.
        self._reasoning = reasoning = None if triggers else reasoning
        self._triggers = triggers
        self._once = once
        inside = reasoning is not None and reasoning.inside
        self._place = _Place(bool(triggers), inside, reasoning is not None)
        #: masks of all tokens but some, by those
        self._free: dict[frozenset[int], NDArray[np.uint32]] = {}

    @property
    def open(self) -> bool:
        """As in Constraint: before a trigger, in reasoning too."""
        return self._place.waits and not self._place.ended

    @property
    def over(self) -> bool:
        """As in Constraint."""
        place = self._place
        return place.ended or (not (place.waits or place.inside) and bool(self._matcher.is_stopped()))

    @property
    def may_end(self) -> bool:
        """As in Constraint."""
        return self._place.waits or (not self._place.inside and bool(self._matcher.is_accepting()))

    def allows(self, token: int) -> bool:
        """As in Constraint."""
        place = self._place
        if place.waits:
            return True
        if not 0 <= token < self._known:
            # Even the library's check of such an id would be an error that stays.
            return False
        if place.inside:
            return token not in self._ends
        if self._reasoning is not None and place.may_reason and token == self._reasoning.opens:
            return True
        if token in self._ends:
            return self.may_end
        if self._run.full:
            return bool(self.mask()[token // 32] >> np.uint32(token % 32) & 1)
        return bool(self._matcher.validate_tokens([token]) == 1)

    def push(self, token: int) -> None:
        """As in Constraint."""
        if not self._place.inside and not self.allows(token):
            raise BackendError(f"token {token} was chosen, which the grammar does not allow")
        self._advance(token)

    def mask(self, ends: frozenset[int] = frozenset()) -> NDArray[np.uint32]:
        """As in Constraint."""
        words: NDArray[np.uint32] = np.empty(-(-self._vocab // 32), np.uint32)
        if self._fill_row(words, ends) is RowKind.OPEN:
            words[:] = self._known_mask(frozenset())
        return words

    def fill(
        self, tokens: Many[int], parents: Many[int], ends: frozenset[int], out: NDArray[np.uint32]
    ) -> list[RowKind]:
        """As in Constraint."""
        kinds = [RowKind.LEFT] * len(out)

        def visit(state: GrammarConstraint, node: int) -> None:
            kinds[node + 1] = state._fill_row(out[node + 1], ends)

        self._walk(tokens, parents, ends, visit)
        return kinds

    def valid(self, tokens: Many[int], parents: Many[int] = (), ends: frozenset[int] = frozenset()) -> list[bool]:
        """As in Constraint."""
        found = [False] * len(tokens)
        for node in self._walk(tokens, parents, ends, lambda state, node: None):
            found[node] = True
        return found

    def forced(self, most: int, ends: frozenset[int] = frozenset()) -> list[int]:
        """As in Constraint."""
        place = self._place
        if place.waits or place.inside or place.ended or (self._reasoning is not None and place.may_reason):
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()[:most]
        stop = next((at for at, token in enumerate(tokens) if token in ends or token in self._ends), len(tokens))
        return tokens[:stop]

    def copy(self) -> GrammarConstraint:
        """As in Constraint."""
        made = copy.copy(self)
        made._matcher = self._matcher.deep_copy()
        return made

    def _advance(self, token: int) -> None:
        """Go on behind a token that may come. Raises RequestError if the grammar grows too large."""
        place, reasoning = self._place, self._reasoning
        if place.waits:
            if token in self._ends:
                self._place = replace(place, ended=True)
            elif token in self._triggers:
                self._consume(token)
                if not self._restarts():
                    self._place = replace(place, waits=False)
        elif place.inside:
            if reasoning is not None and (token == reasoning.closes or token in reasoning.calls):
                self._place = replace(place, inside=False, may_reason=False)
                if token in reasoning.calls:
                    self._consume(token)
        elif reasoning is not None and place.may_reason and token == reasoning.opens:
            self._place = replace(place, inside=True)
        elif token in self._ends:
            self._place = replace(place, ended=True)
        else:
            self._consume(token)
            waits = self._restarts()
            if waits or place.may_reason:
                # The body has begun, which is no place for reasoning.
                self._place = replace(place, may_reason=False, waits=waits)

    def _restarts(self) -> bool:
        """Whether the grammar has ended and waits for the next trigger."""
        if self._first is None or self._once or not self._matcher.is_stopped():
            return False
        self._matcher, self._run, self._text = self._first.deep_copy(), DigitRun(), TextState()
        return True

    def _consume(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()
        if self._digits is not None:
            self._run = self._digits.behind(self._run, token)
        if self._texts is not None:
            self._text = self._texts.behind(self._text, token)

    def _walk(
        self,
        tokens: Many[int],
        parents: Many[int],
        ends: frozenset[int],
        visit: Callable[[GrammarConstraint, int], None],
    ) -> list[int]:
        """The nodes of a draft that may come, parents as in Proposal; this state stays as it is.

        `visit` gets the state behind the reply and -1, and the state behind each of these nodes unless the reply ends
        with it. What it raises at first is raised; behind a node at which it raises nothing comes.
        """
        children = children_of(parents or range(-1, len(tokens) - 1))
        found: list[int] = []
        stack: list[tuple[int, GrammarConstraint]] = []

        def expand(state: GrammarConstraint, node: int) -> None:
            allowed = []
            for child in children.get(node, []):
                token = int(tokens[child])
                if token in ends or token in self._ends:
                    found.extend([child] * state.may_end)
                elif state.allows(token):
                    allowed.append(child)
            # The first child goes on with the state of a node that is not the reply's.
            states = [state if state is not self and child is allowed[0] else state.copy() for child in allowed]
            stack.extend(reversed(list(zip(allowed, states, strict=True))))

        visit(self, -1)
        expand(self, -1)
        while stack:
            node, state = stack.pop()
            try:
                state._advance(int(tokens[node]))
                found.append(node)
                if not state.over:
                    visit(state, node)
                    expand(state, node)
            except RequestError:
                # What goes wrong behind a draft token goes wrong only if the reply gets there.
                continue
        return found

    def _fill_row(self, words: NDArray[np.uint32], ends: frozenset[int]) -> RowKind:
        """The mask of the next token. OPEN: words is not written to."""
        place = self._place
        if place.waits:
            return RowKind.OPEN
        if place.inside:
            words[:] = self._known_mask(ends | self._ends)
            return RowKind.FREE
        own = words[: -(-self._known // 32)]
        kind = self._fill_known(own)
        words[len(own) :] = 0
        if ends:
            may_end = self.may_end
            for token in ends:
                _set(words, token, may_end)
        if self._reasoning is not None and place.may_reason:
            _set(words, self._reasoning.opens, True)
        return kind

    def _fill_known(self, words: NDArray[np.uint32]) -> RowKind:
        """The mask of the tokenizer's tokens, by the grammar alone."""
        texts = self._texts
        may_end = texts is not None and bool(self._matcher.is_accepting())
        constant = None if texts is None else texts.mask(self._text, may_end=may_end)
        if constant is not None:
            words[:] = constant
            return RowKind.FREE
        self._words(words)
        if self._known % 32:
            words[-1] &= np.uint32((1 << self._known % 32) - 1)
        if texts is not None:
            self._text = texts.seen(self._text, words, may_end=may_end)
        if self._digits is not None and self._run.full:
            self._digits.apply(words)
        return RowKind.MADE

    def _known_mask(self, without: frozenset[int]) -> NDArray[np.uint32]:
        """All tokens but these."""
        found = self._free.get(without)
        if found is None:
            bits = np.arange(32 * -(-self._vocab // 32)) < self._known
            bits[list(without)] = False
            found = self._free[without] = np.packbits(bits, bitorder="little").view(np.uint32)
        return found

    def _words(self, words: NDArray[np.uint32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()

    def _check(self) -> None:
        # The library raises nothing: after an error, such as a limit on the schema's size, its masks are empty.
        if self._matcher.is_error():
            raise GrammarLimitError(f"the grammar of the reply: {first_line(self._matcher.get_error())}")


def _set(words: NDArray[np.uint32], token: int, value: bool) -> None:
    bit = np.uint32(1 << token % 32)
    if value:
        words[token // 32] |= bit
    else:
        words[token // 32] &= ~bit
