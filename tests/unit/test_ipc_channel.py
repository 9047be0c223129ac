"""Frames: arrays arrive unchanged, and whatever a peer sends can only end the channel."""

from __future__ import annotations

import os
import random
import select
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from luce import __version__
from luce.ipc.channel import PROTOCOL, Channel, ChannelTimeoutError, ConnectionClosedError, ProtocolError
from luce.ipc.lifecycle import Failed, Ping
from luce.remote.messages import Announce, Done, LoadState, Request, Response, Saved, SavedTensor, Tensors
from luce.runtime.step import Candidates, Output, PageView, Span, Step
from tests.support.values import same

Pair = tuple[Channel[Any], Channel[Any]]


def connected() -> Pair:
    ours, theirs = socket.socketpair()
    return Channel(ours, Request | Response | Ping), Channel(theirs, Request | Response | Ping)


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = connected()
    with ours.socket, theirs.socket:
        yield ours, theirs


def step(rows: int) -> Step:
    numbers = np.arange(rows, dtype=np.int32)
    view = PageView(numbers[None], numbers[None], numbers[:1], numbers)
    return Step.of_spans([Span(0, 0, rows, 3)], numbers, (view, view), numbers[:2], needs_logits=numbers[:2] > 0)


MAGIC = b"LUC" + bytes([PROTOCOL])
RNG = np.random.default_rng(0)
MESSAGES: list[msgspec.Struct] = [
    Ping(),
    Failed("BackendError", "é"),
    Announce(step(3), -1, 4096, 7),
    Announce(step(4000), 0, -1),
    Done((1.5, 0.25), Output(np.arange(2, dtype=np.int32), RNG.random((1, 5000), np.float32))),
    Done((0.0,), Output(np.arange(1, dtype=np.int32), np.empty((0, 7), np.float32),
                     Candidates(np.arange(4, dtype=np.int32)[None], RNG.random((1, 4), np.float32)))),
    Done((), None, RNG.integers(0, 256, 1 << 20, np.uint8)),
    Saved({"blk.0.k": SavedTensor("<f2", (64, 2, 32), True)}, 8192),
    Tensors({f"blk.{n}.k": RNG.random((n, 64, 32)).astype(t) for n, t in enumerate(("f2", "f4", "u1"))}),
    LoadState(1, ((1, 2), ()), (0, 4), {"blk.0.v": np.zeros((0, 3), np.uint16)}),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_round_trip(pair: Pair, message: msgspec.Struct) -> None:
    ours, theirs = pair
    sender = threading.Thread(target=ours.send, args=(7, message), kwargs={"timeout": 5})
    sender.start()
    number, received = theirs.receive(timeout=60, limit=1 << 26)
    sender.join(60)
    assert number == 7 and same(message, received)


@pytest.mark.parametrize("values", [3, 4000])
def test_received_arrays_can_be_written(pair: Pair, values: int) -> None:
    """As compiled code asks of its arguments; small arrays travel in the message, large ones behind it."""
    ours, theirs = pair
    ours.send(7, Tensors({"x": np.ones((1, values), np.float32)}), timeout=5)
    received = theirs.receive(timeout=60, limit=1 << 26)[1]
    assert isinstance(received, Tensors)
    found = received.tensors["x"]
    assert found.flags.writeable and found.flags.aligned and found.flags.c_contiguous


def frame(
    body: bytes, payload: bytes = b"", *, magic: bytes = MAGIC, length: int | None = None, summed: int | None = None
) -> bytes:
    known = zlib.crc32(payload) if summed is None else summed
    fields = magic + struct.pack("<IQQI", len(body) if length is None else length, 1, len(payload), known)
    return fields + struct.pack("<I", zlib.crc32(fields + body)) + body + payload


def array(*fields: object) -> bytes:
    return msgspec.msgpack.encode({"type": "Tensors", "tensors": {"x": fields}})


BAD: dict[str, bytes] = {
    "magic": frame(b"", magic=b"HTTP"),
    "flipped bit": b"".join([frame(b"\x81\xa4type\xa4Ping")[:-1], b"f"]),
    "arrays": frame(array("<f4", (1000,), None), bytes(4000), summed=1),
    "long message": frame(b"", length=1 << 30),
    "no message": frame(b"\xc1"),
    "unknown": frame(msgspec.msgpack.encode({"type": "Frob"})),
    "missing field": frame(msgspec.msgpack.encode({"type": "Failed", "error": "x"})),
    "wrong type": frame(msgspec.msgpack.encode({"type": "Failed", "error": 1, "message": "x"})),
    "no dtype": frame(array("<x4", (1,), b"abcd")),
    "object": frame(array("|O8", (1,), b"abcdefgh")),
    "not three": frame(array("<f4", (1,))),
    "negative": frame(array("<f4", (-1, -4), b"abcd")),
    "fractions": frame(array("<f4", (1.0,), b"abcd")),
    "short": frame(array("<f4", (2,), b"abcd")),
    "huge": frame(array("<f4", (1 << 40,), None), b"abcd"),
    "wrapping": frame(array("<f4", (1 << 32, 1 << 32), None), b"abcd"),
    "left over": frame(array("<f4", (1,), None), b"abcdefgh"),
    "dimensions": frame(array("<f4", (1,) * 100, b"abcd")),
    "other dtype": frame(msgspec.msgpack.encode({"type": "Done", "data": ("<f4", (1,), b"abcd")})),
}


@pytest.mark.parametrize("name", BAD)
def test_garbage(pair: Pair, name: str) -> None:
    ours, theirs = pair
    ours.socket.sendall(BAD[name])
    with pytest.raises(ProtocolError, match=r"^it "):
        theirs.receive(timeout=60)


def test_both_sides_name_another_protocol(pair: Pair) -> None:
    # The error does not depend on the rest of the frame, nor on what follows.
    ours, theirs = pair
    ours.socket.sendall(frame(b"?" * 100, magic=b"LUC" + bytes([PROTOCOL + 1])))
    with pytest.raises(ProtocolError) as caught:
        theirs.receive(timeout=60)
    this = f"this is Luce {__version__} with protocol {PROTOCOL}"
    assert str(caught.value) == f"it speaks protocol {PROTOCOL + 1}, {this}"
    theirs.close()
    answer = ours.socket.recv(100)
    assert answer[:4] == MAGIC and len(answer) == 32


def test_more_than_expected(pair: Pair) -> None:
    ours, theirs = pair
    ours.socket.sendall(frame(b"x", bytes(1001)))
    with pytest.raises(ProtocolError, match="more than the limit"):
        theirs.receive(timeout=60, limit=1000)


def test_any_change_and_any_cut_of_a_frame_is_survived() -> None:
    whole = []
    for message in (Announce(step(3), -1, 4096, 7), Tensors({"blk.0.k": np.arange(1000, dtype=np.float32)})):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            Channel[Any](ours, Request).send(3, message, timeout=60)
            whole.append(theirs.recv(1 << 20))
    random.seed(0)
    for _ in range(2000):
        data = bytearray(random.choice(whole))
        for _ in range(random.randrange(4)):
            data[random.randrange(len(data))] = random.randrange(256)
        if random.randrange(2) and len(data) > 32:
            data[28:32] = struct.pack("<I", zlib.crc32(data[:28] + data[32 : 32 + int.from_bytes(data[4:8], "little")]))
        del data[random.randrange(len(data) * 2) :]
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(data)
            ours.shutdown(socket.SHUT_WR)
            channel: Channel[Any] = Channel(theirs, Request | Response)
            try:
                channel.receive(timeout=60, limit=1 << 20)
            except (ProtocolError, ConnectionClosedError):
                continue


def test_end_and_silence(pair: Pair) -> None:
    ours, theirs = pair
    with pytest.raises(ChannelTimeoutError):
        theirs.receive(timeout=0.05)
    ours.socket.sendall(frame(b"abc")[:10])
    with pytest.raises(ChannelTimeoutError):
        theirs.receive(timeout=0.05)
    ours.close()
    assert theirs.ready()
    with pytest.raises(ConnectionClosedError):
        theirs.receive(timeout=60)
    with pytest.raises(ConnectionClosedError):
        theirs.send(1, Ping(), timeout=60)
        theirs.send(1, Ping(), timeout=60)


def test_a_peer_that_does_not_read(pair: Pair) -> None:
    with pytest.raises(ChannelTimeoutError):
        pair[0].send(1, Done(data=np.zeros(1 << 24, np.uint8)), timeout=0.1)


def test_a_descriptor(pair: Pair) -> None:
    ours, theirs = pair
    source, end = socket.socketpair()
    with source, end:
        ours.send_descriptor(source.fileno(), timeout=60)
        with socket.socket(fileno=theirs.receive_descriptor(timeout=60)) as copy:
            assert not copy.get_inheritable()
            copy.sendall(b"through")
            assert end.recv(10) == b"through"
    ours.socket.sendall(b"f")
    with pytest.raises(ProtocolError, match="file descriptor"):
        theirs.receive_descriptor(timeout=60)


def test_only_arrays_and_messages_travel(pair: Pair) -> None:
    odd: NDArray[Any] = np.array([object()])
    with pytest.raises((TypeError, NotImplementedError, ProtocolError)):
        pair[0].send(1, Tensors({"x": odd}), timeout=1)
        pair[1].receive(timeout=1)


def test_a_descriptor_outlives_the_wait_for_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel looks a descriptor up again when it wakes a poll: closed before that, its number may name another file.
    ours, _ = pair
    waiting, woken, go = threading.Event(), threading.Event(), threading.Event()

    class Poll:
        def __init__(self) -> None:
            self.poll_object = poll()
            self.register = self.poll_object.register

        def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
            waiting.set()
            found = self.poll_object.poll(timeout)
            woken.set()
            assert go.wait(60)
            return found

    poll = select.poll
    monkeypatch.setattr(select, "poll", Poll)
    errors: list[ConnectionClosedError] = []

    def receive() -> None:
        with pytest.raises(ConnectionClosedError) as caught:
            ours.receive(timeout=None)
        errors.append(caught.value)

    receiver, closer = (threading.Thread(target=call, daemon=True) for call in (receive, ours.close))
    number = ours.socket.fileno()
    receiver.start()
    assert waiting.wait(60)
    closer.start()
    assert woken.wait(60)
    os.fstat(number)
    assert closer.is_alive() and ours.socket.fileno() == number
    go.set()
    receiver.join(60)
    closer.join(60)
    assert errors and ours.socket.fileno() < 0


def test_shutdown_does_not_end_another_connection_with_the_same_number(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = pair
    ending, go = threading.Event(), threading.Event()
    shutdown = socket.socket.shutdown

    def slow(self: socket.socket, how: int) -> None:
        ending.set()
        assert go.wait(60)
        shutdown(self, how)

    monkeypatch.setattr(socket.socket, "shutdown", slow)
    number = ours.socket.fileno()
    ender, closer = (threading.Thread(target=call, daemon=True) for call in (ours.shutdown, ours.close))
    ender.start()
    assert ending.wait(60)
    closer.start()
    closer.join(0.05)
    os.fstat(number)
    assert ours.socket.fileno() == number
    go.set()
    ender.join(60)
    closer.join(60)
    assert ours.socket.fileno() < 0
    ours.shutdown()


def test_threads_that_wait_on_closed_channels_receive_nothing_of_the_next_ones() -> None:
    failures: list[object] = []

    def live(number: int) -> None:
        for _ in range(100):
            (ours, theirs), heard = connected(), []

            def listen(ours: Channel[Any] = ours, heard: list[object] = heard) -> None:
                try:
                    while True:
                        heard.append(ours.receive(timeout=60)[0])
                except ConnectionClosedError:
                    pass
                except BaseException as error:
                    failures.append(error)

            listener = threading.Thread(target=listen)
            listener.start()
            theirs.send(number, Done(), timeout=60)
            ours.close()
            listener.join(60)
            theirs.close()
            if listener.is_alive() or heard not in ([], [number]):
                failures.append(heard)

    threads = [threading.Thread(target=live, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
