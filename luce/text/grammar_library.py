"""The library llguidance: which tokens may come next by a grammar.

It is imported when a reply first needs it, and by no other module.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from luce.errors import LuceError
from luce.text.free_text import TextVocabulary
from luce.text.lark import ANY
from luce.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

EMPTY, INVALID, LARGE = "grammar_empty", "invalid_value", "schema_too_complex"

_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
#: in the library's messages, for a schema that allows nothing
_EMPTY = ("Unsatisfiable schema", "NoExtension")
#: in the library's messages, for a grammar beyond its limits
_LARGE = ("too large", "too big", "too deeply", "TooComplex", "Unable to determine", "recursion limit", "fuel", "items")


class GrammarError(LuceError):
    """A grammar that the library refuses, with the code EMPTY, INVALID or LARGE; or no library.

    `place`: line and column of the grammar's text.
    """

    def __init__(self, reason: str, code: str, place: str = "") -> None:
        super().__init__(f"{place}{reason}", code=code)
        #: without the place
        self.reason = reason


class GrammarLibrary:
    """The library for one vocabulary. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._source = tokenizer
        self._lock = threading.Lock()
        self._made: LLTokenizer | None = None
        self._texts: TextVocabulary | None = None

    def matcher(self, lark: str, **grammars: str) -> LLMatcher:
        """The state at the beginning of a grammar in llguidance's Lark, in which `@NAME` is the one of `grammars` with
        that name.

        It makes the first mask too: some limits strike only there. Raises GrammarError.
        """
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise _missing(error) from None
        named = [{"lark_grammar": lark}, *({"name": name, "lark_grammar": text} for name, text in grammars.items())]
        matcher = LLMatcher(self._tokenizer(), json.dumps({"grammars": named}), log_level=0, limits=_limits())
        if not matcher.is_error():
            words = np.zeros(-(-self._source.vocab // 32), np.uint32)
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            raise _error(matcher.get_error())
        return matcher

    def text_vocabulary(self) -> TextVocabulary:
        """What free texts of the vocabulary share."""
        with self._lock:
            found = self._texts
        if found is None:
            words = -(-self._source.vocab // 32)
            masks: tuple[NDArray[np.uint32], NDArray[np.uint32]] = (
                np.zeros(words, np.uint32),
                np.zeros(words, np.uint32),
            )
            for mask, repeated in zip(masks, "+*", strict=True):
                matcher = self.matcher(f"start: /{ANY}{repeated}/\n")
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                if self._source.vocab % 32:
                    mask[-1] &= np.uint32((1 << self._source.vocab % 32) - 1)
            found = TextVocabulary.of(self._source, masks)
            with self._lock:
                self._texts = found
        return found

    def warm_up(self) -> None:
        """Read the vocabulary into the library, unless the library is missing: a grammar is refused then."""
        with contextlib.suppress(ImportError):
            self._tokenizer()
            self.text_vocabulary()

    def _tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._made is None:
                self._made = _library_tokenizer(self._source)
            return self._made


def regex_rule(pattern: str) -> str:
    """A regular expression as it stands in Lark, with its slashes. Raises GrammarError."""
    try:
        from llguidance import regex_to_lark
    except ImportError as error:
        raise _missing(error) from None
    return f"/{regex_to_lark(pattern)}/"


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )


def _missing(error: ImportError) -> GrammarError:
    return GrammarError(f"llguidance cannot be imported ({error})", "unsupported_parameter")


def _error(message: str) -> GrammarError:
    """The library tells errors apart only by their text: a test holds each."""
    if any(text in message for text in _EMPTY):
        return GrammarError("allows nothing", EMPTY)
    if any(text in message for text in _LARGE):
        return GrammarError("is too large to compile", LARGE)
    if place := _PLACE.match(message):
        reason = first_line(place[3].removeprefix("failed to compile JSON schema: "))
        return GrammarError(reason, INVALID, f"line {place[1]}, column {place[2]}: ")
    return GrammarError(first_line(message), INVALID)


def first_line(text: str) -> str:
    """The library's message on one line, cut."""
    lines = [line.strip() for line in text.strip().split("\n")]
    # Behind the message it shows the grammar, with line numbers.
    kept = [line for line in lines if line and not re.match(r"\d+ \||\^", line)]
    return " ".join(kept)[:300]


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
        """The ids of a part of a reply. The library takes no other token where the text is forced."""
        text = text if isinstance(text, str) else text.decode()
        ids, data = self._encode(text, specials=False, continues=True), text.encode()
        # A tokenizer may write another text, such as composed letters, and special tokens, which are no text here.
        spelled = b"".join([self.tokens[i] for i in ids])
        return ids if spelled == data and not self._special & {*ids} else self._longest(data)

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.special_token_ids)

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """The tokens of text by their bytes; of equal ones the first. Few vocabularies need it."""
        texts = [(data, i) for i, data in enumerate(self.tokens) if data and i not in self._special]
        return dict(reversed(texts))

    def _longest(self, data: bytes) -> list[int]:
        """The longest token that the bytes begin with, and so on behind it."""
        found, begin, most = [], 0, max(map(len, self._ids), default=0)
        while begin < len(data):
            ends = range(min(len(data), begin + most), begin, -1)
            end = next((end for end in ends if data[begin:end] in self._ids), None)
            if end is None:
                break
            found.append(self._ids[data[begin:end]])
            begin = end
        return found
