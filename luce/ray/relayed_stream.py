"""What a client has got of a stream that comes in frames, so that another replica can go on with it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from luce.server.stream_frames import RECORD_HEADER, RELAY_HEADER, FrameReader, record_of

#: losses behind which a stream goes on
MOST_LOSSES = 2
#: what a client gets while it waits for another replica, and how often, in seconds
PING, PING_SECONDS = b": ping\n\n", 5.0
#: headers by which a stream goes on elsewhere: no client's
RELAYING = frozenset({RELAY_HEADER.lower(), RECORD_HEADER.lower()})
_NOTHING = b"[]"


class RelayedStream:
    """The frames of a stream, of one replica after the other."""

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._notes: list[bytes] = []
        self._losses = 0

    def feed(self, chunk: bytes) -> bytes:
        """The bytes for the client that are complete with a chunk. Raises ValueError."""
        frames = list(self._reader.feed(chunk))
        self._notes += [frame.notes for frame in frames if frame.notes != _NOTHING]
        return b"".join(frame.data for frame in frames)

    def lose(self) -> bool:
        """The replica is lost, and what it has begun to say; whether another one may go on. A stream without notes is
        none that could."""
        self._reader = FrameReader()
        self._losses += 1
        return bool(self._notes) and self._losses <= MOST_LOSSES

    @property
    def record(self) -> bytes:
        """The record for the next replica."""
        return record_of(self._notes)


def is_framed(headers: Sequence[Sequence[str]]) -> bool:
    """Whether a response comes in frames."""
    return any(name.lower() == RELAY_HEADER.lower() for name, _ in headers)
