"""Replies that a JSON schema holds: which tokens may come next, by the library llguidance.

The library is imported when a reply first needs it, and by no other module.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from luce.engine.sequence import Constraint
from luce.errors import BackendError, RequestError
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
        matcher = self._matcher(schema, space=reasoning is not None)
        tokenizer = self._tokenizer
        made = GrammarConstraint(matcher, tokenizer.vocab, self._vocab, tokenizer.eos_ids, reasoning)
        # Some limits strike only at the first mask.
        made.check()
        return made

    def _matcher(self, schema: Mapping[str, Any], *, space: bool) -> LLMatcher:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise _refused(f"llguidance cannot be imported ({error})", "unsupported_parameter") from None
        with self._lock:
            if self._made is None:
                self._made = _library_tokenizer(self._tokenizer)
        plain = {name: value for name, value in schema.items() if name not in ("$schema", "x-guidance")}
        text = json.dumps({**plain, "x-guidance": {"whitespace_pattern": _SPACE}})
        lark = f"start: {_BLANK if space else ''}body\nbody: %json {text}\n"
        matcher = LLMatcher(self._made, LLMatcher.grammar_from_lark(lark), log_level=0)
        if matcher.is_error():
            raise _refused(_first_line(matcher.get_error()))
        return matcher


class GrammarConstraint(Constraint):
    """A grammar's state behind the tokens of one reply. The tokenizer has the first `known` of the model's `vocab` ids,
    of which `ends` end a reply."""

    def __init__(
        self,
        matcher: LLMatcher,
        known: int,
        vocab: int,
        ends: frozenset[int],
        reasoning: ReasoningTokens | None = None,
    ) -> None:
        self._matcher = matcher
        self._known = known
        self._vocab = vocab
        self._ends = ends
        self._reasoning = reasoning
        self._inside = reasoning is not None and reasoning.inside
        self._ended = False

    @property
    def over(self) -> bool:
        """As in Constraint."""
        return self._ended or (not self._inside and self._matcher.is_stopped())

    @property
    def may_end(self) -> bool:
        """As in Constraint."""
        return not self._inside and bool(self._matcher.is_accepting())

    def allows(self, token: int) -> bool:
        """As in Constraint."""
        if self._inside:
            return token not in self._ends
        if self._reasoning is not None and token == self._reasoning.opens:
            return True
        if token in self._ends:
            return self.may_end
        return bool(self._matcher.validate_tokens([token]) == 1)

    def mask(self) -> NDArray[np.bool_]:
        """As in Constraint."""
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
            if not self.allows(token):
                raise BackendError(f"response_format: token {token} was chosen, which the schema does not allow")
            self._matcher.consume_token(token)
            self._check()

    def check(self) -> None:
        """Make the first mask. Raises RequestError if the library gives up."""
        self._words()

    def _words(self) -> NDArray[np.uint32]:
        words = np.zeros(-(-self._known // 32), np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        return words

    def _check(self) -> None:
        # The library raises nothing: after an error, such as a limit on the schema's size, its masks are empty.
        if self._matcher.is_error():
            raise _refused(_first_line(self._matcher.get_error()))


def _schema(form: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema of a `response_format`."""
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise _refused(f"expected type text, json_object or json_schema, got {str(kind)[:80]!r}")
    body = form.get("json_schema")
    schema = body.get("schema") if isinstance(body, Mapping) else None
    if not isinstance(schema, Mapping):
        raise _refused("json_schema.schema: expected an object")
    return schema


def _refused(reason: str, code: str = "invalid_value") -> RequestError:
    return RequestError(f"response_format: {reason}", param="response_format", code=code)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]


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
