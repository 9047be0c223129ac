"""Daemons over TCP give the same tokens, read their own file, and refuse peers without the key."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

import luce
from luce.cli.main import main
from luce.errors import DeviceError, ModelError, ShardLostError, UsageError
from luce.ipc import channel, heartbeat, supervisor
from luce.layers.build import LayerBuilder
from tests.support.daemons import key_file, within
from tests.support.reference import Reference
from tools.listening_daemon import listener

REFERENCE = Reference("gemma4-e-Q4_0")
PROMPT = REFERENCE.expected["prompt_17"].tolist()
EXPECTED = REFERENCE.expected["greedy_17"][:8].tolist()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two key files."""
    folder = tmp_path_factory.mktemp("keys")
    return [key_file(folder / name) for name in ("one", "other")]


def load(port: int, key: Path) -> luce.Model:
    devices = f"cpu:0,tcp://127.0.0.1:{port}/cpu:0,tcp://127.0.0.1:{port}/cpu:1"
    return luce.load(REFERENCE.path, target_devices=devices, shard_key_file=key, max_ctx=1024, shard_timeout=60)


def reply(model: luce.Model) -> list[int]:
    return [token.id for token in model.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True)]


def test_one_server_after_another(keys: list[Path], tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere.gguf"
    shutil.copy(REFERENCE.path, copy)
    with listener(copy, keys[0]) as (port, _):
        for _ in range(2):
            with load(port, keys[0]) as model:
                assert reply(model) == EXPECTED
                assert model.placement[2]["device"] == f"tcp://127.0.0.1:{port}/cpu:1"


def test_a_second_server_at_the_same_time(keys: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with listener(REFERENCE.path, keys[0]) as (port, _), load(port, keys[0]) as model:
        with monkeypatch.context() as patched:
            patched.setattr(heartbeat, "FIRST_WITHIN", 1.0)
            with pytest.raises(DeviceError, match=r"no heartbeat for 1 s; it serves one server at a time, and may"):
                load(port, keys[0])
        assert reply(model) == EXPECTED


def test_a_start_that_fails_here_leaves_no_connection(keys: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise DeviceError("cpu:0: lost its way")

    with listener(REFERENCE.path, keys[0]) as (port, _):
        with monkeypatch.context() as patched:
            patched.setattr(LayerBuilder, "layer", fail)
            with pytest.raises(DeviceError, match="lost its way"):
                load(port, keys[0])
        # It serves one server at a time.
        with load(port, keys[0]) as model:
            assert reply(model) == EXPECTED


def test_a_daemon_that_comes_back(keys: list[Path]) -> None:
    with listener(REFERENCE.path, keys[0]) as (port, process):
        model = load(port, keys[0])
        with model:
            running = model.generate(PROMPT, max_tokens=900, temperature=0, ignore_eos=True)
            next(running)
            process.kill()
            process.wait()
            with pytest.raises(ShardLostError, match=r"^shard 1 \(tcp://127.0.0.1:.*its connection has ended"):
                list(running)
            with listener(REFERENCE.path, keys[0], port):
                assert reply(model) == EXPECTED


def test_a_daemon_that_stays_away(
    keys: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "RESTARTS", 2)
    monkeypatch.setattr(supervisor, "RESTART_DELAYS", (0.0, 0.0))
    monkeypatch.setattr(supervisor, "RETRY_INTERVAL", 0.01)
    with listener(REFERENCE.path, keys[0]) as (port, process):
        model = load(port, keys[0])
        with model:
            for tries in (["restarting it"] * 2, ["restarting it"]):
                process.kill()
                process.wait()
                assert within(60, lambda: "cannot connect" in model.down())
                with pytest.raises(ShardLostError, match=r"^shard 1 \(tcp://127.0.0.1:.*cannot connect"):
                    reply(model)
                # The death and each attempt, and then once that the attempts go on.
                said = [r.getMessage() for r in caplog.records if r.name == supervisor.__name__ and r.levelno > 20]
                assert [text.rpartition("; ")[2] for text in said] == [*tries, "retrying every 0.01 s"]
                caplog.clear()
                with listener(REFERENCE.path, keys[0], port) as (_, process):
                    assert within(60, lambda: not model.down())
                    assert reply(model) == EXPECTED
                    process.kill()


def test_another_file(keys: list[Path]) -> None:
    with (
        listener(Reference("gemma4-e-F32").path, keys[0]) as (port, _),
        pytest.raises(
            ModelError, match=r"^shard 1 \(tcp://.*\): .*gemma4-e-F32.gguf: the daemon's file is not the server's"
        ),
    ):
        load(port, keys[0])


def test_another_protocol(keys: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    number = channel.PROTOCOL
    with listener(REFERENCE.path, keys[0]) as (port, _):
        with monkeypatch.context() as patched:
            patched.setattr(channel, "PROTOCOL", number + 1)
            for _ in range(5):
                with pytest.raises(DeviceError, match=rf"it speaks protocol {number}, .* with protocol {number + 1}$"):
                    load(port, keys[0])
        with load(port, keys[0]) as model:
            assert reply(model) == EXPECTED


def test_another_key(keys: list[Path]) -> None:
    with listener(REFERENCE.path, keys[0]) as (port, _):
        with pytest.raises(DeviceError, match=r"^tcp://127.0.0.1:\d+/cpu:0,.*: "):
            load(port, keys[1])
        # A connection without TLS does not keep others out.
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with load(port, keys[0]) as model:
                assert reply(model) == EXPECTED


def test_settings(keys: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="require --shard-key-file"):
        luce.load(REFERENCE.path, target_devices="cpu:0,tcp://127.0.0.1:1/cpu:0")
    nothing = tmp_path / "nothing"
    nothing.write_text("x")
    with pytest.raises(UsageError, match=f"--shard-key-file {nothing}"):
        luce.load(REFERENCE.path, target_devices="cpu:0,tcp://127.0.0.1:1/cpu:0", shard_key_file=nothing)
    with pytest.raises(DeviceError, match=r"cannot connect to 127.0.0.1:1"):
        load(1, keys[0])
    torn = "tcp://127.0.0.1:1/cpu:0,cpu:0,tcp://127.0.0.1:1/cpu:1"
    with pytest.raises(UsageError, match="side by side"):
        luce.load(REFERENCE.path, target_devices=torn, shard_key_file=keys[0])
    assert main(["shard", str(REFERENCE.path), "--listen", "0.0.0.0:0"]) == 2
    assert main(["shard", str(REFERENCE.path), "--listen", "nowhere", "--key-file", str(keys[0])]) == 2
    assert "--key-file" in capsys.readouterr().err
