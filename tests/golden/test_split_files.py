"""A model in several files is the model in one: the same bits on every placement, and the same from every command."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luce.cli.main import main
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import open_gguf
from luce.runtime.host import HostDevice
from tests.support.daemons import devices, key_file
from tests.support.gguf_files import split_file
from tests.support.make_driver import MakeDriver
from tests.support.placements import placement_results
from tests.support.reference import Reference
from tests.support.warm import WARM
from tools.listening_daemon import listener

JOINED = Reference("gemma4-e-Q4_0")


@dataclasses.dataclass(frozen=True)
class Part(Reference):
    """The reference model, read from one of its parts."""

    part: Path

    @property
    def path(self) -> Path:
        """The part."""
        return self.part


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return split_file(JOINED.path, tmp_path_factory.mktemp("parts"), 3)


def test_the_same_bits(parts: list[Path], make_driver: MakeDriver) -> None:
    for local in ([HostDevice()], [HostDevice(0), HostDevice(1)]):
        expected = placement_results(make_driver(JOINED, local), JOINED)
        assert (placement_results(make_driver(Part(JOINED.name, parts[0]), local), JOINED) == expected).all()


def test_the_same_bits_in_daemons(parts: list[Path], make_driver: MakeDriver, tmp_path: Path) -> None:
    expected = placement_results(make_driver(JOINED, [HostDevice(0), HostDevice(1)]), JOINED)
    # The daemon on the other machine was given another part: all of them are the model.
    with listener(parts[2], key := key_file(tmp_path / "key"), python=WARM) as (port, _):
        settings: list[tuple[str, dict[str, Any]]] = [
            ("cpu:0,cpu:1", {"target_shard_ipc_bin": (("", WARM),)}),
            (f"cpu:0,tcp://127.0.0.1:{port}/cpu:0", {"target_shard_ipc_bin": (), "shard_key_file": key}),
        ]
        for names, own in settings:
            with devices(names, **own) as opened:
                driver = make_driver(Part(JOINED.name, parts[0]), opened)
                found = placement_results(driver, JOINED)
                driver.backend.close()
            assert (found == expected).all()


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def described(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, Any]:
    """What `luce inspect` says of a model, without the memory that is free at the moment."""
    facts: dict[str, Any] = json.loads(printed(capsys, "inspect", str(path), "--devices", "cpu:0,cpu:1", "--json"))
    for shard in facts["plan"]:
        del shard["free"], shard["experts_on_cpu_free"]
    return facts


@pytest.mark.parametrize("number", range(3))
def test_commands_take_any_part(parts: list[Path], number: int, capsys: pytest.CaptureFixture[str]) -> None:
    facts = described(capsys, parts[number])
    assert facts.pop("path") == str(parts[0])
    whole = described(capsys, JOINED.path)
    assert whole.pop("path") == str(JOINED.path)
    assert facts == whole
    assert "layers" in printed(capsys, "serve", str(parts[number]), "--dry-run", "--devices", "cpu:0")


def test_a_reply_is_the_same(
    parts: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("hi", "--devices", "cpu:0", "--temperature", "0", "--max-tokens", "9", "--max-ctx", "64")
    replies = []
    for path in (parts[1], JOINED.path):
        monkeypatch.setattr("sys.stdin", io.StringIO())
        replies.append(printed(capsys, "run", str(path), *settings))
    assert replies[0].strip()
    assert replies[0] == replies[1]


def test_every_part_counts_in_the_fingerprint(parts: list[Path], tmp_path: Path) -> None:
    own = [Path(shutil.copy(part, tmp_path)) for part in parts]
    with open_gguf(parts[0]) as file:
        first = fingerprint(file)
    with open_gguf(own[1]) as file:
        assert fingerprint(file) == first
    for part in own:
        data = part.read_bytes()
        part.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with open_gguf(own[0]) as file:
            assert fingerprint(file) != first
        part.write_bytes(data)


@pytest.mark.parametrize("command", ["inspect", "run", "serve", "chat", "plan", "bench"])
def test_a_missing_part_is_named_by_every_command(
    parts: list[Path], tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    first, _ = (Path(shutil.copy(parts[index], tmp_path)) for index in (0, 2))
    port = ["--port", "0"] if command == "serve" else []
    assert main([command, str(first), "--devices", "cpu:0", *port]) == 3
    missing = tmp_path / parts[1].name
    lines = capsys.readouterr().err.splitlines(keepends=True)
    assert lines[-1] == f"luce: {missing}: is missing ({first.name} is one of 3 parts)\n"


def test_bytes_of_the_parts_are_those_of_the_file(parts: list[Path]) -> None:
    with open_gguf(parts[1]) as split, open_gguf(JOINED.path) as joined:
        assert split.name == joined.name
        assert list(split.tensors) == list(joined.tensors)
        for name in joined.tensors:
            np.testing.assert_array_equal(split.raw(name), joined.raw(name))
