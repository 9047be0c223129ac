"""The control connection's last message, and its silence."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from luce.cluster import link as link_module
from luce.cluster.link import Link
from luce.cluster.wire import DeviceMemory, Dismissed, FromCoordinator, FromMember, Leaving, Ping, Pong
from luce.ipc.channel import Channel, ChannelError, ChannelTimeoutError

Ends = tuple[Link, "Channel[Any]"]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A coordinator's link, and the member's end of its TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer: Channel[Any] = Channel(socket.create_connection(listener.getsockname()), FromCoordinator)
        link = Link(listener.accept()[0], FromMember)
    yield link, peer
    link.channel.close()
    peer.close()


def test_the_last_message_reaches_a_peer_that_sends_before_it_reads(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "CLOSE_SECONDS", 60.0)
    link, channel = ends
    peer = Link(channel.socket, FromCoordinator)
    channel.send(0, Pong(), timeout=30)
    assert link.channel.ready(30)

    def dismiss() -> None:
        link.post(Dismissed("removed", final=True))
        link.flush()
        # A connection that is closed with unread bytes is reset.
        link.channel.close()

    heard: list[object] = []

    def hear(message: object) -> None:
        heard.append(message)
        raise ChannelError("it ends")

    thread = threading.Thread(target=dismiss)
    thread.start()
    thread.join(0.3)
    peer.post(Pong())
    with pytest.raises(ChannelError):
        peer.run(hear, silence=30, pings=False)
    peer.channel.close()
    thread.join(60)
    assert heard == [Dismissed("removed", final=True)]


def test_pings_are_answered_and_timed(ends: Ends) -> None:
    link, peer = ends
    memory = (DeviceMemory(None, 2**40),)
    peer.send(0, Pong(memory), timeout=30)
    peer.send(0, Leaving(), timeout=30)

    def heard(message: object) -> None:
        raise ChannelError(f"it sent {type(message).__name__}")

    with pytest.raises(ChannelError, match=r"^it sent Leaving$"):
        link.run(heard, silence=30, pings=True)
    assert peer.receive(timeout=30)[1] == Ping() and link.round_trip is not None and link.round_trip >= 0
    assert link.memory == memory


def test_a_silent_peer_is_lost(ends: Ends) -> None:
    with pytest.raises(ChannelTimeoutError, match=r"^it has been silent for 0\.2 s$"):
        ends[0].run(lambda message: None, silence=0.2, pings=False)


def test_another_first_message(ends: Ends) -> None:
    ends[1].send(0, Pong(), timeout=30)
    with pytest.raises(ChannelError, match=r"^it sent Pong instead of Leaving$"):
        ends[0].receive(Leaving, 30)


def test_a_peer_that_holds_the_connection_up_is_dismissed_too(ends: Ends) -> None:
    link, peer = ends
    # A frame that has begun: its end would be waited for.
    peer.socket.sendall(b"LUC")
    ended: list[ChannelError] = []

    def run() -> None:
        try:
            link.run(lambda message: None, silence=600, pings=False)
        except ChannelError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    link.dismiss(Dismissed("removed", final=True))
    thread.join(60)
    assert len(ended) == 1 and not thread.is_alive()
