"""The special tokens of a dialect as single characters, so that no text that merely spells one is taken for it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from luce.models.calls import Calls
from luce.text.tokenizer import Tokenizer

# Lone surrogates: no text that is decoded from bytes has one.
_FIRST = 0xD800
_MARK = re.compile("[\ud800-\udfff]")


class Marks:
    """The special tokens of a vocabulary that the texts of a dialect name. In a marked text each is one character."""

    def __init__(self, calls: Calls, tokenizer: Tokenizer) -> None:
        cut = tokenizer.special.cut
        found = {token: text for text in _texts(calls) for token, text in cut(text) if token is not None}
        #: the character of each token
        self.of_token = {token: chr(_FIRST + i) for i, token in enumerate(found)}
        self._spellings = {self.of_token[token]: text for token, text in found.items()}
        self._cut = cut
        #: the dialect with marked texts
        self.calls = self._marked(calls)

    def marked(self, text: str) -> str:
        """A text of the dialect with its special tokens as marks."""
        return "".join(
            self.of_token.get(token, piece) if token is not None else piece for token, piece in self._cut(text)
        )

    def spelled(self, text: str) -> str:
        """A marked text as clients see it."""
        return text if text.isascii() else _MARK.sub(lambda mark: self._spellings.get(mark[0], "\ufffd"), text)

    def spelled_json(self, text: str) -> str:
        """A marked JSON text, in whose strings marks stand for their spelling."""
        if text.isascii():
            return text
        return _MARK.sub(lambda mark: quoted(self._spellings.get(mark[0], "\ufffd")), text)

    def is_mark(self, text: str) -> bool:
        """Whether a text is one mark."""
        return text in self._spellings

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.marked(value)
        if isinstance(value, tuple):
            return tuple(self._marked(item) for item in value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return dataclasses.replace(value, **{name: self._marked(item) for name, item in fields.items()})
        return value


def quoted(text: str) -> str:
    """A text as it stands between the quotation marks of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _texts(calls: Calls) -> Iterator[str]:
    """All texts of a dialect."""
    yield from _strings(dataclasses.astuple(calls))


def _strings(value: Iterable[Any]) -> Iterator[str]:
    for item in value:
        if isinstance(item, str):
            yield item
        elif isinstance(item, tuple):
            yield from _strings(item)
