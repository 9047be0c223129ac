"""What a client has of a stream whose replica is lost, and what the next replica gets of it."""

from __future__ import annotations

import json

from luce.ray.relayed_stream import MOST_LOSSES, RelayedStream, is_framed
from luce.server.stream_frames import Frame, encoded


def test_the_client_gets_whole_frames_and_the_next_replica_their_notes() -> None:
    stream = RelayedStream()
    first, second = encoded(Frame(b"data: a\n\n", b'["head"]')), encoded(Frame(b"data: b\n\n", b'["b"]'))
    assert stream.feed(first[:-1]) == b"" and stream.feed(first[-1:] + encoded(Frame(b": ping\n\n", b"[]"))) != b""
    # Of a frame that is cut the client has nothing, and the next replica says it again.
    assert stream.feed(second[:-3]) == b"" and stream.lose()
    assert json.loads(stream.record) == [["head"]]
    assert stream.feed(second) == b"data: b\n\n"
    assert json.loads(stream.record) == [["head"], ["b"]]


def test_a_stream_goes_on_behind_a_few_losses_if_it_has_a_record() -> None:
    stream = RelayedStream()
    assert not stream.lose()
    stream = RelayedStream()
    stream.feed(encoded(Frame(b"", b'["head"]')))
    assert [stream.lose() for _ in range(MOST_LOSSES + 1)] == [True] * MOST_LOSSES + [False]


def test_what_comes_in_frames_says_so() -> None:
    assert is_framed([["content-type", "text/event-stream"], ["x-luce-relay", "1"]]) and not is_framed([["a", "1"]])
