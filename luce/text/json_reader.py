"""A JSON value that arrives in pieces: as far as it is valid, and what would make it whole."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

_SPACE = re.compile(r"[ \t\n\r]+")
#: of a string between quotation marks, and between apostrophes, as Python writes strings
_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"[^'\"\\\x00-\x1f]+")}
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN = re.compile(r"\\(u[0-9a-fA-F]{0,3})?")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
#: Python's spellings are what some chat templates print, so models write them
LITERALS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
# A pair of surrogates, half of one, or any other escape.
_ESCAPES = re.compile(rf"{_PAIR.pattern}|({_SURROGATE.pattern}[0-9a-fA-F]{{2}})|\\.", re.DOTALL)
_DEPTH = 200
_CLOSES = {"{": "}", "[": "]"}


class JsonReader:
    """Reads one JSON object or array. What it gives out is valid JSON so far, and `closing` makes it whole.

    The text goes out as it came, white space included, but for what JSON does not allow and models write: line feeds
    and other control characters in strings are escaped, Python's True, False and None are JSON's, its apostrophes
    around strings are quotation marks, an escape of half a surrogate pair is U+FFFD, a comma behind the last item is
    left out. Numbers and literals go out when they are whole, commas and keys with the value behind them. The result
    does not depend on the division into pieces.
    """

    def __init__(self) -> None:
        #: whether the value is complete
        self.done = False
        #: whether the text is no JSON from here on
        self.failed = False
        self._stack: list[str] = []
        # What may come next, and what was read but goes out with the value behind it: a comma, a key, a colon.
        self._next: Callable[[str, int, list[str]], int] = self._value
        self._held = ""
        self._in_key = False
        #: around the string that is read
        self._quote = '"'

    def read(self, text: str, at: int) -> tuple[str, int]:
        """What `text` adds from `at` on: what goes out, and where reading goes on when more text is there."""
        out: list[str] = []
        while at < len(text) and not self.done and not self.failed:
            after = self._next(text, at, out)
            if after == at:
                break
            at = after
        return "".join(out), at

    @property
    def closing(self) -> str:
        """What makes the text that went out a whole value."""
        if self.done or not self._stack:
            return "" if self.done else "{}"
        string = '"' if self._next == self._string and not self._in_key else ""
        return string + "".join(_CLOSES[opened] for opened in reversed(self._stack))

    # Each of these reads one thing and returns where it ends; the same place if more text must come first.

    def _value(self, text: str, at: int, out: list[str]) -> int:
        if space := _SPACE.match(text, at):
            return self._hold_space(space[0], space.end(), out)
        char = text[at]
        if char == "]" and self._stack and self._stack[-1] == "[":
            return self._close(text, at, out)
        if char in "{[":
            if len(self._stack) == _DEPTH:
                return self._fail(at)
            self._give(char, out)
            self._stack.append(char)
            self._next = self._key if char == "{" else self._value
            return at + 1
        if not self._stack:
            return self._fail(at)
        if char in _PLAIN:
            self._give('"', out)
            self._in_key, self._quote, self._next = False, char, self._string
            return at + 1
        found = _SCALAR.match(text, at)
        if found is None:
            return self._fail(at)
        if found.end() == len(text):
            return at
        scalar = LITERALS.get(found[0], found[0] if _NUMBER.fullmatch(found[0]) else "")
        if not scalar:
            return self._fail(at)
        self._give(scalar, out)
        self._next = self._behind
        return found.end()

    def _key(self, text: str, at: int, out: list[str]) -> int:
        if space := _SPACE.match(text, at):
            return self._hold_space(space[0], space.end(), out)
        if text[at] == "}":
            return self._close(text, at, out)
        if text[at] not in _PLAIN:
            return self._fail(at)
        self._held += '"'
        self._in_key, self._quote, self._next = True, text[at], self._string
        return at + 1

    def _string(self, text: str, at: int, out: list[str]) -> int:
        if plain := _PLAIN[self._quote].match(text, at):
            return self._spell(plain[0], plain.end(), out)
        char = text[at]
        if char == self._quote:
            self._next = self._colon if self._in_key else self._behind
            return self._spell('"', at + 1, out)
        if char == '"':
            return self._spell('\\"', at + 1, out)
        if char == "\\":
            return self._escape(text, at, out)
        return self._spell({"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(char, f"\\u{ord(char):04x}"), at + 1, out)

    def _escape(self, text: str, at: int, out: list[str]) -> int:
        found = _ESCAPE.match(text, at)
        if self._quote == "'" and text.startswith("\\'", at):
            return self._spell("'", at + 2, out)
        if found is None:
            # A backslash that begins no escape stands for itself.
            return at if _BEGUN.fullmatch(text, at) else self._spell("\\\\", at + 1, out)
        if not _SURROGATE.match(found[0]):
            return self._spell(found[0], found.end(), out)
        if pair := _PAIR.match(text, at):
            return self._spell(pair[0], pair.end(), out)
        rest = text[found.end() : found.end() + 6]
        if len(rest) < 6 and "\\u"[: len(rest)] == rest[:2]:
            return at
        return self._spell("\ufffd", found.end(), out)

    def _spell(self, text: str, end: int, out: list[str]) -> int:
        """A part of a string or of a key."""
        if self._in_key:
            self._held += text
        else:
            out.append(text)
        return end

    def _colon(self, text: str, at: int, out: list[str]) -> int:
        if space := _SPACE.match(text, at):
            return self._hold_space(space[0], space.end(), out)
        if text[at] != ":":
            return self._fail(at)
        self._held += ":"
        self._next = self._value
        return at + 1

    def _behind(self, text: str, at: int, out: list[str]) -> int:
        if space := _SPACE.match(text, at):
            return self._hold_space(space[0], space.end(), out)
        if text[at] == ",":
            self._held += ","
            self._next = self._key if self._stack[-1] == "{" else self._value
            return at + 1
        return self._close(text, at, out)

    def _close(self, text: str, at: int, out: list[str]) -> int:
        if text[at] != _CLOSES[self._stack[-1]]:
            return self._fail(at)
        # Models write a comma behind the last item.
        self._held = ""
        self._give(text[at], out)
        self._stack.pop()
        self.done = not self._stack
        self._next = self._behind
        return at + 1

    def _hold_space(self, space: str, end: int, out: list[str]) -> int:
        # White space waits with what it follows.
        if self._held:
            self._held += space
        else:
            out.append(space)
        return end

    def _give(self, text: str, out: list[str]) -> None:
        out.append(self._held + text)
        self._held = ""

    def _fail(self, at: int) -> int:
        self.failed = True
        return at


def json_text(text: str) -> str | None:
    """The JSON text of a value of any type, read as leniently as JsonReader does; None if it is none."""
    text = text.strip()
    if text[:1] in ("{", "["):
        reader = JsonReader()
        out, end = reader.read(text, 0)
        return out if reader.done and end == len(text) else None
    if text[:1] == '"':
        try:
            return json.dumps(string_of(text), ensure_ascii=False)
        except ValueError:
            return None
    return LITERALS.get(text, text if _NUMBER.fullmatch(text) else None)


def string_of(text: str, *, strict: bool = True) -> str:
    """What a JSON string says; an escape of half a surrogate pair is U+FFFD. Not `strict`: it may hold control
    characters. Raises ValueError for a text that is no string."""
    whole = _ESCAPES.sub(lambda found: "\ufffd" if found[1] else found[0], text)
    return str(json.loads(whole, strict=strict))
