"""Frames of a stream that a process in between passes on, so that it can go on elsewhere. Pure; no other package.

A frame is `: luce LENGTH NOTES`, an empty line, and LENGTH bytes of the stream. NOTES, a JSON list, say what of the
reply these bytes have. The notes of all frames so far are the stream's record: from it another server makes the rest
of the stream. To a reader of events the first line is a comment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

#: header of a request whose stream is framed, an admin's key; and of the response
RELAY_HEADER = "X-Luce-Relay"
#: header of a request whose body ends with the record of a stream: how many bytes that has
RECORD_HEADER = "X-Luce-Record"
_MARK = b": luce "
_END = b"\n\n"
#: most digits of LENGTH
_DIGITS = 12


class Frame(NamedTuple):
    """Bytes of a stream, and what they have: a JSON list."""

    data: bytes
    notes: bytes


def encoded(frame: Frame) -> bytes:
    """A frame's bytes."""
    return b"%s%d %s%s%s" % (_MARK, len(frame.data), frame.notes, _END, frame.data)


class FrameReader:
    """Frames from bytes as they come."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete with `data`. Raises ValueError for what is no frame."""
        self._buffer += data
        while (end := self._buffer.find(_END)) >= 0:
            length, _, notes = bytes(self._buffer[len(_MARK) : end]).partition(b" ")
            if not self._buffer.startswith(_MARK) or not length.isdigit() or len(length) > _DIGITS:
                raise ValueError("a stream lacks its frames")
            begin = end + len(_END)
            if len(self._buffer) < begin + int(length):
                return
            frame = Frame(bytes(self._buffer[begin : begin + int(length)]), notes)
            del self._buffer[: begin + int(length)]
            yield frame


def record_of(notes: list[bytes]) -> bytes:
    """The record of a stream whose frames had these notes: a JSON list of their lists."""
    return b"[%s]" % b",".join(notes)


def record_length(headers: Mapping[str, str]) -> int:
    """Bytes of the record at the end of a request's body; 0 without one."""
    text = headers.get(RECORD_HEADER, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else 0
