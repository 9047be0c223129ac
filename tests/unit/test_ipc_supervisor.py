"""A supervisor and its daemon's lives; the daemon is a thread of this test."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from luce import __version__
from luce.errors import DeviceError, ShardLostError
from luce.ipc import heartbeat, supervisor
from luce.ipc.arena import shared_arena
from luce.ipc.channel import Channel, ChannelError
from luce.ipc.lifecycle import DeviceFacts, Hello, Open, Ping, Pong
from luce.ipc.supervisor import Supervisor, Timeouts
from luce.remote.device import RemoteDevice
from luce.remote.messages import Accept, Done, Load, Loaded, Request, Response
from luce.remote.rpc import Expected, Requests
from luce.runtime.device import DeviceName, Memory
from tests.support.daemons import within

OPEN = Open(__version__, (), "info", 0, "float32")
LOAD = Load("", "", (), (), 1, ("auto", "auto"), 0, (), False, (), 1, True, 0, True)


class Peer:
    """A daemon. `live` gets its channel when layers are loaded, and the descriptor that came with them.

    It sends heartbeats while `awake` is set.
    """

    silence_hint = ""
    awake = threading.Event()
    awake.set()
    #: its heartbeat, and its devices
    pong = Pong()
    devices: tuple[DeviceFacts, ...] = ()
    #: set when it has loaded
    ready = threading.Event()
    ready.set()

    def __init__(self, live: Callable[[Channel[Request], int], None]) -> None:
        self.requests, theirs = socket.socketpair()
        self.heartbeat, their_heartbeat = socket.socketpair()
        self._live = live
        self.pongs = 0
        self._channel: Channel[Request] = Channel(theirs, Request)
        self._pings: Channel[Ping] = Channel(their_heartbeat, Ping)
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._serve, self._pong)]
        for thread in self._threads:
            thread.start()

    def _serve(self) -> None:
        try:
            self._channel.receive(timeout=60)
            self._channel.send(0, Hello(__version__, 0, self.devices), timeout=60)
            self._channel.receive(timeout=60)
            fd = self._channel.receive_descriptor(timeout=60)
            self.ready.wait(60)
            self._channel.send(0, Loaded((), (), (), 1, flags=False), timeout=60)
            try:
                self._live(self._channel, fd)
            finally:
                os.close(fd)
        except ChannelError:
            pass
        finally:
            self._channel.close()

    def _pong(self) -> None:
        try:
            while True:
                self._pings.receive(timeout=60)
                self.awake.wait(60)
                self._pings.send(0, self.pong, timeout=60)
                self.pongs += 1
        except ChannelError:
            self._pings.close()

    def kill(self) -> None:
        """Its sockets end."""

    def join(self) -> str:
        """As a process."""
        self._pings.shutdown()
        for thread in self._threads:
            thread.join(60)
        return "it ended"


Watch = Callable[[Callable[[Channel[Request], int], None]], Supervisor]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Makes supervisors whose daemons restart at once, any number of times."""
    made: list[Supervisor] = []
    monkeypatch.setattr(supervisor, "RESTARTS", 1000)
    monkeypatch.setattr(supervisor, "RESTART_DELAYS", (0.0,) * 1000)

    def one(live: Callable[[Channel[Request], int], None]) -> Supervisor:
        made.append(Supervisor("shard", lambda name: Peer(live), OPEN, Timeouts(60.0, 60.0), Response))
        return made[-1]

    yield one
    for each in made:
        each.close()


def test_no_life_responds_to_requests_of_another(watch: Watch) -> None:
    # The sockets of the next life get the numbers of the last ones, on which the engine may still wait.
    lives = 0

    def live(channel: Channel[Request], fd: int) -> None:
        nonlocal lives
        lives += 1
        channel.send(channel.receive(timeout=60)[0], Done(seconds=(lives,)), timeout=60)
        channel.receive(timeout=60)

    daemon = watch(live)
    with_memory = shared_arena(1)
    daemon.begin_load(LOAD, Loaded, arena=with_memory)
    with_memory.close()
    requests = Requests(daemon)
    for life in range(1, 61):
        requests.lost()
        answered = requests.ask(Accept(0, tuple(range(life))), Expected(lambda response: None, limit=0))
        answered.wait()
        assert answered.seconds_since(answered) == life
        with pytest.raises(ShardLostError, match="it ended"):
            requests.ask(Accept(0, tuple(range(life))), Expected(lambda response: None, limit=0)).wait()


def test_a_later_life_gets_the_memory_of_a_closed_arena(watch: Watch) -> None:
    sizes: list[int] = []

    def live(channel: Channel[Request], fd: int) -> None:
        sizes.append(os.fstat(fd).st_size)
        channel.receive(timeout=60)

    before = set(os.listdir("/proc/self/fd"))
    daemon = watch(live)
    arena = shared_arena(3 << 12)
    daemon.begin_load(LOAD, Loaded, arena=arena)
    daemon.wait_loaded(Loaded)
    arena.close()
    requests = Requests(daemon)
    for _ in range(3):
        requests.lost()
        with pytest.raises(ShardLostError):
            requests.ask(Accept(0, (0,)), Expected(lambda response: None, limit=0)).wait()
    daemon.close()
    assert sizes[:3] == [3 << 12] * 3
    del arena
    assert set(os.listdir("/proc/self/fd")) <= before


def loading(daemon: Supervisor) -> None:
    """Let the daemon load layers."""
    arena = shared_arena(1)
    daemon.begin_load(LOAD, Loaded, arena=arena)
    arena.close()


def waits(channel: Channel[Request], fd: int) -> None:
    """A life without requests."""
    channel.receive(timeout=60)


def test_progress_of_loading(watch: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="luce.ipc.supervisor")
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.02)
    monkeypatch.setattr(Peer, "pong", Pong("Load", 1.0, 1, 0.25))
    monkeypatch.setattr(Peer, "ready", threading.Event())
    daemon, shares = watch(waits), []

    def seen() -> None:
        shares.append(daemon.progress)
        if daemon.progress == 0.25:
            Peer.pong = Pong("Load", 2.0, 1, 0.26)
        if daemon.progress == 0.26:
            Peer.pong = Pong("Load", 3.0, 1, 0.5)
        if daemon.progress == 0.5:
            Peer.ready.set()

    loading(daemon)
    daemon.wait_loaded(Loaded, seen)
    assert list(dict.fromkeys(share for share in shares if share)) in ([0.25, 0.26, 0.5], [0.25, 0.26, 0.5, 1.0])
    assert daemon.progress == 1.0
    lines = [record.fields for record in caplog.records if record.getMessage() == "shard loading"]  # type: ignore[attr-defined]
    assert lines == [{"shard": "shard", "percent": 25}, {"shard": "shard", "percent": 50}]


@pytest.mark.parametrize(("shares", "error"), [((0.25, 0.5, 0.75), ""), ((0.25, 0.2505, 0.2509), "made no progress")])
def test_a_start_may_take_any_time_while_it_makes_progress(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, shares: tuple[float, ...], error: str
) -> None:
    later = 0.0

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + later

    monkeypatch.setattr(supervisor, "time", Clock)
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.02)
    monkeypatch.setattr(heartbeat, "LOST_AFTER", 1e6)
    monkeypatch.setattr(heartbeat, "FIRST_WITHIN", 1e6)
    monkeypatch.setattr(Peer, "pong", Pong("Load", 1.0, 1, shares[0]))
    monkeypatch.setattr(Peer, "ready", threading.Event())
    monkeypatch.setattr(Peer, "kill", lambda peer: peer.ready.set())
    daemon, seen = watch(waits), [0.0]

    def read() -> None:
        nonlocal later
        if daemon.progress == seen[-1] or daemon.progress == 1:
            return
        seen.append(daemon.progress)
        # Of 60 s.
        later += 40
        if len(seen) <= len(shares):
            Peer.pong = Pong("Load", 1.0, 1, shares[len(seen) - 1])
        elif not error:
            Peer.ready.set()

    loading(daemon)
    if error:
        with pytest.raises(DeviceError, match=rf"{error} within 60 s \(--shard-start-timeout\); .* on Load for"):
            daemon.wait_loaded(Loaded, read)
    else:
        daemon.wait_loaded(Loaded, read)
        assert tuple(seen[1:]) == shares


@pytest.mark.parametrize(
    "lie", [{"kv_dtype": "frob"}, {"kv_dtype": "|O"}, {"lanes": 0}, {"free": -1}, {"kept": -1}, {"kept": 3}], ids=str
)
def test_invalid_facts_about_a_device(monkeypatch: pytest.MonkeyPatch, lie: dict[str, Any]) -> None:
    facts = {"host": True, "packed": False, "lanes": 1, "kv_dtype": "<f4", "free": 1, "total": 2, "facts": {}, **lie}
    monkeypatch.setattr(Peer, "devices", (DeviceFacts("cpu:0", **facts),))
    opening = Open(__version__, ("cpu:0",), "info", 0, "float32")
    daemon = Supervisor("shard", lambda name: Peer(waits), opening, Timeouts(60.0, 60.0), Response)
    with pytest.raises(DeviceError, match=r"^shard: the daemon is lost: it sent invalid facts about cpu:0$"):
        daemon.hello()
    daemon.close()


def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let daemons have two devices."""
    names = "cpu:0", "cpu:1"
    monkeypatch.setattr(Peer, "devices", tuple(DeviceFacts(name, True, False, 1, "<f4", 1, 2, {}) for name in names))
    monkeypatch.setattr(sys.modules[__name__], "OPEN", Open(__version__, names, "info", 0, "float32"))


def test_memory_of_devices(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.02)
    two_devices(monkeypatch)
    daemon = watch(waits)
    first, second = (RemoteDevice(DeviceName("cpu", number), daemon, number) for number in (0, 1))
    # Before the first heartbeat with memory, that of the start.
    assert first.reported_memory() is None and first.memory() == Memory(1, 2)
    monkeypatch.setattr(Peer, "pong", Pong(memory=((3, 4), (5, 6))))
    assert within(60, lambda: first.reported_memory() is not None)
    assert first.reported_memory() == first.memory() == Memory(3, 4) and second.reported_memory() == Memory(5, 6)
    monkeypatch.setattr(Peer, "pong", Pong(memory=((7, 8), (5, 6))))
    assert within(60, lambda: first.reported_memory() == Memory(7, 8))
    daemon.close()
    assert first.reported_memory() is None


@pytest.mark.parametrize(
    "pong",
    [
        Pong(loaded=float("nan")),
        Pong(loaded=1.5),
        Pong(requests=-1),
        Pong("Load", float("inf"), 1),
        Pong("Load", -1.0, 1),
        Pong("L" * 41, 1.0, 1),
        Pong("Load\n", 1.0, 1),
        Pong(memory=((1, 2),)),
        Pong(memory=((1, 2), (-1, 2))),
        Pong(memory=((1, 2), (1, 2), (1, 2))),
    ],
    ids=str,
)
def test_malformed_heartbeats(watch: Watch, monkeypatch: pytest.MonkeyPatch, pong: Pong) -> None:
    monkeypatch.setattr(Peer, "pong", pong)
    two_devices(monkeypatch)
    daemon = watch(waits)
    with pytest.raises(DeviceError, match=r"^shard: the daemon is lost: it sent a malformed heartbeat$"):
        # Its first response may come before its first heartbeat.
        loading(daemon)
        daemon.hello()
        daemon.wait_loaded(Loaded)
        assert within(60, lambda: daemon.generation > 0)
        raise DeviceError(daemon.loss())


@pytest.mark.parametrize(
    ("pong", "last"),
    [
        (Pong(loaded=1.0), "waited for requests"),
        (Pong("Forward", 61.96, 3, 1.0), "had worked on Forward for 62.0 s, 2 more requests waiting"),
        (Pong("Load", 7.0, 1, 0.4), "had worked on Load for 7.0 s, 40 % of its layers loaded"),
    ],
    ids=str,
)
def test_the_last_activity_of_a_silent_daemon(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, pong: Pong, last: str
) -> None:
    monkeypatch.setattr(Peer, "pong", pong)
    daemon = watch(waits)
    loading(daemon)
    daemon.wait_loaded(Loaded)
    peer = daemon.peer
    assert isinstance(peer, Peer) and within(60, lambda: peer.pongs > 1)
    monkeypatch.setattr(Peer, "awake", threading.Event())
    monkeypatch.setattr(heartbeat, "LOST_AFTER", 0.1)
    assert within(60, lambda: daemon.generation > 0)
    Peer.awake.set()
    silent = (
        r"shard: the daemon is lost: it has sent no heartbeat for 0.1 s; at its last heartbeat, \d+\.\d s before, it "
    )
    assert re.fullmatch(silent + re.escape(last), daemon.loss())


def test_the_log_warns_before_a_silent_daemon_is_lost(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.02)
    monkeypatch.setattr(heartbeat, "WARN_AFTER", 0.2)

    def live(channel: Channel[Request], fd: int) -> None:
        channel.send(channel.receive(timeout=60)[0], Done(), timeout=60)
        channel.receive(timeout=60)

    def logged(text: str) -> bool:
        return within(60, lambda: any(text in record.getMessage() for record in caplog.records))

    daemon = watch(live)
    loading(daemon)
    daemon.wait_loaded(Loaded)
    peer = daemon.peer
    assert isinstance(peer, Peer) and within(60, lambda: peer.pongs > 2)
    Peer.awake.clear()
    try:
        assert logged("shard: no heartbeat for ")
    finally:
        Peer.awake.set()
    assert logged("shard: the heartbeat is back")
    assert daemon.generation == 0
    Requests(daemon).ask(Accept(0, (0,)), Expected(lambda response: None, limit=0)).wait()
