"""Python's keyword arguments that arrive in pieces, as one JSON object."""

from __future__ import annotations

import re

from luce.text.json_reader import JsonReader

_NAME = re.compile(r"[^\W\d]\w*")
_SPREAD = "**{"


def is_keyword(name: str) -> bool:
    """Whether a name of a parameter is written as a keyword. Python normalises those that are not ASCII."""
    return name.isascii() and name.isidentifier()


class KeywordReader(JsonReader):
    """Reads `name=VALUE, name=VALUE` up to the bracket that closes the call, which is not passed over.

    Values are read as JsonReader does, so they may be Python's or JSON's. Names that are no identifiers come in a
    dictionary: `**{"a-b": VALUE}`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stack = ["{"]
        self._held = "{"
        self._next = self._key
        #: nothing has gone out yet
        self._empty = True
        self._in_spread = False

    @property
    def closing(self) -> str:
        """As in JsonReader."""
        return "{}" if self._empty and not self.done else super().closing

    def _key(self, text: str, at: int, out: list[str]) -> int:
        if len(self._stack) > 1 or self._in_spread or text[at].isspace():
            return super()._key(text, at, out)
        if text[at] == ")":
            return self._close(text, at, out)
        begun = text[at : at + len(_SPREAD)]
        if begun == _SPREAD:
            self._in_spread = True
            return at + len(_SPREAD)
        name = _NAME.match(text, at)
        if name is None:
            return at if _SPREAD.startswith(begun) else self._fail(at)
        if name.end() == len(text):
            return at
        self._held += f'"{name[0]}"'
        self._next = self._equals
        return name.end()

    def _equals(self, text: str, at: int, out: list[str]) -> int:
        if text[at].isspace():
            return at + 1
        if text[at] != "=":
            return self._fail(at)
        self._held += ": "
        self._next = self._value
        return at + 1

    def _escape(self, text: str, at: int, out: list[str]) -> int:
        # Python allows it between quotation marks too.
        return self._spell("'", at + 2, out) if text.startswith("\\'", at) else super()._escape(text, at, out)

    def _close(self, text: str, at: int, out: list[str]) -> int:
        if len(self._stack) > 1:
            return super()._close(text, at, out)
        if self._in_spread and text[at] == "}" and not self._empty:
            self._in_spread = False
            # A comma behind the last item.
            self._held = self._held.rstrip().removesuffix(",")
            self._next = self._behind
            return at + 1
        if self._in_spread or text[at] != ")":
            return self._fail(at)
        out.append(self.closing)
        self.done = True
        return at

    def _give(self, text: str, out: list[str]) -> None:
        self._empty = False
        super()._give(text, out)
