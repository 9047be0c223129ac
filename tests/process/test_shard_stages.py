"""Daemons that fail while they load, read a prompt, decode or save: the error says why, and the next request works."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import luce
from luce import __version__
from luce.api import Model
from luce.backend.layersplit import LayerSplitBackend
from luce.backend.serving_options import ServingOptions
from luce.errors import BackendError, DeviceError, LuceError, ModelError, OutOfMemoryError, ShardLostError
from luce.gguf.reader import open_gguf
from luce.ipc import heartbeat, supervisor
from luce.ipc.channel import PROTOCOL
from tests.support.daemons import HERE, children, devices, interpreter, nothing_left, state, within
from tests.support.drive import Driver
from tests.support.reference import Reference

#: a recurrent model: the state behind a prompt is saved while the reply is generated
REFERENCE = Reference("qwen35-a-Q8_0")
PROMPT = REFERENCE.expected["prompt_17"].tolist()
EXPECTED = REFERENCE.expected["greedy_17"][:6].tolist()

#: `luce shard` that fails as a file says: at each stage it looks at the first line, and takes it if it is about it
GOES_WRONG = """
from pathlib import Path
import numpy as np
from luce.remote import daemon, daemon_shard
from luce.cli.main import main
from luce.ipc import channel

todo = Path({todo!r})
sockets = []

def go_wrong(misdeed):
    if misdeed == "memory":
        wasted = np.ones(1 << 23)
        daemon_shard.HostDevice(1).empty(1 << 46)
    if misdeed == "host memory":
        np.empty(1 << 50, np.uint8)
    if misdeed == "garbage":
        sockets[0].send(bytes(range(256)))
    if misdeed == "truncated":
        sockets[0].send(b"LUC" + bytes([channel.PROTOCOL, 200, 0, 0, 0]) + bytes(34))
        os._exit(0)
    if misdeed == "file":
        daemon_shard.fingerprint = lambda file: "0" * 32
    if misdeed == "version":
        daemon.__version__ = "0.0.0"
    if misdeed.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, misdeed))

def wrap(stage, owner, name, fits=lambda *_: True):
    inner = getattr(owner, name)
    def outer(self, *arguments):
        lines = todo.read_text().splitlines()
        if lines and fits(*arguments) and lines[0].startswith(stage + ": "):
            todo.write_text("\\n".join(lines[1:]))
            go_wrong(lines[0].removeprefix(stage + ": "))
        return inner(self, *arguments)
    setattr(owner, name, outer)

lines = todo.read_text().splitlines()
if lines[:1] == ["start: protocol"]:
    todo.write_text("\\n".join(lines[1:]))
    channel.PROTOCOL += 1
session = daemon.Session.__init__
def watched(self, channel, *rest, **options):
    sockets.append(channel.socket)
    session(self, channel, *rest, **options)
daemon.Session.__init__ = watched
wrap("start", daemon.Session, "open")
wrap("load", daemon_shard.ServedModel, "__init__")
wrap("prefill", daemon_shard.ServedModel, "forward", lambda message, *_: message.step.rows > 1)
wrap("decode", daemon_shard.ServedModel, "forward", lambda message, *_: message.step.rows == 1)
for name in ("accept", "update_ranking", "save", "restore", "fetch", "load_state"):
    wrap(name, daemon_shard.ServedModel, name)
sys.exit(main(sys.argv[4:]))
"""
#: how a daemon dies, and the error
DEATHS = {
    "SIGKILL": "ended by SIGKILL",
    "SIGSEGV": "ended by SIGSEGV",
    "SIGSTOP": "it has sent no heartbeat",
    "garbage": "it sent bytes that are not a frame",
    "truncated": "it ended with status 0",
}
#: which memory runs out, and the error
MEMORY = {
    "memory": r"cpu:1: 281474976710656 bytes asked, \d+ bytes free",
    "host memory": r"host memory: Unable to allocate .*; \d+ bytes free",
}
VERSIONS = {
    "version": rf"the server is Luce {re.escape(__version__)}, the daemon Luce 0.0.0",
    "protocol": rf".*it speaks protocol {PROTOCOL + 1}, this is Luce {re.escape(__version__)} with protocol {PROTOCOL}",
}
FILES = {"file": "the daemon's file is not the server's: their contents differ"}


@dataclass
class Plan:
    """A daemon's interpreter, and how its processes fail."""

    program: Path
    todo: Path

    def say(self, *lines: str) -> None:
        """The failures from now on, each once, in this order: `stage: misdeed`."""
        self.todo.write_text("\n".join(lines))

    def load(self, **settings: Any) -> Model:
        """A model whose second device is in a daemon that fails."""
        settings = {"max_ctx": 1024, "chunk": 16, **settings}
        return luce.load(REFERENCE.path, target_devices="cpu:0,cpu:1", target_shard_ipc_bin=self.program, **settings)

    def done(self) -> bool:
        """Whether all failures have happened."""
        return not self.todo.read_text()


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Nothing fails yet."""
    todo = tmp_path / "todo"
    todo.write_text("")
    return Plan(interpreter(tmp_path / "python", GOES_WRONG.format(todo=str(todo))), todo)


@pytest.fixture(scope="module", autouse=True)
def first() -> None:
    """The first daemon of a process opens files and threads that stay open."""
    luce.load(REFERENCE.path, target_devices="cpu:0,cpu:1", target_shard_ipc_bin=HERE).close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon counts as silent as soon as it is stopped, and never otherwise; it is restarted at once."""
    ping = heartbeat.Heartbeat.ping

    def pinged(self: heartbeat.Heartbeat) -> None:
        if any(state(pid) == "T" for pid in children()):
            self.heard_at -= 1e6
        ping(self)

    monkeypatch.setattr(heartbeat.Heartbeat, "ping", pinged)
    monkeypatch.setattr(heartbeat, "LOST_AFTER", 1e5)
    monkeypatch.setattr(supervisor, "RESTARTS", 100)
    monkeypatch.setattr(supervisor, "RESTART_DELAYS", (0.0,) * 100)


@pytest.fixture(autouse=True)
def _nothing_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with nothing_left(caplog):
        yield


def reply(model: Model, turned: int = 0) -> list[int]:
    """The reply to the prompt, or to the prompt with `turned` tokens moved to its end, which no cache has."""
    prompt = PROMPT[turned:] + PROMPT[:turned]
    return [token.id for token in model.generate(prompt, max_tokens=6, temperature=0, ignore_eos=True)]


@pytest.mark.parametrize("stage", ["prefill", "decode", "save", "restore"])
def test_death_in_a_request(plan: Plan, stage: str) -> None:
    with plan.load() as model:
        for turned, (death, reason) in enumerate(DEATHS.items(), 1):
            before = children()
            if stage == "restore":
                assert reply(model) == EXPECTED
            plan.say(f"{stage}: {death}")
            with pytest.raises(ShardLostError) as caught:
                reply(model, 0 if stage == "restore" else turned)
            assert str(caught.value).startswith("shard 1 (cpu:1): the daemon is lost: ")
            assert reason in str(caught.value) and plan.done()
            assert reply(model) == EXPECTED
            assert len(children()) == 1 and not children() & before


@pytest.mark.parametrize("death", ["SIGKILL", "garbage"])
def test_death_beside_a_cache_on_disk(plan: Plan, death: str, tmp_path: Path) -> None:
    settings = {"kv_cache_dir": str(tmp_path / "cache"), "kv_cache_min_tokens": 1}
    with plan.load(**settings) as model:
        plan.say(f"fetch: {death}")
        # The saved state is written to disk during the reply, or after it.
        with contextlib.suppress(ShardLostError):
            reply(model, 1)
        assert within(60, plan.done)
        assert reply(model) == EXPECTED
    with plan.load(**settings) as model:
        plan.say(f"load_state: {death}")
        with pytest.raises(ShardLostError, match=DEATHS[death]):
            reply(model)
        assert plan.done() and reply(model) == EXPECTED


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("stage", ["start", "load"])
def test_death_in_a_start(plan: Plan, stage: str, death: str) -> None:
    plan.say(f"{stage}: {death}")
    with pytest.raises(DeviceError) as caught:
        plan.load()
    # The name of the shard is known once it is to load.
    named = "cpu:1: " if stage == "start" else "shard 1 (cpu:1): "
    assert str(caught.value).startswith(f"{named}the daemon is lost: ") and DEATHS[death] in str(caught.value)


@pytest.mark.parametrize(
    ("line", "error", "why"),
    [
        *((f"start: {kind}", OutOfMemoryError, f"^cpu:1: .*{why}") for kind, why in MEMORY.items()),
        *(
            (f"load: {kind}", OutOfMemoryError, rf"^shard 1 \(cpu:1\): .*{MEMORY[kind]}.*; it needs \d+ bytes in all")
            for kind in MEMORY
        ),
        *((f"start: {kind}", LuceError, f"^cpu:1: {why}") for kind, why in VERSIONS.items()),
        ("load: file", ModelError, rf"^shard 1 \(cpu:1\): .*{FILES['file']}"),
    ],
)
def test_what_refuses_a_start(plan: Plan, line: str, error: type[LuceError], why: str) -> None:
    plan.say(line)
    with pytest.raises(error, match=why):
        plan.load()


@pytest.mark.parametrize("stage", ["start", "load"])
def test_later_starts_that_go_wrong(plan: Plan, stage: str, caplog: pytest.LogCaptureFixture) -> None:
    """Restarts fail in each way, until one succeeds."""
    caplog.set_level(logging.WARNING, logger="luce.ipc.supervisor")
    reasons = {**DEATHS, **MEMORY, **(VERSIONS if stage == "start" else FILES)}
    with plan.load() as model:
        (first,) = children()
        assert reply(model) == EXPECTED
        plan.say(*(f"{stage}: {misdeed}" for misdeed in reasons))
        os.kill(first, signal.SIGKILL)
        assert within(60, lambda: first not in children())
        # Waits for the last restart.
        assert reply(model) == EXPECTED
        assert len(children()) == 1 and plan.done()
        lines = [text for record in caplog.records if (text := record.getMessage()).endswith("; restarting it")]
        assert len(lines) == 1 + len(reasons)
        for line, reason in zip(lines, ("SIGKILL", *reasons.values()), strict=True):
            assert line.startswith("shard 1 (cpu:1): ") and re.search(reason, line), line


@pytest.mark.parametrize(("line", "why"), [("start: version", VERSIONS["version"]), ("load: file", FILES["file"])])
def test_another_program_or_file_after_a_death(
    plan: Plan, line: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Program or file have changed on disk while the server ran: the server says so, and goes on running."""
    monkeypatch.setattr(supervisor, "RESTARTS", 2)
    with plan.load() as model:
        plan.say("decode: SIGKILL", line, line)
        with pytest.raises(ShardLostError, match="ended by SIGKILL"):
            reply(model)
        with pytest.raises(ShardLostError, match=rf"^shard 1 \(cpu:1\): .*{why}"):
            reply(model)
        assert re.search(why, model.down()) and not children() and plan.done()


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_no_memory_in_a_step(plan: Plan, stage: str) -> None:
    with plan.load(parallel=2) as model:
        before = children()
        for turned, (kind, why) in enumerate(MEMORY.items(), 1):
            plan.say(f"{stage}: {kind}")
            with pytest.raises(LuceError, match=rf"^shard 1 \(cpu:1\): .*{why}") as caught:
                reply(model, turned)
            assert isinstance(caught.value, (OutOfMemoryError, BackendError))
            assert not isinstance(caught.value, ShardLostError)
            assert reply(model) == EXPECTED and children() == before


def test_no_memory_in_a_save(plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="luce.kvcache")
    with plan.load() as model:
        before = children()
        for turned, (kind, why) in enumerate(MEMORY.items(), 1):
            plan.say(f"save: {kind}")
            # The reply goes on without a cached prefix.
            assert len(reply(model, turned)) == 6
            assert re.search(rf"a checkpoint could not be saved: shard 1 \(cpu:1\): .*{why}", caplog.text)
            caplog.clear()
            assert reply(model) == EXPECTED and children() == before


def test_no_memory_to_accept_rows(plan: Plan) -> None:
    """The processes have accepted different rows: no reply continues from their states."""
    interpreters = {"target_shard_ipc_bin": (("", plan.program),)}
    with open_gguf(REFERENCE.path) as file, devices("cpu:0,cpu:1", **interpreters) as opened:
        backend = LayerSplitBackend(file, REFERENCE.spec, opened, ServingOptions(slots=2, context=128, verify_rows=4))
        with contextlib.closing(backend):
            driver = Driver(backend)
            for kind, why in MEMORY.items():
                sequence = driver.start()
                driver.feed((sequence, np.array(PROMPT, np.int32)))
                driver.verify((sequence, np.array([1, 2, 3], np.int32)))
                driver.accept(sequence, 2)
                plan.say(f"accept: {kind}")
                with pytest.raises(OutOfMemoryError, match=rf"^shard 1 \(cpu:1\): .*{why}"):
                    driver.keep(sequence)
                assert plan.done()
                assert re.match(rf"rows could not be accepted: shard 1 \(cpu:1\): .*{why}", backend.lost())
                assert not backend.lost()
                driver.end(sequence)


def test_no_memory_to_rank_pages(plan: Plan) -> None:
    interpreters = {"target_shard_ipc_bin": (("", plan.program),)}
    with open_gguf(REFERENCE.path) as file, devices("cpu:0,cpu:1", **interpreters) as opened:
        backend = LayerSplitBackend(file, REFERENCE.spec, opened, ServingOptions(slots=2, context=128, rank_pages=True))
        with contextlib.closing(backend):
            driver = Driver(backend)
            sequence = driver.start()
            driver.feed((sequence, np.resize(np.array(PROMPT, np.int32), 70)))
            (page,) = sequence.pages[backend.capacity.windows.index(None)][:1]
            entries = np.zeros(1, np.int32)
            for kind, why in MEMORY.items():
                plan.say(f"update_ranking: {kind}")
                # The response comes after the steps that are queued, so the next `rank` raises the error.
                backend.ranking.add(sequence.slot, [0], [page])
                with pytest.raises(OutOfMemoryError, match=rf"^shard 1 \(cpu:1\): .*{why}"):
                    backend.ranking.rank(sequence.slot, 69, entries)
                backend.ranking.add(sequence.slot, [0], [page])
                assert backend.ranking.rank(sequence.slot, 69, entries).tolist() == [1.0] and plan.done()


def test_nothing_leaks_where_memory_runs_out(plan: Plan) -> None:
    with plan.load() as model:
        (pid,) = children()

        def fail() -> None:
            plan.say("prefill: memory")
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
