"""Daemons that go wrong while they load, read a prompt, decode or save: what is said of it, and that all goes on."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import luce
from luce.api import Model
from luce.errors import BackendError, DeviceError, LuceError, OutOfMemoryError, ShardLostError
from tests.support.daemons import HERE, children, descriptors, interpreter, within
from tests.support.reference import Reference

#: a recurrent model: the state behind a prompt is saved while the reply is generated
REFERENCE = Reference("qwen35-a-Q8_0")
PROMPT = REFERENCE.expected["prompt_17"].tolist()
EXPECTED = REFERENCE.expected["greedy_17"][:6].tolist()

#: `luce shard` that goes wrong at a stage of some of its lives: in each of them once, or always
GOES_WRONG = """
from pathlib import Path
import numpy as np
from luce.backend import daemon, served
from luce.cli.main import main

stage, misdeed, lives, always, marker = {stage!r}, {misdeed!r}, {lives!r}, {always!r}, Path({marker!r})
with marker.open("a") as file:
    file.write("x")
left = (1 << 30 if always else 1) * (len(marker.read_text()) in lives)
sockets = []

def go_wrong(model):
    if misdeed == "memory":
        wasted = np.ones(1 << 23)
        model.devices[0].empty(1 << 46)
    if misdeed == "host memory":
        np.empty(1 << 50, np.uint8)
    if misdeed == "garbage":
        sockets[0].send(bytes(range(256)))
    if misdeed == "truncated":
        sockets[0].send(b"LUC1" + bytes([200, 0, 0, 0]) + bytes(34))
        os._exit(0)
    if isinstance(misdeed, int):
        os.kill(os.getpid(), misdeed)

def wrap(owner, name, fits):
    inner = getattr(owner, name)
    def outer(self, *arguments):
        global left
        if left and fits(*arguments):
            left -= 1
            go_wrong(self)
        return inner(self, *arguments)
    setattr(owner, name, outer)

session = daemon._Session.__init__
def watched(self, channel, *rest):
    sockets.append(channel.socket)
    session(self, channel, *rest)
daemon._Session.__init__ = watched
build = served.ServedModel.__init__
def built(self, path, load, devices, *rest):
    self.devices = devices
    build(self, path, load, devices, *rest)
served.ServedModel.__init__ = built
wrap(served.ServedModel, *{{
    "load": ("__init__", lambda *_: True),
    "prefill": ("forward", lambda message, *_: message.step.rows > 1),
    "decode": ("forward", lambda message, *_: message.step.rows == 1),
    "save": ("save", lambda *_: True),
}}[stage])
if stage == "load":
    # The device is there before the model is.
    served.ServedModel.devices = [served.HostDevice(1)]
sys.exit(main(sys.argv[4:]))
"""
STAGES = ["prefill", "decode", "save"]
#: what happens, and what is said of it
DEATHS: dict[str, tuple[int | str, str]] = {
    "SIGKILL": (int(signal.SIGKILL), "ended by SIGKILL"),
    "SIGSEGV": (int(signal.SIGSEGV), "ended by SIGSEGV"),
    "SIGSTOP": (int(signal.SIGSTOP), "it does not answer"),
    "garbage": ("garbage", "it sent something that is no frame"),
    "truncated": ("truncated", "it ended with status 0"),
}
#: what cannot be had, and what is said of it
MEMORY = {
    "memory": r"cpu:1: 281474976710656 bytes asked, \d+ bytes free",
    "host memory": r"host memory: Unable to allocate .*; \d+ bytes free",
}
Load = Callable[..., Model]


@pytest.fixture(scope="module", autouse=True)
def first() -> None:
    """The first daemon of a process makes what stays."""
    luce.load(REFERENCE.path, target_devices="cpu:0,cpu:1", target_shard_ipc_bin=HERE).close()


@pytest.fixture(autouse=True)
def nothing_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No process, no descriptor and no thread outlives a test."""
    gc.collect()
    open_before, threads = descriptors(), threading.active_count()
    yield
    # Records hold errors, errors hold frames, and frames hold the memory that was shared.
    caplog.get_records("call").clear()
    gc.collect()
    assert not children()
    assert descriptors() == open_before and threading.active_count() == threads


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads a model whose second device is in a daemon that goes wrong."""

    def one(stage: str, misdeed: int | str, lives: tuple[int, ...] = (1,), always: bool = False, **more: Any) -> Model:
        fields = {
            "stage": stage,
            "misdeed": misdeed,
            "lives": lives,
            "always": always,
            "marker": str(tmp_path / "lives"),
        }
        program = interpreter(tmp_path / "python", GOES_WRONG.format(**fields))
        settings = {"max_ctx": 1024, "chunk": 16, "shard_timeout": 2, **more}
        return luce.load(REFERENCE.path, target_devices="cpu:0,cpu:1", target_shard_ipc_bin=program, **settings)

    return one


def reply(model: Model) -> list[int]:
    return [token.id for token in model.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True)]


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("stage", STAGES)
def test_death_in_a_request(load: Load, stage: str, death: str) -> None:
    misdeed, reason = DEATHS[death]
    with load(stage, misdeed) as model:
        (before,) = children()
        with pytest.raises(ShardLostError) as caught:
            reply(model)
        assert str(caught.value).startswith("shard 1 (cpu:1): cpu:1: the daemon is lost: ")
        assert reason in str(caught.value)
        assert reply(model) == EXPECTED
        assert len(children()) == 1 and before not in children()


@pytest.mark.parametrize("death", DEATHS)
def test_death_in_the_first_load(load: Load, death: str) -> None:
    misdeed, reason = DEATHS[death]
    stopped = death == "SIGSTOP"
    with pytest.raises(DeviceError) as caught:
        load("load", misdeed, **({"shard_start_timeout": 10} if stopped else {}))
    expected = "it has not started within 10 s" if stopped else reason
    assert str(caught.value).startswith("cpu:1: the daemon is lost: ") and expected in str(caught.value)


@pytest.mark.parametrize("death", DEATHS)
def test_death_in_a_later_load(load: Load, death: str) -> None:
    misdeed, _ = DEATHS[death]
    with load("load", misdeed, lives=(2,), **({"shard_start_timeout": 10} if death == "SIGSTOP" else {})) as model:
        (first,) = children()
        assert reply(model) == EXPECTED
        os.kill(first, signal.SIGKILL)
        # Waits for the third life.
        assert within(60, lambda: first not in children())
        assert reply(model) == EXPECTED
        assert len(children()) == 1


@pytest.mark.parametrize("kind", MEMORY)
def test_no_memory_in_a_load(load: Load, kind: str) -> None:
    with pytest.raises(OutOfMemoryError, match=rf"^shard 1 \(cpu:1\): layers \d+\.\.\d+: cpu:1: .*{MEMORY[kind]}"):
        load("load", kind)


@pytest.mark.parametrize("kind", MEMORY)
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_no_memory_in_a_step(load: Load, stage: str, kind: str) -> None:
    with load(stage, kind, parallel=2) as model:
        before = children()
        with pytest.raises(LuceError, match=rf"^shard 1 \(cpu:1\): .*{MEMORY[kind]}") as caught:
            reply(model)
        assert isinstance(caught.value, (OutOfMemoryError, BackendError)) and not isinstance(
            caught.value, ShardLostError
        )
        assert reply(model) == EXPECTED and children() == before


@pytest.mark.parametrize("kind", MEMORY)
def test_no_memory_in_a_save(load: Load, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="luce.cache")
    with load("save", kind) as model:
        before = children()
        # The reply is worth more than its cached prefix.
        assert reply(model) == EXPECTED
        assert re.search(rf"a prefix could not be kept: shard 1 \(cpu:1\): .*{MEMORY[kind]}", caplog.text)
        caplog.clear()
        assert reply(model) == EXPECTED and children() == before


def test_nothing_leaks_where_memory_runs_out(load: Load) -> None:
    with load("prefill", "memory", always=True) as model:
        (pid,) = children()

        def fail() -> None:
            with pytest.raises(LuceError, match="bytes asked"):
                reply(model)

        def held() -> tuple[int, list[str]]:
            folder = Path(f"/proc/{pid}")
            resident = re.search(r"VmRSS:\s+(\d+) kB", (folder / "status").read_text())
            assert resident is not None
            return int(resident[1]), sorted(os.readlink(entry) for entry in (folder / "fd").iterdir())

        for _ in range(3):
            fail()
        size, open_before = held()
        for _ in range(12):
            fail()
        assert children() == {pid} and held()[1] == open_before
        # Each failure takes 64 MiB on its way.
        assert held()[0] < size + 3 * 65536
