"""A daemon that lies: whatever it sends, the server gets a LuceError or a right answer, in bounded time and memory."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from luce import __version__
from luce.backend.layersplit import LayerSplitBackend
from luce.backend.serving_options import ServingOptions
from luce.errors import LuceError
from luce.gguf.reader import open_gguf
from luce.ipc import supervisor
from luce.ipc.channel import Channel, checksum
from luce.ipc.lifecycle import Failed, Hello, Open, Pong
from luce.ipc.supervisor import Supervisor, Timeouts
from luce.remote import daemon
from luce.remote.device import RemoteDevice
from luce.remote.messages import Done, Loaded, Response, Saved, SavedTensor, Tensors
from luce.runtime.device import DeviceName
from luce.runtime.host import HostDevice
from luce.runtime.step import Candidates, Output, Step
from tests.support.drive import Driver, gathered
from tests.support.reference import Reference
from tests.support.threaded_daemon import ThreadedDaemon

REFERENCE = Reference("qwen35-a-Q8_0")
PROMPT = REFERENCE.expected["prompt_17"]


class SpoilingSocket(socket.socket):
    """A socket that spoils the next bytes that it sends, once `spoil` is set."""

    spoil = False

    def send(self, data: Any, flags: int = 0) -> int:
        if not self.spoil:
            return super().send(data, flags)
        self.spoil = False
        spoiled, chance = bytearray(data), Liar.random
        for _ in range(chance.randrange(1, 5)):
            spoiled[chance.randrange(min(len(spoiled), 400))] = chance.randrange(256)
        if chance.randrange(4):
            # So that the receiver gets beyond the checksum.
            spoiled[28:32] = struct.pack("<I", checksum(spoiled[:28], spoiled[32:]))
        if not chance.randrange(3):
            del spoiled[chance.randrange(len(spoiled)) :]
        self.settimeout(60)
        try:
            self.sendall(spoiled)
        finally:
            self.setblocking(False)
        return len(data)


class Liar(Channel[Any]):
    """A daemon's channel that spoils one of the frames it sends, `whole` frames after its start."""

    random: random.Random
    whole: int

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        super().__init__(SpoilingSocket(fileno=sock.detach()), incoming)

    def send(self, number: int, message: msgspec.Struct, *, timeout: float) -> None:  # type: ignore[override]
        if isinstance(message, Pong):
            super().send(number, message, timeout=timeout)
            return
        Liar.whole -= 1
        if Liar.whole != 0:
            super().send(number, message, timeout=timeout)
        elif self.random.randrange(2):
            super().send(number, _other(message, self.random), timeout=timeout)
        elif self.random.randrange(4):
            assert isinstance(self.socket, SpoilingSocket)
            self.socket.spoil = True
            super().send(number, message, timeout=timeout)
        else:
            super().send(self.random.randrange(1 << 64), message, timeout=timeout)


def _other(message: msgspec.Struct, chance: random.Random) -> msgspec.Struct:
    """A well-formed message instead of the right one."""

    def array(dtype: Any, *shape: int) -> np.ndarray[Any, Any]:
        return np.frombuffer(chance.randbytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape)

    some, few = chance.randrange(40), chance.randrange(3)
    ids, logits = array(np.int32, some), array(np.float32, few, chance.choice([1, REFERENCE.spec.vocab]))
    top = chance.choice([None, Candidates(array(np.int32, few, 64), array(np.float32, few, some))])
    output = chance.choice([None, Output(ids, logits, top), Output(np.full(1, 1 << 30, np.int32), logits[:0], top)])
    fetched = {} if not isinstance(message, Tensors) else dict(message.tensors)
    for name in list(fetched)[: chance.randrange(3)]:
        fetched[chance.choice([name, "blk.99.k", "", "blk.0.k", "x" * 1000])] = array(np.float16, few, some, 3)
    kinds = {} if not isinstance(message, Saved) else dict(message.tensors)
    for name in list(kinds)[: 1 + chance.randrange(3)]:
        shape = chance.choice([(-1, 2), (1 << 40, 1 << 40), (), (some, few), kinds[name].shape])
        kind = SavedTensor(chance.choice(["<f4", "frob", "|O8", ">f2", kinds[name].dtype]), shape, bool(few))
        kinds[chance.choice([name, "blk.99.k", "", "blk.0.k"])] = kind
    return chance.choice(
        [
            Done((chance.choice([0.0, -1.0, float("nan"), 1e300]),), output, array(np.uint8, some * 1000)),
            Done((0.0,), output, None),
            Saved(kinds, chance.choice([0, -1, some, 1 << 70 >> 8, 1 << 30])),
            Tensors(fetched),
            Tensors({"rows": array(np.float32, few, some)}),
            Failed(
                chance.choice(["BackendError", "Exception", "SystemExit", "LuceError", "MethodError", "\0"]),
                "\n" * some,
            ),
            Hello("?" * some, -1, ()),
            Loaded((), (some,), (), -1, bool(few)),
        ]
    )


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Daemons of this process lie."""
    monkeypatch.setattr(daemon, "Channel", Liar)
    monkeypatch.setattr(supervisor, "RESTARTS", 0)
    monkeypatch.setattr(supervisor, "SEND_TIMEOUT", 3.0)
    yield


class Trusting(Driver):
    """Believes a token that is not the likeliest one: no check can tell that lie from the truth."""

    def _logits(self, step: Step) -> list[NDArray[np.float32]]:
        logits = self.backend.forward(step).logits
        return [logits[span.start : span.start + span.rows] for span in step.spans]


def converse(whole: int, seed: int, limits: Timeouts) -> str:
    """Everything that a server does with a daemon that lies after `whole` true frames; returns how it ended."""
    Liar.random, Liar.whole = random.Random(seed), whole
    name = DeviceName("cpu", 1)
    opening = Open(__version__, ("cpu:1",), "error", 0, "float32")
    with ExitStack() as stack:
        file = stack.enter_context(open_gguf(REFERENCE.path))
        supervised = Supervisor("cpu:1", ThreadedDaemon, opening, limits, Response)
        stack.callback(supervised.close)
        try:
            device = RemoteDevice(name, supervised)
            backend = LayerSplitBackend(
                file, REFERENCE.spec, [HostDevice(0), device], ServingOptions(slots=2, context=128, microbatch=8)
            )
            stack.callback(backend.close)
            driver = Trusting(backend)
            sequence = driver.start()
            logits = driver.feed((sequence, PROMPT))[0]
            kept = driver.keep(sequence)
            gathered(kept)
            driver.resume(sequence, kept)
            last = backend.shards[-1]
            last.ends.project(np.zeros((3, REFERENCE.spec.hidden), np.float32), top=5)()
            driver.feed((sequence, PROMPT[:1]), wanted=False)
            driver.feed((sequence, PROMPT[:1]))
            assert np.isfinite(logits).all()
        except LuceError as error:
            assert len(str(error)) < 4000
            return type(error).__name__
    return "right"


@pytest.mark.usefixtures("lying")
@pytest.mark.parametrize("whole", range(1, 9))
def test_no_lie_does_more_than_fail_requests(whole: int) -> None:
    ends = [converse(whole, 1000 * whole + seed, Timeouts(3, 1)) for seed in range(6)]
    assert set(ends) - {"right"}, "no lie was noticed"


def test_the_truth_is_believed() -> None:
    assert converse(0, 0, Timeouts(60, 60)) == "right"
