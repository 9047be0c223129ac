"""Constraints of replies: compiles what a request wants its reply to be, away from the threads that serve."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from luce.engine.sequence import Constraint
from luce.errors import RequestError
from luce.models.calls import Json
from luce.text.call_format import CallFormat
from luce.text.call_grammar import call_grammar
from luce.text.channel_grammar import ChannelRules
from luce.text.compile_slots import CompileSlots, SlotStats, Ticket
from luce.text.constraint import GrammarConstraint, GrammarStart
from luce.text.digit_limit import DigitLimit
from luce.text.free_text import FreeTexts
from luce.text.grammar_library import GrammarError, GrammarLibrary
from luce.text.grammar_options import GrammarOptions
from luce.text.lark import BLANK
from luce.text.reasoning import ReasoningTokens
from luce.text.reply_format import JSON_KINDS, ReplyFormat, openai_format
from luce.text.reply_grammar import Compile, reply_grammar
from luce.text.schema_limits import SchemaError, too_complex
from luce.text.tokenizer import Tokenizer

_CACHED = 64
_CACHED_BYTES = 256 << 20
#: bytes that a grammar takes, estimated: a part for itself, and a part for each byte of its text
_BASE_BYTES, _BYTES_PER_BYTE = 256 << 10, 100


class WantedReply(NamedTuple):
    """What a reply must be: in a format, or calls of tools, or either."""

    form: ReplyFormat | None = None
    calls: CallFormat | None = None

    @property
    def kind(self) -> str:
        """A name of it, for the reply's details."""
        return "tools" if self.form is None else self.form.kind

    @property
    def is_json(self) -> bool:
        """Whether all that the grammar describes is JSON, but for special tokens."""
        form, calls = self
        in_json = calls is None or (isinstance(calls.calls.arguments, Json) and calls.required)
        return in_json and (form is None or form.kind in JSON_KINDS)


class _Compiled(NamedTuple):
    start: GrammarStart
    #: fields of the request that are not enforced
    relaxed: tuple[str, ...]
    begins: frozenset[int] = frozenset()


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar from which constraints are made. Any thread may call it."""

    wanted: WantedReply
    #: fields of the request that are not enforced
    relaxed: tuple[str, ...]
    _compiled: _Compiled
    _tokenizer: Tokenizer
    _vocab: int

    def constraint(self, reasoning: ReasoningTokens | None = None) -> Constraint:
        """The constraint for one reply. One that reasons is free until the reasoning ends."""
        calls, tokenizer = self.wanted.calls, self._tokenizer
        if reasoning is not None:
            # A call that begins inside the reasoning ends it. Messages of the reasoning are in the grammar.
            reasoning = None if reasoning.channels else reasoning._replace(calls=self._compiled.begins)
        return GrammarConstraint(
            self._compiled.start,
            tokenizer.vocab,
            self._vocab,
            tokenizer.eos_ids,
            reasoning,
            once=calls is not None and not (calls.parallel and calls.calls.parallel),
        )


class GrammarCompiler:
    """Makes constraints for replies of one model. Any thread may call it.

    `vocab` is the model's, which may have more ids than the tokenizer; no constraint allows those.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab: int,
        options: GrammarOptions = GrammarOptions(),  # noqa: B008  # frozen
        library: GrammarLibrary | None = None,
    ) -> None:
        """`library`: of this tokenizer; None makes one."""
        self._options = options
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._library = library or GrammarLibrary(tokenizer)
        self._lock = threading.Lock()
        self._digits: DigitLimit | None = None
        late = too_complex("", f"takes longer than {options.seconds:g} s to compile")
        self._slots: CompileSlots[_Compiled | SchemaError] = CompileSlots(
            options.seconds, late, entries=_CACHED, costs=_CACHED_BYTES
        )

    def constraint(self, form: Mapping[str, Any], reasoning: ReasoningTokens | None = None) -> Constraint | None:
        """The constraint for one reply by OpenAI's `response_format`; None for free text. Waits for the compiler.

        A reply that reasons is free until the reasoning ends. Raises RequestError for a format that is none, and for a
        schema that cannot be enforced, with the reason.
        """
        found = openai_format(form)
        if found is None:
            return None
        return self.wait(WantedReply(found), reasoning).constraint(reasoning)

    def wait(self, wanted: WantedReply, reasoning: ReasoningTokens | None = None) -> CompiledGrammar:
        """As `compiled`, in a thread that may wait."""
        return self._made(wanted, self._ticket(wanted, reasoning).result())

    async def compiled(self, wanted: WantedReply, reasoning: ReasoningTokens | None) -> CompiledGrammar:
        """The grammar of replies with this reasoning, once it is compiled; the event loop goes on meanwhile.

        Raises RequestError that names the field of the request.
        """
        # Only an event loop runs this; `luce run` has none.
        import asyncio

        ticket, asked = self._ticket(wanted, reasoning), time.monotonic()
        while not ticket.future.done():
            await asyncio.wait([asyncio.wrap_future(ticket.future)], timeout=ticket.seconds_left(asked))
        return self._made(wanted, ticket.future.result())

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
        start = GrammarStart(matcher, triggers)
        return GrammarConstraint(start, tokenizer.vocab, self._vocab, tokenizer.eos_ids, reasoning, once=once)

    def warm_up(self) -> None:
        """Make what all grammars of the vocabulary share, for which the first request would wait otherwise."""
        self._library.warm_up()
        self._digit_limit()

    def stats(self) -> SlotStats:
        """What compiling took, and how often a grammar was found in the cache."""
        return self._slots.stats()

    def close(self) -> None:
        """Compile nothing more. Idempotent; does not wait for what is being compiled."""
        self._slots.close()

    def _ticket(self, wanted: WantedReply, reasoning: ReasoningTokens | None) -> Ticket[_Compiled | SchemaError]:
        form, calls = wanted
        # White space in front of JSON and of calls is harmless where no reasoning comes; other formats are exact.
        exact = form is not None and form.kind not in JSON_KINDS
        blank = BLANK if reasoning is not None and (reasoning.inside or not exact) else ""
        text = b"\n".join(part.text for part in (form, calls) if part is not None)
        heads = None
        if reasoning is not None and reasoning.channels is not None:
            blank, heads = "", ChannelRules(*reasoning.channels, self._tokenizer.special.cut)
        begins = "" if heads is None else f"{heads.calls}|{heads.body}"
        key = hashlib.blake2b(f"{form is None} {blank} {begins}".encode() + text).digest()
        cost = _BASE_BYTES + _BYTES_PER_BYTE * len(text)
        return self._slots.ticket(key, cost, partial(self._outcome, wanted, blank, heads))

    def _outcome(self, wanted: WantedReply, blank: str, heads: ChannelRules | None) -> _Compiled | SchemaError:
        try:
            made = self._compile(wanted, blank, heads)
            digits = self._digit_limit() if wanted.is_json else None
            return made._replace(start=made.start._replace(digits=digits))
        except SchemaError as error:
            return error
        except RecursionError:
            return too_complex("", "is nested too deeply")

    def _compile(self, wanted: WantedReply, blank: str, heads: ChannelRules | None) -> _Compiled:
        form, calls = wanted
        library = self._library.matcher
        # With calls a format is compiled alone first: its errors are its own.
        before = "" if calls is not None else blank if heads is None else heads.body
        body = None if form is None else reply_grammar(form, library, blank=before, options=self._options)
        if calls is None or (body is not None and heads is not None and heads.goes_on):
            assert body is not None
            return _Compiled(GrammarStart(body.matcher), body.relaxed)
        compiled: Compile = library if form is None or form.kind != "grammar" else partial(library, body=form.value)
        rule = None if body is None else body.rule
        cut, options = self._tokenizer.special.cut, self._options
        made = call_grammar(calls, compiled, cut, blank=blank, body=rule, heads=heads, options=options)
        texts = FreeTexts(self._library.text_vocabulary(), made.markers) if made.markers else None
        start = GrammarStart(made.matcher, made.triggers, texts=texts)
        return _Compiled(start, (*(() if body is None else body.relaxed), *made.relaxed), made.begins)

    def _digit_limit(self) -> DigitLimit:
        with self._lock:
            if self._digits is None:
                self._digits = DigitLimit(self._tokenizer)
            return self._digits

    def _made(self, wanted: WantedReply, outcome: _Compiled | SchemaError) -> CompiledGrammar:
        param = "" if wanted.form is None else wanted.form.param
        if isinstance(outcome, SchemaError):
            param = _param(param, outcome.path)
            raise RequestError(f"{param}: {outcome}", param=param, code=outcome.code)
        relaxed = tuple(_param(param, path) for path in outcome.relaxed)
        return CompiledGrammar(wanted, relaxed, outcome, self._tokenizer, self._vocab)


def _param(param: str, path: str) -> str:
    """The field of the request: paths in the format's value begin with a dot, those of tools have their field."""
    return path if path and path[0] not in ".[" else param + path
