"""Replies that a JSON schema holds: which tokens may come next, by the library llguidance.

The library is imported when a reply first needs it, and by no other module.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from luce.engine.sequence import Constraint
from luce.text.constraint import GrammarConstraint, first_line, refused
from luce.text.reasoning import ReasoningTokens
from luce.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: White space at one place in JSON. Without a limit, a model whose favourites are masked writes blanks to the end.
_SPACE = r"[ ]|\n[ ]{0,40}"
#: what models write between the reasoning's end and the body
_BLANK = r"/[ \n]{0,4}/ "


class GrammarCompiler:
    """Makes constraints for replies of one model. Any thread may call it.

    `vocab` is the model's, which may have more ids than the tokenizer; no constraint allows those.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._lock = threading.Lock()
        self._made: LLTokenizer | None = None

    def constraint(self, form: Mapping[str, Any], reasoning: ReasoningTokens | None = None) -> Constraint | None:
        """The constraint for one reply by OpenAI's `response_format`; None for free text.

        A reply that reasons is free until the reasoning ends. Raises RequestError for a format that is none, and for a
        schema that cannot be enforced, with the library's reason.
        """
        schema = _schema(form)
        if schema is None:
            return None
        plain = {name: value for name, value in schema.items() if name not in ("$schema", "x-guidance")}
        text = json.dumps({**plain, "x-guidance": {"whitespace_pattern": _SPACE}})
        blank = "" if reasoning is None else _BLANK
        return self.grammar(f"start: {blank}body\nbody: %json {text}\n", reasoning)

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
        tokenizer = self._tokenizer
        made = GrammarConstraint(
            self._matcher(lark),
            tokenizer.vocab,
            self._vocab,
            tokenizer.eos_ids,
            reasoning,
            triggers=triggers,
            once=once,
        )
        # Some limits strike only at the first mask.
        made.check()
        return made

    def _matcher(self, lark: str) -> LLMatcher:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise refused(f"llguidance cannot be imported ({error})", "unsupported_parameter") from None
        with self._lock:
            if self._made is None:
                self._made = _library_tokenizer(self._tokenizer)
        matcher = LLMatcher(self._made, LLMatcher.grammar_from_lark(lark), log_level=0)
        if matcher.is_error():
            raise refused(first_line(matcher.get_error()))
        return matcher


def _schema(form: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema of a `response_format`."""
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise refused(f"expected type text, json_object or json_schema, got {str(kind)[:80]!r}")
    body = form.get("json_schema")
    schema = body.get("schema") if isinstance(body, Mapping) else None
    if not isinstance(schema, Mapping):
        raise refused("json_schema.schema: expected an object")
    return schema


def _library_tokenizer(tokenizer: Tokenizer) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    source = _Source(tokenizer)
    return LLTokenizer(TokenizerWrapper(source), n_vocab=tokenizer.vocab, eos_token=sorted(tokenizer.eos_ids) or None)


class _Source:
    """A tokenizer with the attributes that the library's TokenizerWrapper asks for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        every = range(tokenizer.vocab)
        self.eos_token_id = min(tokenizer.eos_ids, default=0)
        self.bos_token_id = tokenizer.bos_id
        special = {i: tokenizer.token_text(i).encode() for i in every if tokenizer.is_special(i)}
        self.tokens = [special.get(i) or tokenizer.token_bytes(i) for i in every]
        # In a grammar a special token stands for itself; inside a string its spelling is text of other tokens.
        self.special_token_ids = list(special)
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode(), specials=False)
