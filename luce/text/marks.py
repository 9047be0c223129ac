"""The special tokens of a dialect as single characters, so that no text that merely spells one is taken for it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from luce.models.calls import Calls
from luce.models.channels import Channels
from luce.text.tokenizer import Tokenizer

# Lone surrogates: no text that is decoded from bytes has one.
_FIRST = 0xD800
_MARK = re.compile("[\ud800-\udfff]")


class Marks:
    """The special tokens of a vocabulary that the texts of a dialect name: its calls, and its channels if it has some.
    In a marked text each is one character."""

    def __init__(self, calls: Calls, tokenizer: Tokenizer, channels: Channels | None = None) -> None:
        cut = tokenizer.special.cut
        texts = (*_texts(calls), *(() if channels is None else _texts(channels)))
        found = {token: text for text in texts for token, text in cut(text) if token is not None}
        #: the character of each token
        self.of_token = {token: chr(_FIRST + i) for i, token in enumerate(found)}
        self._spellings = {self.of_token[token]: text for token, text in found.items()}
        self._cut = cut
        #: the dialect with marked texts
        self.calls = self._marked(calls)
        #: the marks that stand in calls, and so not those that end a reply with calls
        self.inside_calls = frozenset(
            mark for mark in self._spellings if any(mark in text for text in _texts(self.calls))
        ).difference(self.calls.ends)
        #: the channels with marked texts; None without channels, or in a vocabulary that lacks their tokens
        self.channels = self._channels(channels)

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

    def _channels(self, channels: Channels | None) -> Channels | None:
        if channels is None:
            return None
        marked: Channels = self._marked(channels)
        needed = (marked.start, marked.channel, marked.message, *marked.ends[:1])
        return marked if all(map(self.is_mark, needed)) else None

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


def _texts(part: Calls | Channels) -> Iterator[str]:
    """All texts of a part of a dialect."""
    yield from _strings(dataclasses.astuple(part))


def _strings(value: Iterable[Any]) -> Iterator[str]:
    for item in value:
        if isinstance(item, str):
            yield item
        elif isinstance(item, tuple):
            yield from _strings(item)
