"""A daemon's responses: it refuses invalid requests with a reason, and goes on."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from luce import __version__
from luce.ipc.arena import shared_arena
from luce.ipc.lifecycle import Failed, Hello, Open
from luce.profiles.profile import Observed
from luce.remote.messages import (
    Done,
    Drop,
    Embed,
    Fetch,
    Forward,
    Loaded,
    LoadState,
    Observe,
    Project,
    RankPages,
    Restore,
    Save,
    Saved,
    Tensors,
    UpdateRanking,
)
from luce.runtime.step import MAX_CANDIDATES, Span
from tests.support.shard_session import LAYERS, OPEN, REFERENCE, STEP, WHOLE, Server, changed, load_of, server

__all__ = ["server"]


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
