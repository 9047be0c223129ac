"""Writes a reply to the terminal or a pipe while it is generated, unchanged.

The model's text is untrusted: before a terminal gets it, control characters are removed, so that it cannot move the
cursor, change the title or write the clipboard.
"""

from __future__ import annotations

from typing import Protocol, TextIO

_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """The text without control characters (C0, DEL, C1) other than newline and tab."""
    return text.translate(_CONTROL)


class ThoughtWriter(Protocol):
    """Writes the reasoning, which comes before the reply."""

    def reason(self, text: str) -> None:
        """Show more of the reasoning."""

    def end_reasoning(self) -> None:
        """Leave an empty line below the reasoning, if there is some, for what another writer writes. Idempotent."""


class ReplyWriter(Protocol):
    """Writes the text of one reply."""

    #: shown below a reply that is being written, where that is possible
    status: str

    def reason(self, text: str) -> None:
        """Show more of the reasoning, which comes before the reply."""

    def write(self, text: str) -> None:
        """Show more text."""

    def end(self) -> None:
        """Show the rest and begin a new line."""


class PlainThoughts:
    """Writes the reasoning unchanged, except for control characters."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._begun = False

    def reason(self, text: str) -> None:
        """Show more of the reasoning."""
        text = printable(text)
        if text:
            self._begun = True
            self._file.write(text)
            self._file.flush()

    def end_reasoning(self) -> None:
        """Leave an empty line below the reasoning."""
        if self._begun:
            self._file.write("\n\n")
            self._file.flush()
            self._begun = False


class PlainWriter:
    """Writes the text unchanged, except for control characters unless it is `raw`; the reasoning to `thoughts`, None:
    nowhere."""

    status = ""

    def __init__(self, file: TextIO, thoughts: ThoughtWriter | None = None, *, raw: bool = False) -> None:
        self._file = file
        self._thoughts = thoughts
        self._shown = str if raw else printable
        self._last = "\n"

    def reason(self, text: str) -> None:
        """Show more of the reasoning."""
        if self._thoughts is not None:
            self._thoughts.reason(text)

    def write(self, text: str) -> None:
        """Show more text."""
        text = self._shown(text)
        if text:
            self._end_thought()
            self._last = text[-1]  # before the text shows: Ctrl+C may end luce run at once
            self._file.write(text)
            self._file.flush()

    def end(self) -> None:
        """Begin a new line unless one has begun."""
        self._end_thought()
        if self._last != "\n":
            self._file.write("\n")
            self._file.flush()

    def _end_thought(self) -> None:
        if self._thoughts is not None:
            self._thoughts.end_reasoning()
