"""Daemons that die, stop or never start: the error names the shard and the reason, and the next request works."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

import luce
from luce.api import Model
from luce.backend.layersplit import LayerSplitBackend
from luce.backend.serving_options import ServingOptions
from luce.errors import DeviceError, LuceError, OutOfMemoryError, ShardLostError
from luce.gguf.reader import open_gguf
from luce.ipc import heartbeat, supervisor
from luce.ipc.child import Child
from luce.ipc.supervisor import Timeouts
from luce.remote.shard import RemoteShard
from luce.runtime import driver
from tests.support.daemons import HERE, children, devices, interpreter, nothing_left, state, within
from tests.support.reference import Reference

REFERENCE = Reference("gemma4-e-Q4_0")
PROMPT = REFERENCE.expected["prompt_17"].tolist()
LONG = REFERENCE.expected["prompt_long"].tolist()
EXPECTED = REFERENCE.expected["greedy_17"][:8].tolist()


def load(model: Path = REFERENCE.path, **settings: Any) -> Model:
    given = {"target_devices": "cpu:0,cpu:1", "target_shard_ipc_bin": HERE, "max_ctx": 2048}
    return luce.load(model, **{**given, **settings})


def reply(model: Model) -> list[int]:
    return [token.id for token in model.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True)]


@pytest.fixture(scope="module", autouse=True)
def first() -> None:
    """The first daemon of a process opens files and threads that stay open."""
    load().close()


@pytest.fixture(autouse=True)
def _nothing_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with nothing_left(caplog):
        yield


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_death_while_generating(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the end of the connection can show it.
    monkeypatch.setattr(heartbeat, "LOST_AFTER", 1000.0)
    with load(parallel=2, shard_timeout=1000) as model:
        (pid,) = children()
        running = model.generate(PROMPT, max_tokens=1000, temperature=0, ignore_eos=True)
        beside = model.generate(LONG, max_tokens=1000, temperature=0, ignore_eos=True)
        for _ in range(3):
            next(running)
            next(beside)
        os.kill(pid, number)
        errors = []
        for generation in (running, beside):
            with pytest.raises(ShardLostError) as caught:
                list(generation)
            errors.append(str(caught.value))
        assert errors[0].startswith("shard 1 (cpu:1): the daemon is lost: it ")
        assert f"ended by {number.name}" in errors[0]
        assert reply(model) == EXPECTED
        assert children() != {pid} and len(children()) == 1


#: a daemon that waits for flags as GPUs do, raises them too far at a step of one row, once, and may die of it
COUNTS_UP = """
from pathlib import Path
from msgspec.structs import replace
from luce.remote import daemon_shard
from luce.cli.main import main
from luce.runtime.host import HostDevice

todo = Path({todo!r})
HostDevice.uses_flags = True
inner = daemon_shard.ServedModel.forward

def forward(self, message, input_ready):
    lies = todo.exists() and message.step.rows == 1 and message.output_flag is not None
    # The flag never holds the right value: a server that saw it would rightly take the step.
    raised = replace(message, output_flag=message.output_flag + 1000) if lies else message
    work = inner(self, raised, input_ready)
    if lies:
        dies = todo.read_text() == "dies"
        todo.unlink()
        self.arena.input_flag[0] += 1000
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
    return work

daemon_shard.ServedModel.forward = forward
sys.exit(main(sys.argv[4:]))
"""


@pytest.mark.parametrize("end", ["dies", "goes on"])
def test_flags_that_a_lost_daemon_raised_are_not_believed(end: str, tmp_path: Path) -> None:
    todo = tmp_path / "todo"
    python = interpreter(tmp_path / "python", COUNTS_UP.format(todo=str(todo)))
    with load(target_shard_ipc_bin=python) as model:
        assert reply(model) == EXPECTED
        assert [daemon.gpu_waits for daemon in model.daemons()] == [True]
        todo.write_text(end)
        # The flag may be seen before the daemon has died.
        seen = "it raised the output flag beyond the last step"
        with pytest.raises(ShardLostError, match=seen if end == "goes on" else f"{seen}|ended by SIGKILL"):
            reply(model)
        assert not todo.exists()
        # Both lives of the daemon share the same memory.
        assert reply(model) == EXPECTED


def test_a_stopped_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the timeout of a request can show it.
    monkeypatch.setattr(heartbeat, "LOST_AFTER", 1000.0)
    shards: list[RemoteShard] = []
    wait_loaded = RemoteShard.wait_loaded

    def noted(shard: RemoteShard, *arguments: Any) -> None:
        shards.append(shard)
        wait_loaded(shard, *arguments)

    monkeypatch.setattr(RemoteShard, "wait_loaded", noted)
    with load() as model:
        (pid,) = children()
        assert reply(model) == EXPECTED
        daemon = shards[0].device.daemon
        before = daemon.timeouts
        os.kill(pid, signal.SIGSTOP)
        daemon.timeouts = Timeouts(before.start, 0.5)
        limit = r"it does not respond within [\d.]+ s \(--shard-timeout\)"
        still = rf"^shard 1 \(cpu:1\): the daemon is lost: {limit}; at its last heartbeat, \d+\.\d s before, it "
        with pytest.raises(ShardLostError, match=still):
            reply(model)
        daemon.timeouts = before
        assert reply(model) == EXPECTED
        assert children() != {pid} and len(children()) == 1


def test_death_while_reading_a_prompt() -> None:
    with load(parallel=2, chunk=16) as model:
        (pid,) = children()
        seen = threading.Event()
        errors: list[LuceError] = []

        def read() -> None:
            try:
                list(model.generate(LONG * 10, max_tokens=1, temperature=0, on_progress=lambda done, total: seen.set()))
            except LuceError as error:
                errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        assert seen.wait(60)
        os.kill(pid, signal.SIGKILL)
        reader.join(60)
        assert not reader.is_alive() and isinstance(errors[0], ShardLostError)
        assert reply(model) == EXPECTED


def states(model: Model) -> list[tuple[int, str, bool, int]]:
    return [(daemon.shard, daemon.device, daemon.up, daemon.restarts) for daemon in model.daemons()]


def test_death_of_an_idle_daemon_fails_nothing() -> None:
    with load() as model:
        for deaths in range(2):
            assert states(model) == [(1, "cpu:1", True, deaths)]
            (pid,) = children()
            os.kill(pid, signal.SIGKILL)
            assert within(60, lambda: bool(children()) and children() != {pid})  # noqa: B023
            assert reply(model) == EXPECTED
            assert within(60, lambda: set(model.memory()) == {"cpu:0", "cpu:1"})


def test_no_page_of_a_daemon_that_died_idle_is_shared() -> None:
    dense = Reference("qwen3-a-F32")
    first = [(7 * i) % 700 + 5 for i in range(230)]
    second = [*first[:200], *range(40, 60)]
    greedy: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
    with luce.load(dense.path, target_devices="cpu:0", max_ctx=2048, cache_ram=0) as alone:
        expected = [token.id for token in alone.generate(second, **greedy)]
    with load(model=dense.path) as model:
        # Prompts share whole pages, without a checkpoint between them.
        assert model.engine.cache is not None and not model.engine.cache.checkpoints_only
        list(model.generate(first, **greedy))
        (pid,) = children()
        os.kill(pid, signal.SIGKILL)
        assert within(60, lambda: bool(children()) and children() != {pid})
        generation = model.generate(second, **greedy)
        assert [token.id for token in generation] == expected
        assert generation.finish is not None and generation.finish.timings.cached_tokens == 0
        # What the new daemon holds is shared again.
        again = model.generate(second, **greedy)
        assert [token.id for token in again] == expected
        assert again.finish is not None and again.finish.timings.cached_tokens >= 192


def test_one_of_three_daemons_dies() -> None:
    settings = {"target_devices": "cpu:0,cpu:1,cpu:2", "target_shard_ipc_bin": f"cpu={HERE}", "isolate_shards": True}
    with load(**settings) as model:
        before = children()
        assert len(before) == 3 and reply(model) == EXPECTED
        os.kill(sorted(before)[1], signal.SIGKILL)
        assert within(60, lambda: len(children() & before) == 2)
        assert reply(model) == EXPECTED
        assert len(children()) == 3


def test_restarts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RESTARTS", 1)
    with load() as model:
        (first,) = children()
        os.kill(first, signal.SIGKILL)
        assert within(60, lambda: bool(children()) and children() != {first})
        assert reply(model) == EXPECTED
        assert not model.down()
        os.kill(children().pop(), signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(ShardLostError, match=r"^shard 1 \(cpu:1\): .*SIGKILL"):
                reply(model)
        assert re.match(r"shard 1 \(cpu:1\): .*SIGKILL", model.down())
        assert states(model) == [(1, "cpu:1", False, 2)]


def test_progress_counts_the_layers_of_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    shares, told, read = list[float](), list[float](), RemoteShard.progress.fget

    def noted(shard: RemoteShard) -> float:
        assert read is not None
        told.append(read(shard))
        return told[-1]

    monkeypatch.setattr(RemoteShard, "progress", property(noted))
    with open_gguf(REFERENCE.path) as file, devices("cpu:0,cpu:1") as opened:
        LayerSplitBackend(
            file, REFERENCE.spec, opened, ServingOptions(layer_split=(1, 1)), on_progress=shares.append
        ).close()
    half = len(REFERENCE.spec.layers) // 2
    own = [*range(1, half + 1), *[half] * (len(shares) - half)]
    assert shares == [(done + share * half) / (2 * half) for done, share in zip(own, told, strict=True)]
    assert told == sorted(told) and told[-1] == 1.0


@pytest.mark.parametrize(("call", "number"), [("memfd_create", errno.EPERM), ("posix_fallocate", errno.ENOSPC)])
def test_without_memory_that_can_be_shared(
    call: str, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refused)
    why = rf"\d+ bytes of shared memory: {os.strerror(number)}"
    with pytest.raises(OutOfMemoryError, match=rf"shard 1 \(cpu:1\): --shard-transport shared: {why}$"):
        load(shard_transport="shared")
    with load() as model:
        assert re.search(rf"shard 1 \(cpu:1\): activations are sent in messages, which is slower: {why}", caplog.text)
        assert reply(model) == EXPECTED


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_processes_end_in_any_order(order: tuple[int, ...], tmp_path: Path) -> None:
    """No process has the sockets of another one, which would stay open then."""
    program = interpreter(tmp_path / "python", "os.read(int(sys.argv[-1].split(',')[0]), 1)\n")
    made = [Child(f"shard {number}", program, {}) for number in range(3)]
    for at, number in enumerate(order):
        assert all(made[other].process.poll() is None for other in order[at:])
        made[number].requests.close()
        made[number].heartbeat.close()
        assert made[number].join(60) == "it ended with status 0"


def test_the_wait_for_a_process_that_does_not_end_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child("shard", interpreter(tmp_path / "python", "time.sleep(1000)"), {})

    def never(self: object, timeout: float) -> None:
        raise subprocess.TimeoutExpired("luce shard", timeout)

    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "wait", never)
        assert child.join(0.01) == "it was killed and has not ended"
    assert "SIG" in child.join()
    child.requests.close()
    child.heartbeat.close()


SOCKET = "s = socket.socket(fileno=int(sys.argv[-1].split(',')[0])); "
#: the program that replaces the interpreter, and how the start fails
STARTS = {
    "exits": ("print('no such luck'); sys.exit(3)", "it ended with status 3; its last log lines: no such luck"),
    "garbage": (
        SOCKET + "s.sendall(b'GET / HTTP/1.1, and so on and so on...'); s.recv(1 << 20)",
        "it sent bytes that are not a frame",
    ),
    "truncated": (
        SOCKET + "s.sendall(b'LUC' + bytes(10)); s.close()",
        "it ended with status 0",
    ),
    "silent": ("time.sleep(100)", "it has not started within 1 s"),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_daemon_that_does_not_start(name: str, tmp_path: Path) -> None:
    text, reason = STARTS[name]
    # The others end as soon as they run, which may be later.
    seconds = 1 if name == "silent" else 60
    with pytest.raises(DeviceError) as caught:
        load(target_shard_ipc_bin=interpreter(tmp_path / "python", text), shard_start_timeout=seconds)
    assert (
        str(caught.value) == f"cpu:1: the daemon is lost: {reason}" if name != "silent" else reason in str(caught.value)
    )


def test_variables_of_a_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUCE_MAX_CTX", "77")
    show = interpreter(tmp_path / "python", "print({k: v for k, v in os.environ.items() if k[:4] in ('LUCE', 'HSA_')})")
    variables = ["cpu:HSA_A=1,2", "hip:HSA_B=3", "cpu:HSA_C=cuda:4=5"]
    with pytest.raises(DeviceError) as caught:
        load(target_devices="cpu:0,cpu:1,hip:0", target_shard_ipc_bin=show, shard_env=variables)
    assert str(caught.value).endswith("its last log lines: {'HSA_A': '1,2', 'HSA_C': 'cuda:4=5'}")


def test_an_interpreter_that_does_not_run(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("no script, no program")
    program.chmod(0o700)
    with pytest.raises(DeviceError, match=rf"^cpu:1: cannot run {program}: Exec format error"):
        load(target_shard_ipc_bin=program)


def test_a_device_that_the_daemon_does_not_have() -> None:
    with pytest.raises(LuceError, match=r"^cuda:9: --target-devices cuda:9: ") as caught:
        load(target_devices="cpu:0,cuda:9")
    assert caught.value.exit_code == 2


def test_a_hip_daemon_without_a_gpu() -> None:
    """The daemon loads the vendor's library, if there is one, and says what else is missing."""
    found = driver.load("hip")
    if found is not None and found.count():
        pytest.skip("there is an AMD GPU")
    why = r"libamdhip64\S* is not found: install ROCm" if found is None else rf"{re.escape(found.path)} .*/dev/kfd"
    for settings in ({"target_shard_ipc_bin": f"hip={HERE}"}, {"target_devices": "hip:0,cpu:0"}):
        given = {"target_devices": "cpu:0,hip:0", "target_shard_ipc_bin": f"hip={HERE}", **settings}
        with pytest.raises(LuceError, match=rf"^hip:0: --target-devices hip:0: no hip devices are available: {why}"):
            load(**given)


def test_no_daemon_outlives_a_killed_server() -> None:
    code = (
        "import luce, sys, time\n"
        f"path, python = {str(REFERENCE.path)!r}, sys.executable\n"
        "model = luce.load(path, target_devices='cpu:0,cpu:1', target_shard_ipc_bin=python)\n"
        "from tests.support.daemons import children\n"
        "print(*children(), flush=True)\n"
        "time.sleep(100)\n"
    )
    for stop in (False, True):
        server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        with server.stdout:
            pid = int(server.stdout.readline())
        if stop:
            os.kill(pid, signal.SIGSTOP)
        server.kill()
        server.wait()
        assert within(60, lambda: not Path(f"/proc/{pid}").exists() or state(pid) == "Z")  # noqa: B023
