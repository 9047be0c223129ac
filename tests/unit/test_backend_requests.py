"""Requests to a daemon, without one: the peer is this test."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from luce.backend.remotekept import RemoteKept
from luce.backend.requests import Requests
from luce.errors import ShardLostError
from luce.remote.channel import Channel, ChannelError
from luce.remote.messages import Accept, Done, Drop, Kind, Reply, Request, Save, Saved
from luce.remote.supervisor import Limits


class Daemon:
    """What Requests needs of a Supervisor. `peer` is the daemon's end."""

    limits = Limits(5.0, 5.0)
    generation = 0

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._channel: Channel[Reply] = Channel(ours, Reply)
        self.peer: Channel[Any] = Channel(theirs, Request)

    def channel(self, generation: int) -> Channel[Reply]:
        """The server's end."""
        return self._channel

    def lost(self, channel: Channel[Reply], why: ChannelError) -> ShardLostError:
        """The error for it."""
        return ShardLostError(str(why))

    def close(self) -> None:
        """Both ends."""
        self._channel.close()
        self.peer.close()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon that does what the test does."""
    made = Daemon()
    yield made
    made.close()


def test_what_is_kept_is_dropped_with_its_last_reference(daemon: Daemon) -> None:
    requests = Requests("shard 1", daemon)  # type: ignore[arg-type]
    gc.disable()
    try:
        kept = RemoteKept(requests, range(4), Save(1, ((2,),), held=False), seconds=0)
        number, _ = daemon.peer.receive(timeout=5)
        daemon.peer.send(number, Saved({"blk.3.k": Kind("<f4", (64, 1, 2), paged=True)}, 512), timeout=5)
        assert kept.nbytes == 512 and not requests.dropped
        del kept
        assert list(requests.dropped) == [number]
    finally:
        gc.enable()
    requests.ask(Accept(0, (0,)), seconds=0, limit=0, take=lambda reply: None)
    assert daemon.peer.receive(timeout=5)[1] == Drop((number,))
    assert not requests.dropped


def test_a_lost_daemon_is_the_answer_to_all_that_was_asked(daemon: Daemon) -> None:
    requests = Requests("shard 1", daemon)  # type: ignore[arg-type]
    asked = [requests.ask(Accept(0, (0,)), seconds=0, limit=0, take=lambda reply: None) for _ in range(3)]
    number, _ = daemon.peer.receive(timeout=5)
    daemon.peer.send(number, Done(), timeout=5)
    asked[0].wait()
    daemon.peer.close()
    for request in (asked[2], asked[1]):
        with pytest.raises(ShardLostError, match="shard 1: it closed the connection"):
            request.wait()
    asked[0].wait()
    assert requests.newest is None
