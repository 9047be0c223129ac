"""The text of a call's one string parameter, while its JSON is generated."""

from __future__ import annotations

import re

import msgspec

# `{"name": "` in front of the text.
_START = re.compile(r'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*"')
# What may be decoded alone: no half of an escape or of a surrogate pair at its end.
_WHOLE = re.compile(
    r'(?:[^"\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u])+"
)


class StringArgument:
    """Takes the JSON text of an object with one string, in pieces of any size."""

    def __init__(self) -> None:
        self._rest = ""
        self._inside = False
        self._sent: list[str] = []

    def push(self, piece: str) -> str:
        """The text that one more piece makes certain."""
        self._rest += piece
        if not self._inside:
            start = _START.match(self._rest)
            if start is None:
                return ""
            self._inside, self._rest = True, self._rest[start.end() :]
        found = _WHOLE.match(self._rest)
        if found is None:
            return ""
        self._rest = self._rest[found.end() :]
        text = _decoded(found[0])
        self._sent.append(text)
        return text

    def whole(self, arguments: str) -> str:
        """The whole text, from all pieces together: where they are no object with a string, their own text; of a
        call that was cut, what was pushed."""
        if self._inside:
            return "".join(self._sent)
        return "" if arguments.strip() in ("", "{}") else arguments


def _decoded(escaped: str) -> str:
    # As bytes: a lone surrogate of the model is no character.
    try:
        return str(msgspec.json.decode(f'"{escaped}"'))
    except msgspec.DecodeError:
        return escaped
