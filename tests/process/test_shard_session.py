"""A daemon's responses: it refuses invalid requests with a reason, and goes on."""

from __future__ import annotations

import dataclasses
import itertools
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from luce import __version__
from luce.errors import DeviceError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import open_gguf
from luce.ipc.arena import shared_arena
from luce.ipc.channel import Channel
from luce.ipc.lifecycle import Failed, Hello, Open, Ping, Pong
from luce.profiles.profile import Observed
from luce.remote import daemon
from luce.remote.daemon import serve
from luce.remote.messages import (
    Announce,
    Done,
    Drop,
    Embed,
    Fetch,
    Forward,
    Load,
    Loaded,
    LoadState,
    Observe,
    Project,
    RankPages,
    Response,
    Restore,
    Save,
    Saved,
    Tensors,
    UpdateRanking,
)
from luce.remote.shared_layout import shared_size
from luce.runtime.device import Memory
from luce.runtime.host import HostDevice
from luce.runtime.step import MAX_CANDIDATES, PageView, Span, Step
from luce.shard import memory_watch
from luce.shard.local import LocalShard
from luce.shard.shard import Activation, Pending
from luce.shard.sizes import activation_widths
from tests.support.daemons import within
from tests.support.reference import Reference
from tests.support.values import same

REFERENCE = Reference("qwen3-a-F32")
ROWS = 8
OPEN = Open(__version__, ("cpu:0",), "info", 0, "float32")


class Server:
    """The server's end of a daemon in a thread of this process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        heartbeat, their_heartbeat = socket.socketpair()
        self.heartbeat: Channel[Pong] = Channel(heartbeat, Pong)
        self.channel: Channel[Response] = Channel(ours, Response)
        self.number = 0
        arguments = {"can_share": True, "server_timeout": 600.0}
        self.thread = threading.Thread(target=serve, args=(theirs, their_heartbeat), kwargs=arguments)
        self.thread.start()

    def send(self, message: Any) -> None:
        self.number += 1
        self.channel.send(self.number, message, timeout=5)

    def ask(self, message: Any, fd: int | None = None) -> Response:
        self.send(message)
        if fd is not None:
            self.channel.send_descriptor(fd, timeout=5)
        number, reply = self.channel.receive(timeout=60, limit=1 << 26)
        assert number == self.number
        return reply

    def announce(self, step: Step, source: int, target: int) -> None:
        self.channel.send(0, Announce(step, source, target), timeout=5)

    def pong(self) -> Pong:
        """A heartbeat."""
        self.heartbeat.send(0, Ping(), timeout=5)
        return self.heartbeat.receive(timeout=60)[1]

    def refused(self, message: Any, why: str, error: str = "BackendError") -> None:
        reply = self.ask(message)
        assert isinstance(reply, Failed) and reply.error == error and why in reply.message, reply

    def close(self) -> None:
        self.channel.close()
        self.heartbeat.close()
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def load_of(begin: int, end: int) -> Load:
    spec = REFERENCE.spec
    size = shared_size(ROWS, activation_widths(spec, begin), activation_widths(spec, end))
    with open_gguf(REFERENCE.path) as file:
        mark = fingerprint(file)
    pages = (4,) * len(spec.page_groups)
    kv = ("auto", "auto")
    return Load(str(REFERENCE.path), mark, ((begin, end),), pages, 2, kv, 0, (), True, (0,), ROWS, True, size, False)


def changed(message: Load, **fields: Any) -> Load:
    values = {name: getattr(message, name) for name in message.__struct_fields__}
    return Load(**{**values, **fields})


LAYERS = len(REFERENCE.spec.layers)
WHOLE = load_of(0, LAYERS)
STEP = Step.of_spans(
    [Span(1, 0, 3, 0)],
    [1, 2, 3],
    (
        PageView(
            np.array([[2]], np.int32),
            np.zeros((1, 1), np.int32),
            np.ones(1, np.int32),
            np.arange(128, 131, dtype=np.int32),
        ),
    ),
    [2],
    needs_logits=True,
)


def test_opening(server: Server) -> None:
    server.refused(Open("0.0.0", ("cpu:0",), "info", 0, "float32"), "Luce 0.0.0")
    server.refused(Open(__version__, ("frob:0",), "info", 0, "float32"), "frob:0", "UsageError")
    server.refused(Open(__version__, ("cuda:77",), "info", 0, "float32"), "cuda:77", "UsageError")
    server.refused(WHOLE, "no devices are open")
    server.refused(Forward(), "nothing is loaded")
    hello = server.ask(OPEN)
    assert isinstance(hello, Hello) and hello.devices[0].host and hello.pid == os.getpid()
    server.refused(OPEN, "already")


def test_a_refused_load_leaves_no_descriptor(server: Server) -> None:
    with_memory = changed(WHOLE, shared=True)
    arena = shared_arena(WHOLE.arena)
    assert arena.fd is not None
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        reply = server.ask(with_memory, arena.fd)
        assert isinstance(reply, Failed) and "no devices are open" in reply.message
    assert len(os.listdir("/proc/self/fd")) == before
    server.ask(OPEN)
    reply = server.ask(changed(with_memory, arena=WHOLE.arena + 4096), arena.fd)
    assert isinstance(reply, Failed) and "too small" in reply.message
    assert len(os.listdir("/proc/self/fd")) == before
    arena.close()


LOADS: dict[str, tuple[dict[str, Any], str, str]] = {
    "another file": ({"fingerprint": "0" * 32}, "contents differ", "ModelError"),
    "no file": ({"path": "/no/such.gguf"}, "/no/such.gguf", "ModelError"),
    "layers": ({"layers": ((0, LAYERS + 1),)}, "layers", "BackendError"),
    "no layers": ({"layers": ((1, 1),)}, "layers", "BackendError"),
    "another device": ({"devices": (1,)}, "layers for devices (1,) of 1", "BackendError"),
    "a device before the first": ({"devices": (-1,)}, "layers for devices", "BackendError"),
    "a device twice": ({"devices": (0, 0)}, "layers for devices", "BackendError"),
    "holes": ({"layers": ((0, 1), (2, 3))}, "layers", "BackendError"),
    "slots": ({"slots": 0}, "do not fit", "BackendError"),
    "activations": ({"activations": "f8"}, "activations as 'f8'", "BackendError"),
    "groups": ({"pages": (4, 4, 4)}, "do not fit", "BackendError"),
    "pages": ({"pages": (1 << 40,)}, "do not fit", "BackendError"),
    "arena": ({"arena": 1 << 45}, "shared memory", "OutOfMemoryError"),
    "other arena": ({"arena": 4096}, "shared memory", "BackendError"),
}


@pytest.mark.parametrize("name", LOADS)
def test_loads(server: Server, name: str) -> None:
    fields, why, error = LOADS[name]
    server.ask(OPEN)
    base = load_of(1, LAYERS) if name == "other arena" else WHOLE
    server.refused(changed(base, **fields), why, error)
    assert isinstance(server.ask(WHOLE), Loaded)
    server.refused(WHOLE, "already")


def test_shared_memory_that_could_shrink(server: Server) -> None:
    server.ask(OPEN)
    load = changed(load_of(1, LAYERS), shared=True)
    fd = os.memfd_create("loose")
    os.ftruncate(fd, load.arena)
    reply = server.ask(load, fd)
    os.close(fd)
    assert isinstance(reply, Failed) and "too small" in reply.message
    arena = shared_arena(load.arena)
    with pytest.raises(OSError):
        os.ftruncate(arena.fd or -1, 0)
    assert isinstance(server.ask(load, arena.fd), Loaded)
    arena.close()


def view(**fields: Any) -> dict[str, Any]:
    return {"views": (replace(STEP.views[0], **fields),)}


STEPS: dict[str, dict[str, Any]] = {
    "token": {"tokens": np.array([1, 2, 1 << 30], np.int32)},
    "negative token": {"tokens": np.array([1, 2, -1], np.int32)},
    "positions": {"positions": np.arange(2, dtype=np.int32)},
    "slot": {"spans": (Span(2, 0, 3, 0),)},
    "rows": {"spans": (Span(1, 0, 4, 0),)},
    "overlap": {"spans": (Span(1, 0, 2, 0), Span(0, 1, 2, 0))},
    "output_rows": {"output_rows": np.array([3], np.int32)},
    "needs_logits": {"needs_logits": np.ones(2, np.bool_)},
    "no views": {"views": ()},
    "page": view(table=np.array([[4]], np.int32)),
    "table": view(table=np.zeros((2, 1), np.int32)),
    "count": view(count=np.array([2], np.int32)),
    "dest": view(dest=np.array([0, 1, 256], np.int32)),
    "seen": view(seen=np.zeros((3, 1), np.int32)),
    "no rows": {"tokens": np.empty(0, np.int32), "positions": np.empty(0, np.int32), "spans": ()},
}


def test_steps(server: Server) -> None:
    server.ask(OPEN)
    server.ask(WHOLE)

    def output() -> Done:
        server.announce(STEP, -1, -1)
        reply = server.ask(Forward())
        assert isinstance(reply, Done) and reply.output is not None
        return reply

    expected = output().output
    assert expected is not None
    server.refused(Forward(), "no step was announced")
    for fields in STEPS.values():
        server.announce(replace(STEP, **fields), -1, -1)
        server.refused(Forward(), "")
    for places in ((0, -1), (-1, 0), (4, 4)):
        server.announce(STEP, *places)
        server.refused(Forward(), "place")
    server.announce(replace(STEP, **STEPS["token"]), -1, -1)
    output()
    rows = np.zeros((2, REFERENCE.spec.hidden), np.float32)
    for message in (
        Save(7, 2, ((0,),), False),
        Save(7, 0, ((4,),), False),
        Save(7, 0, (), False),
        LoadState(0, ((0,),), (0, LAYERS), {}),
        LoadState(0, ((4,),), (0, LAYERS), {}),
        Fetch(7, (), 0, None),
        Restore(7, 0, ((0,),), 0),
        UpdateRanking(2, (0,), (0,)),
        UpdateRanking(0, (0,), (4,)),
        UpdateRanking(0, (-1,), (0,)),
        UpdateRanking(0, (0, 1), (0,)),
        UpdateRanking(0, (1 << 24,), (0,)),
        UpdateRanking(2, (), ()),
        UpdateRanking(-1, (), ()),
        RankPages(2, 0, np.array([0], np.int32)),
        RankPages(0, 0, np.array([0], np.int32)),
        RankPages(0, -1, np.array([0], np.int32)),
        RankPages(0, 0, np.array([-1], np.int32)),
        RankPages(0, 0, np.array([[0]], np.int32)),
        RankPages(0, 0, np.array([1, 0], np.int32)),
        Embed(np.array([0, REFERENCE.spec.vocab], np.int32)),
        Embed(np.array([-1], np.int32)),
        Embed(np.zeros((1, 1), np.int32)),
        Project(rows[0], 1, False, 0, 0),
        Project(rows[:, 1:], 1, False, 0, 0),
        Project(rows, -1, False, 0, 0),
        Project(rows, MAX_CANDIDATES + 1, False, 0, 0),
        Project(rows, 1, False, -1, 0),
        Project(rows, 1, False, 1, float("nan")),
    ):
        server.refused(message, "")
    saved = server.ask(Save(5, 1, ((2,),), False))
    assert isinstance(saved, Saved) and f"blk.{LAYERS - 1}.k" in saved.tensors
    fetched = server.ask(Fetch(5, tuple(saved.tensors), 0, None))
    assert isinstance(fetched, Tensors) and fetched.tensors.keys() == saved.tensors.keys()
    assert sum(tensor.nbytes for tensor in fetched.tensors.values()) == saved.nbytes
    assert isinstance(server.ask(Restore(5, 1, ((3,),), 0)), Done)
    server.refused(Restore(5, 1, ((1, 3),), 0), "was saved as")
    assert isinstance(server.ask(LoadState(1, ((3,),), (0, LAYERS), fetched.tensors)), Done)
    server.send(Drop((5,)))
    server.refused(Restore(5, 1, ((3,),), 0), "no saved state 5")
    for device, ratio in ((1, 1.0), (-1, 1.0), (0, 0.0), (0, -1.0), (0, float("nan")), (0, 1e30)):
        server.refused(Observe(device, "decode", Observed(ratio, 1000)), "nothing can be observed")
    server.refused(Observe(0, "prompt", Observed(1.0, 0)), "nothing can be observed")
    again = output().output
    assert again is not None and (again.logits == expected.logits).all()


def test_a_shard_gets_the_step_as_it_was_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Step] = []
    forward = LocalShard.forward

    def watched(self: LocalShard, step: Step, handed: Activation | None) -> Activation | Pending:
        seen.append(step)
        return forward(self, step, handed)

    monkeypatch.setattr(LocalShard, "forward", watched)
    server.ask(OPEN)
    server.ask(WHOLE)
    sent = replace(
        STEP,
        output_rows=np.array([0, 2], np.int32),
        needs_logits=np.array([True, False]),
        needs_candidates=np.array([False, True]),
    )
    server.announce(sent, -1, -1)
    assert isinstance(server.ask(Forward()), Done)
    assert len(seen) == 1
    assert all(same(getattr(seen[0], field.name), getattr(sent, field.name)) for field in dataclasses.fields(Step))


#: layers on two devices of a daemon
BOTH = changed(WHOLE, layers=((0, 2), (2, LAYERS)), unpack_bytes=(0, 0))


def prompts(server: Server, count: int) -> list[Response]:
    """The responses to `count` steps without an output, which are sent without waiting."""
    silent = replace(STEP, output_rows=STEP.output_rows[:0], needs_logits=STEP.needs_logits[:0])
    for _ in range(count):
        server.announce(silent, -1, -1)
        server.send(Forward())
    return [server.channel.receive(timeout=60)[1] for _ in range(count)]


def test_devices_of_a_daemon_work_side_by_side(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    # The second device has not begun the first step before the first one is at the second step.
    meeting = threading.Barrier(2)
    forward, steps = LocalShard.forward, dict.fromkeys((0, 2), 0)

    def watched(self: LocalShard, step: Step, handed: Activation | None) -> Activation | Pending:
        first = self.info.layers.start
        steps[first] += 1
        if (first, steps[first]) in ((0, 2), (2, 1)):
            meeting.wait(60)
        return forward(self, step, handed)

    server.ask(Open(__version__, ("cpu:0", "cpu:1"), "info", 0, "float32"))
    assert isinstance(server.ask(BOTH), Loaded)
    server.announce(STEP, -1, -1)
    expected = server.ask(Forward())
    assert isinstance(expected, Done) and expected.output is not None
    monkeypatch.setattr(LocalShard, "forward", watched)
    assert all(isinstance(reply, Done) for reply in prompts(server, 3)) and steps == {0: 3, 2: 3}
    # Later requests wait for the threads.
    server.announce(STEP, -1, -1)
    again = server.ask(Forward())
    assert isinstance(again, Done) and same(again.output, expected.output)


@pytest.mark.parametrize(
    "error", [DeviceError("out of order"), MemoryError("out of order"), ValueError("out of order")]
)
def test_steps_behind_a_failed_step_fail_too(server: Server, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    forward, at, go = LocalShard.forward, itertools.count(1), threading.Event()

    def watched(self: LocalShard, step: Step, handed: Activation | None) -> Activation | Pending:
        if self.info.layers.start == 0:
            return forward(self, step, handed)
        assert go.wait(60)
        if next(at) == 2:
            raise error
        return forward(self, step, handed)

    server.ask(Open(__version__, ("cpu:0", "cpu:1"), "info", 0, "float32"))
    server.ask(BOTH)
    monkeypatch.setattr(LocalShard, "forward", watched)
    threading.Timer(0.3, go.set).start()
    first, *rest = prompts(server, 4)
    assert isinstance(first, Done)
    assert all(isinstance(reply, Failed) and "out of order" in reply.message for reply in rest)
    server.announce(STEP, -1, -1)
    assert isinstance(server.ask(Forward()), Done)
    saved = server.ask(Save(5, 1, ((2,),), False))
    assert isinstance(saved, Saved) and f"blk.{LAYERS - 1}.k" in saved.tensors


def test_heartbeats_say_what_the_daemon_does(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    build, forward, go = LocalShard.__init__, LocalShard.forward, threading.Event()

    def read(self: LocalShard, *arguments: Any, **options: Any) -> None:
        *others, hooks = arguments

        def one() -> None:
            hooks.on_layer()
            go.wait(60)

        build(self, *others, replace(hooks, on_layer=one), **options)

    def stopped(self: LocalShard, step: Step, handed: Activation | None) -> Activation | Pending:
        go.wait(60)
        return forward(self, step, handed)

    pongs: list[Pong] = []

    def at(request: str, requests: int) -> Pong:
        def told() -> bool:
            pongs.append(server.pong())
            return (pongs[-1].request, pongs[-1].requests) == (request, requests)

        assert within(60, told)
        return pongs[-1]

    monkeypatch.setattr(LocalShard, "__init__", read)
    monkeypatch.setattr(LocalShard, "forward", stopped)
    assert server.pong() == Pong()
    server.ask(Open(__version__, ("cpu:0", "cpu:1"), "info", 0, "float32"))
    server.send(BOTH)
    assert within(60, lambda: server.pong().loaded > 0)
    loading = at("Load", 1)
    assert loading.loaded == 1 / LAYERS and loading.seconds > 0
    go.set()
    assert isinstance(server.channel.receive(timeout=60)[1], Loaded)
    assert at("", 0).loaded == 1.0
    go.clear()
    silent = replace(STEP, output_rows=STEP.output_rows[:0], needs_logits=STEP.needs_logits[:0])
    for _ in range(3):
        server.announce(silent, -1, -1)
        server.send(Forward())
    queued = at("Forward", 3)
    assert queued.seconds > 0 and queued.loaded == 1
    go.set()
    assert all(isinstance(server.channel.receive(timeout=60)[1], Done) for _ in range(3))
    assert at("", 0).loaded == 1.0


def test_heartbeats_have_the_free_memory(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, begun, go = LocalShard.forward, threading.Event(), threading.Event()
    free, threads = [100], set[threading.Thread]()

    def memory(self: HostDevice) -> Memory:
        threads.add(threading.current_thread())
        if not free[0]:
            raise DeviceError("it has fallen off the bus")
        return Memory(free[0], 1000 + self.name.index)

    def stopped(self: LocalShard, step: Step, handed: Activation | None) -> Activation | Pending:
        begun.set()
        go.wait(60)
        return forward(self, step, handed)

    def told(*memory: tuple[int, int]) -> bool:
        return within(60, lambda: server.pong().memory == memory)

    monkeypatch.setattr(HostDevice, "memory", memory)
    monkeypatch.setattr(LocalShard, "forward", stopped)
    for module in (daemon, memory_watch):
        monkeypatch.setattr(module, "INTERVAL", 0.01)
    assert server.pong().memory == ()
    server.ask(Open(__version__, ("cpu:0", "cpu:1"), "info", 0, "float32"))
    assert told((100, 1000), (100, 1001))
    # Also while there is no request, and when a device raises an error.
    for free[0], expected in ((90, ((90, 1000), (90, 1001))), (0, ()), (80, ((80, 1000), (80, 1001)))):
        assert told(*expected)
    server.ask(BOTH)
    server.announce(STEP, -1, -1)
    server.send(Forward())
    assert begun.wait(60)
    free[0] = 70
    # Other threads drive the devices now.
    assert all(server.pong().memory == ((80, 1000), (80, 1001)) for _ in range(20))
    go.set()
    assert isinstance(server.channel.receive(timeout=60)[1], Done)
    assert told((70, 1000), (70, 1001))
    assert threads == {server.thread}


def test_activations_that_do_not_fit(server: Server) -> None:
    load = load_of(1, LAYERS - 1)
    server.ask(OPEN)
    server.ask(load)
    width = REFERENCE.spec.hidden
    good = np.zeros(4 * 3 * width, np.uint8)
    for source, target, data in (
        (0, 4096, None),
        (0, 4096, good[4:]),
        (2, 4096, good),
        (0, load.arena, good),
        (-4, 4096, good),
        (load.arena - 4, 4096, good),
    ):
        server.announce(STEP, source, target)
        server.refused(Forward(data), "a")
    server.announce(STEP, 4096, 8192)
    done = server.ask(Forward(good))
    assert isinstance(done, Done) and done.data is not None and done.data.shape == good.shape
