"""A daemon at work: its steps, on one device and on two side by side, and what its heartbeats say meanwhile."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from luce import __version__
from luce.errors import DeviceError
from luce.ipc.lifecycle import Failed, Open, Pong
from luce.remote import daemon
from luce.remote.messages import Done, Forward, Loaded, Response, Save, Saved
from luce.runtime.device import Memory
from luce.runtime.host import HostDevice
from luce.runtime.step import Step
from luce.shard import memory_watch
from luce.shard.local import LocalShard
from luce.shard.shard import Activation, Pending
from tests.support.daemons import within
from tests.support.shard_session import LAYERS, OPEN, STEP, WHOLE, Server, changed, server
from tests.support.values import same

__all__ = ["server"]


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
