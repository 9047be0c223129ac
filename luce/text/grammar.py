"""Constraints of replies: compiles what a request wants its reply to be, away from the threads that serve."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from luce.engine.sequence import Constraint
from luce.errors import RequestError
from luce.text.compile_slots import CompileSlots, Ticket
from luce.text.constraint import GrammarConstraint
from luce.text.grammar_library import GrammarError, GrammarLibrary
from luce.text.reasoning import ReasoningTokens
from luce.text.reply_format import JSON_KINDS, ReplyFormat, openai_format
from luce.text.reply_grammar import ReplyGrammar, reply_grammar
from luce.text.schema_limits import SchemaError, too_complex
from luce.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

_CACHED = 64
_CACHED_BYTES = 256 << 20
#: bytes that a grammar takes, measured: a part for itself, and a part for each byte of its text
_BASE_BYTES, _BYTES_PER_BYTE = 256 << 10, 100

_Outcome = ReplyGrammar | SchemaError


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar from which constraints are made. Any thread may call it."""

    form: ReplyFormat
    #: fields of the request that are not enforced
    relaxed: tuple[str, ...]
    _matcher: LLMatcher
    _tokenizer: Tokenizer
    _vocab: int

    def constraint(self, reasoning: ReasoningTokens | None = None) -> Constraint:
        """The constraint for one reply. One that reasons is free until the reasoning ends."""
        return GrammarConstraint(
            self._matcher.deep_copy(), self._tokenizer.vocab, self._vocab, self._tokenizer.eos_ids, reasoning
        )


class GrammarCompiler:
    """Makes constraints for replies of one model. Any thread may call it.

    `vocab` is the model's, which may have more ids than the tokenizer; no constraint allows those. `seconds`: that a
    grammar may take to compile.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, seconds: float = 5.0) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._library = GrammarLibrary(tokenizer)
        late = too_complex("", f"takes longer than {seconds:g} s to compile")
        self._slots: CompileSlots[_Outcome] = CompileSlots(seconds, late, entries=_CACHED, costs=_CACHED_BYTES)

    def constraint(self, form: Mapping[str, Any], reasoning: ReasoningTokens | None = None) -> Constraint | None:
        """The constraint for one reply by OpenAI's `response_format`; None for free text. Waits for the compiler.

        A reply that reasons is free until the reasoning ends. Raises RequestError for a format that is none, and for a
        schema that cannot be enforced, with the reason.
        """
        wanted = openai_format(form)
        if wanted is None:
            return None
        outcome = self._ticket(wanted, reasoning).result()
        return self._compiled(wanted, outcome).constraint(reasoning)

    async def compiled(self, form: ReplyFormat, reasoning: ReasoningTokens | None) -> CompiledGrammar:
        """The grammar of a format for replies with this reasoning, once it is compiled; the event loop goes on
        meanwhile. Raises RequestError."""
        ticket, asked = self._ticket(form, reasoning), time.monotonic()
        while not ticket.future.done():
            await asyncio.wait([asyncio.wrap_future(ticket.future)], timeout=ticket.seconds_left(asked))
        return self._compiled(form, ticket.future.result())

    def grammar(
        self,
        lark: str,
        reasoning: ReasoningTokens | None = None,
        *,
        triggers: frozenset[int] = frozenset(),
        once: bool = False,
    ) -> Constraint:
        """The constraint for one reply by a grammar in llguidance's Lark. `reasoning` as in `constraint`; `triggers`,
        `once` as in GrammarConstraint. Raises RequestError for a grammar that cannot be enforced.
        """
        try:
            matcher = self._library.matcher(lark)
        except GrammarError as error:
            raise RequestError(f"grammar: {error}", param="grammar", code=error.code) from None
        tokenizer = self._tokenizer
        return GrammarConstraint(
            matcher, tokenizer.vocab, self._vocab, tokenizer.eos_ids, reasoning, triggers=triggers, once=once
        )

    def close(self) -> None:
        """Compile nothing more. Idempotent; does not wait for what is being compiled."""
        self._slots.close()

    def _ticket(self, form: ReplyFormat, reasoning: ReasoningTokens | None) -> Ticket[_Outcome]:
        text = form.text
        # White space in front of JSON is harmless where no reasoning comes; other formats are exact.
        behind_reasoning = reasoning is not None and (reasoning.inside or form.kind in JSON_KINDS)
        key = hashlib.blake2b(text + bytes([behind_reasoning])).digest()
        cost = _BASE_BYTES + _BYTES_PER_BYTE * len(text)
        return self._slots.ticket(key, cost, partial(self._compile, form, behind_reasoning))

    def _compile(self, form: ReplyFormat, behind_reasoning: bool) -> _Outcome:
        try:
            return reply_grammar(form, self._library.matcher, behind_reasoning=behind_reasoning)
        except SchemaError as error:
            return error
        except RecursionError:
            return too_complex("", "is nested too deeply")

    def _compiled(self, form: ReplyFormat, outcome: _Outcome) -> CompiledGrammar:
        if isinstance(outcome, SchemaError):
            param = form.param + outcome.path
            raise RequestError(f"{param}: {outcome}", param=param, code=outcome.code)
        relaxed = tuple(form.param + path for path in outcome.relaxed)
        return CompiledGrammar(form, relaxed, outcome.matcher, self._tokenizer, self._vocab)
