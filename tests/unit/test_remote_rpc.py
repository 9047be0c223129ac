"""Requests to a daemon, without one: the peer is this test."""

from __future__ import annotations

import gc
import socket
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.errors import ShardLostError
from luce.ipc.channel import Channel, ChannelError, ProtocolError
from luce.ipc.supervisor import Timeouts
from luce.ipc.tcp import open_key_file
from luce.remote.messages import Accept, Done, Drop, Forward, Request, Response, Save, Saved, SavedTensor
from luce.remote.rpc import Expected, Requests
from luce.remote.saved_state import RemoteSavedState
from luce.remote.shard_groups import check_ids
from luce.runtime.device import Event, Flag
from luce.runtime.draws import Draw, RowDraws
from luce.runtime.step import Output
from tests.support.daemons import key_file


class Daemon:
    """The part of a Supervisor that Requests uses. `peer` is the daemon's end."""

    name = "shard 1"
    timeouts = Timeouts(60.0, 60.0)
    generation = 0

    def __init__(self, ours: socket.socket, theirs: socket.socket) -> None:
        self._channel: Channel[Response] = Channel(ours, Response)
        self.peer: Channel[Any] = Channel(theirs, Request)

    def channel(self, generation: int) -> Channel[Response]:
        """The server's end."""
        return self._channel

    def lost(self, channel: Channel[Response], why: ChannelError) -> ShardLostError:
        """The error for it."""
        return ShardLostError(str(why))

    def close(self) -> None:
        """Both ends."""
        self._channel.close()
        self.peer.close()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon that does what the test does."""
    made = Daemon(*socket.socketpair())
    yield made
    made.close()


def test_a_saved_state_is_dropped_with_its_last_reference(daemon: Daemon) -> None:
    requests = Requests(daemon)  # type: ignore[arg-type]
    gc.disable()
    try:
        saved = RemoteSavedState(requests, range(4), Save(5, 1, ((2,),), held=False), seconds=0)
        request, _ = daemon.peer.receive(timeout=60)
        daemon.peer.send(request, Saved({"blk.3.k": SavedTensor("<f4", (64, 1, 2), paged=True)}, 512), timeout=60)
        assert saved.nbytes == 512 and not requests.dropped
        del saved
        assert list(requests.dropped) == [5]
    finally:
        gc.enable()
    requests.ask(Accept(0, (0,)), Expected(lambda response: None, limit=0))
    assert daemon.peer.receive(timeout=60)[1] == Drop((5,))
    assert not requests.dropped


def test_all_open_requests_of_a_lost_daemon_fail(daemon: Daemon) -> None:
    requests = Requests(daemon)  # type: ignore[arg-type]
    asked = [requests.ask(Accept(0, (0,)), Expected(lambda response: None, limit=0)) for _ in range(3)]
    number, _ = daemon.peer.receive(timeout=60)
    daemon.peer.send(number, Done(), timeout=60)
    asked[0].wait()
    daemon.peer.close()
    for request in (asked[2], asked[1]):
        with pytest.raises(ShardLostError, match="it closed the connection"):
            request.wait()
    asked[0].wait()
    assert requests.newest is None


def over_tls(folder: Path) -> tuple[socket.socket, socket.socket]:
    """The two ends of a TLS connection, as to a network daemon."""
    key = key_file(folder / "key")
    ours, theirs = socket.socketpair()
    contexts = [open_key_file(key, "--key-file", server=server).context for server in (False, True)]
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(contexts[1].wrap_socket, theirs, server_side=True)
        return contexts[0].wrap_socket(ours), accepted.result(60)


@pytest.mark.parametrize("secured", [False, True])
def test_large_messages_pass_each_other(secured: bool, tmp_path: Path) -> None:
    """A daemon that sends a response does not read meanwhile. If the server did the same, both would wait for ever."""
    daemon = Daemon(*(over_tls(tmp_path) if secured else socket.socketpair()))
    data = np.arange(1 << 23, dtype=np.uint8)
    received: list[object] = []

    def serve() -> None:
        for _ in range(3):
            number, message = daemon.peer.receive(timeout=60, limit=1 << 24)
            received.append(message.data)
            # The next request is on its way by now.
            assert len(received) == 3 or daemon.peer.ready(60)
            daemon.peer.send(number, Done(data=data[::-1]), timeout=60)

    def take(response: Response) -> None:
        assert isinstance(response, Done) and np.array_equal(response.data, data[::-1])  # type: ignore[arg-type]

    peer = threading.Thread(target=serve)
    peer.start()
    requests = Requests(daemon)  # type: ignore[arg-type]
    asked = [requests.ask(Forward(data), Expected(take, 60, 1 << 24)) for _ in range(3)]
    for request in asked:
        request.wait()
    peer.join(60)
    assert len(received) == 3 and all(np.array_equal(each, data) for each in received)  # type: ignore[arg-type]
    daemon.close()


@pytest.mark.parametrize("secured", [False, True])
def test_every_response_is_that_of_its_request(secured: bool, tmp_path: Path) -> None:
    """Many requests of any size, several at a time, some of them behind a message without a response."""
    daemon = Daemon(*(over_tls(tmp_path) if secured else socket.socketpair()))
    count, most = 20000, 1 << 14
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, 2 * most, np.uint8)
    sizes = (most * rng.random(count) ** 4).astype(int)
    sent = [data[at : at + size] for at, size in zip(rng.integers(0, most, count), sizes, strict=True)]
    dropped: list[int] = []

    def serve() -> None:
        for _ in range(count):
            number, message = daemon.peer.receive(timeout=60)
            if isinstance(message, Drop):
                dropped.extend(message.saved)
                number, message = daemon.peer.receive(timeout=60)
            daemon.peer.send(number, Done(seconds=(number,), data=message.data[::-1]), timeout=60)

    peer = threading.Thread(target=serve)
    peer.start()
    requests = Requests(daemon)  # type: ignore[arg-type]
    got: list[NDArray[np.uint8]] = []

    def take(response: Response) -> None:
        assert isinstance(response, Done) and response.data is not None
        got.append(response.data)

    waiting: deque[Event] = deque()
    for number, each in enumerate(sent):
        if number % 7 == 3:
            requests.dropped.append(number)
        waiting.append(requests.ask(Forward(each), Expected(take, 60, most)))
        if len(waiting) > number % 9:
            waiting.popleft().wait()
    for each in waiting:
        each.wait()
    peer.join(60)
    assert len(got) == count
    assert all(np.array_equal(response[::-1], each) for response, each in zip(got, sent, strict=True))
    assert dropped == list(range(3, count, 7))
    whole = sum(sizes) + 2 * count * 32
    for channel in (daemon.channel(0), daemon.peer):
        assert whole < channel.sent < whole + 200 * count and whole < channel.received < whole + 200 * count
    daemon.close()


@pytest.mark.parametrize("count", [1, 100])
def test_ids_outside_the_vocabulary(count: int) -> None:
    def output(last: int) -> Output:
        return Output(np.array([8] * (count - 1) + [last], np.int32), np.empty((0, 9), np.float32))

    check_ids(output(0), 9)
    check_ids(output(8), 9)
    for wrong in (9, -1, np.iinfo(np.int32).min):
        with pytest.raises(ProtocolError, match=r"outside 0\.\.8"):
            check_ids(output(wrong), 9)
    # A row that is drawn has no token where its logits are not finite, and only there.
    drawn = RowDraws.of([None] * (count - 1) + [Draw(1, 1.0, 4)])
    check_ids(output(-1), 9, drawn)
    check_ids(output(8), 9, drawn)
    for wrong, draws in ((9, drawn), (-2, drawn), (-1, RowDraws.of([None] * count))):
        with pytest.raises(ProtocolError, match=r"outside 0\.\.8"):
            check_ids(output(wrong), 9, draws)


@pytest.mark.parametrize("count", [0, 5, 1 << 31, (1 << 32) - 1, 1 << 40])
def test_flags_count_beyond_32_bits(count: int) -> None:
    told = Flag(np.zeros(1, np.uint32), count)
    told.set()
    assert told.done() and not told.passed(count) and told.passed(count - 1)
    later = Flag(told.memory, count + 1)
    assert not later.done() and not told.passed(later.value)
    later.set()
    assert told.done() and later.done() and told.passed(count)
