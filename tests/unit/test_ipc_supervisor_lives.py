"""How often a supervisor restarts a daemon, on a clock of the test; what each life of the daemon must show first."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from luce import __version__
from luce.errors import DeviceError, LuceError, ShardLostError
from luce.ipc import supervisor
from luce.ipc.arena import shared_arena
from luce.ipc.channel import Channel, ChannelError
from luce.ipc.lifecycle import DeviceFacts, Hello, Open, Ping, Pong
from luce.ipc.supervisor import Supervisor, Timeouts
from luce.remote.messages import Load, Loaded, Request, Response
from tests.support.daemons import within

LOAD = Load("", "", (), (), 1, ("auto", "auto"), 0, (), False, (), 1, True, 0, True)
LOADED = Loaded((), (), (), 1, flags=False)
FACTS = DeviceFacts("cpu:0", True, False, 1, "<f4", 1, 2, {})
HELLO = Hello(__version__, 7, (FACTS,))


class Clock:
    """A clock that only waits move: each wait with a limit takes the whole of it, at once."""

    def __init__(self) -> None:
        self.now = 1000.0
        #: limits of the waits that were not over when they began
        self.waits: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def condition(self) -> threading.Condition:
        clock = self

        class Condition(threading.Condition):
            def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:  # type: ignore[override]
                if timeout is None or predicate():
                    return super().wait_for(predicate, timeout)
                clock.waits.append(timeout)
                clock.now += timeout
                # Other threads get the lock meanwhile.
                self.wait(1e-3)
                return predicate()

        return Condition()


class Peer:
    """A daemon that says `hello`, loads, and lives until its socket ends, or not at all."""

    silence_hint = ""

    def __init__(self, *, hello: Hello = HELLO, loaded: Loaded = LOADED, dies: bool = False) -> None:
        self.requests, theirs = socket.socketpair()
        self.heartbeat, their_heartbeat = socket.socketpair()
        self._channel: Channel[Request] = Channel(theirs, Request)
        self._pings: Channel[Ping] = Channel(their_heartbeat, Ping)
        self._answers = hello, loaded
        self._dies = dies
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._serve, self._pong)]
        for thread in self._threads:
            thread.start()

    def _serve(self) -> None:
        try:
            for answer in self._answers:
                self._channel.receive(timeout=60)
                if isinstance(answer, Loaded):
                    os.close(self._channel.receive_descriptor(timeout=60))
                self._channel.send(0, answer, timeout=60)
            if not self._dies:
                self._channel.receive(timeout=60)
        except ChannelError:
            pass
        finally:
            self._pings.shutdown()
            self._channel.close()

    def _pong(self) -> None:
        try:
            while True:
                self._pings.receive(timeout=60)
                self._pings.send(0, Pong(), timeout=60)
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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The supervisor's clock."""
    made = Clock()
    monkeypatch.setattr(supervisor, "time", made)
    threads = SimpleNamespace(Thread=threading.Thread, Condition=made.condition)
    monkeypatch.setattr(supervisor, "threading", threads)
    return made


Watch = Callable[[Callable[[int], Peer]], Supervisor]


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Makes supervisors that know what to load before they connect. `connect` gets the number of the attempt, from 0.

    It runs on the supervisor's thread, and raises DeviceError where nothing can be connected to.
    """
    made: list[Supervisor] = []

    def one(connect: Callable[[int], Peer]) -> Supervisor:
        begun, attempts = threading.Event(), iter(range(1 << 30))

        def attempt(name: str) -> Peer:
            assert begun.wait(60)
            return connect(next(attempts))

        opening = Open(__version__, ("cpu:0",), "info", 0, "float32")
        made.append(Supervisor("shard", attempt, opening, Timeouts(60, 60), Response))
        arena = shared_arena(1)
        made[-1].begin_load(LOAD, Loaded, arena=arena)
        arena.close()
        begun.set()
        return made[-1]

    yield one
    for each in made:
        each.close()


def is_over() -> bool:
    """Whether no supervisor's thread is left."""
    return not any(thread.name == "luce-shard" for thread in threading.enumerate())


def absent() -> DeviceError:
    return DeviceError("shard: cannot connect")


def test_a_daemon_that_dies_again_and_again_stays_down(clock: Clock, watch: Watch) -> None:
    attempts: list[int] = []

    def connect(attempt: int) -> Peer:
        attempts.append(attempt)
        return Peer(dies=True)

    daemon = watch(connect)
    assert within(60, is_over), "it is tried again and again"
    # One life and five restarts, and then no attempt, however much time passes.
    assert attempts == [0, 1, 2, 3, 4, 5] and clock.waits == [0, 1, 2, 4, 8]
    assert daemon.down() == "shard: the daemon is lost: it ended" and not daemon.ready()
    with pytest.raises(ShardLostError, match=r"^shard: the daemon is lost: it ended$"):
        daemon.ready_channel()


def test_a_daemon_that_cannot_be_connected_to_is_tried_every_30_seconds(
    clock: Clock, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    # As another machine that is switched off over night.
    downs: list[str] = []

    def connect(attempt: int) -> Peer:
        if attempt in (0, 1000):
            return Peer(dies=not attempt)
        downs.append(daemon.down())
        raise absent()

    caplog.set_level(logging.WARNING)
    daemon = watch(connect)
    assert within(60, lambda: daemon.generation == 1 and daemon.ready())
    assert clock.waits == [0, 1, 2, 4, 8, *[30.0] * 995]
    # Requests wait for the first restarts; then they are refused until it is back.
    assert downs == [""] * 5 + ["shard: cannot connect"] * 994
    assert daemon.down() == "" and daemon.ready_channel() is not None
    said = [record.getMessage().partition("; ")[2] for record in caplog.records]
    assert said == ["restarting it", *[f"restarting it in {n} s" for n in (1, 2, 4, 8)], "retrying every 30 s"]


def test_deaths_more_than_ten_minutes_ago_do_not_count(clock: Clock, watch: Watch) -> None:
    def connect(attempt: int) -> Peer:
        # Two deaths within any ten minutes.
        clock.now += 301
        return Peer(dies=attempt < 50)

    daemon = watch(connect)
    assert within(60, lambda: daemon.generation == 50 and daemon.ready()), daemon.down()
    assert clock.waits == [0, *[1] * 49]


def test_a_daemon_that_never_was_ready_is_not_restarted(watch: Watch) -> None:
    attempts: list[int] = []

    def connect(attempt: int) -> Peer:
        attempts.append(attempt)
        raise absent()

    with pytest.raises(DeviceError, match="cannot connect"):
        watch(connect).hello()
    assert within(60, is_over) and attempts == [0]


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        (Hello("0.0.0", 7, (FACTS,)), f"shard: the daemon is Luce 0.0.0, this is Luce {__version__}"),
        (Hello(__version__, 7, ()), "shard: the daemon opened other devices than it was asked to"),
        (Hello(__version__, 7, (FACTS, FACTS)), "shard: the daemon opened other devices than it was asked to"),
    ],
    ids=["version", "no device", "two devices"],
)
@pytest.mark.parametrize("life", [0, 1], ids=["first life", "second life"])
def test_a_daemon_of_another_version_or_with_other_devices(
    clock: Clock, watch: Watch, life: int, hello: Hello, why: str
) -> None:
    # The daemon compares versions too; here it lies about its own.
    daemon = watch(lambda attempt: Peer(hello=hello) if attempt >= life else Peer(dies=True))
    assert within(60, is_over), "it is served"
    assert daemon.down() == why and not daemon.ready()
    if not life:
        with pytest.raises(LuceError) as caught:
            daemon.wait_loaded(Loaded)
        assert str(caught.value) == why


@pytest.mark.parametrize("other", [Loaded((), (8,), (), 1, flags=False), Loaded((), (), (), 2, flags=False)], ids=str)
def test_a_restarted_daemon_that_has_loaded_something_else(clock: Clock, watch: Watch, other: Loaded) -> None:
    daemon = watch(lambda attempt: Peer(loaded=other) if attempt else Peer(dies=True))
    assert within(60, is_over), "it is served"
    assert daemon.down() == "shard: the restarted daemon has loaded something else than before"
