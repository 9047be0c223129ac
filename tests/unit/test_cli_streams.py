"""Standard streams that are closed, full, or without a reader."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from luce.cli.main import main

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "tests/reference/qwen3-a-MIX.gguf")
LUCE = f"{sys.executable} -m luce"
WRITING = {
    "run": f"run {MODEL} hi --max-tokens 2",
    "run --json": f"run {MODEL} hi --max-tokens 2 --json",
    "dry run": f"run {MODEL} --dry-run",
    "chat": f"chat {MODEL} --max-ctx 256 --temperature 0",
    "inspect": f"inspect {MODEL}",
    "inspect --json": f"inspect {MODEL} --json",
    "pull": f"pull {MODEL}",
    "doctor": "doctor",
    "cache": "cache ls --json",
    "help": "--help",
    "help of a verb": "run --help",
    "version": "--version",
}
FULL, CLOSED = (f"luce: standard output: {text}\n" for text in ("No space left on device", "Bad file descriptor"))


def shell(line: str, cache: Path, **environment: str) -> tuple[int, str, str]:
    """Exit status and the two outputs of a line of bash, with one line for standard input."""
    env = os.environ | {"LUCE_KV_CACHE_DIR": str(cache)} | environment
    command = ["bash", "-c", f"set -o pipefail; {line}"]
    done = subprocess.run(command, cwd=ROOT, input="hi\n", capture_output=True, text=True, env=env)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A directory of snapshots without any."""
    (tmp_path / "cache/v1").mkdir(parents=True)
    return tmp_path / "cache"


@pytest.mark.parametrize("command", WRITING.values(), ids=WRITING)
def test_standard_output_is_full(command: str, cache: Path) -> None:
    assert shell(f"{LUCE} {command} >/dev/full", cache) == (1, "", FULL)


@pytest.mark.parametrize("command", WRITING.values(), ids=WRITING)
def test_standard_output_is_closed(command: str, cache: Path) -> None:
    assert shell(f"{LUCE} {command} >&-", cache) == (1, "", CLOSED)


@pytest.mark.parametrize("name", ["run", "chat", "inspect", "inspect --json", "cache", "help"])
def test_a_reader_that_closes_the_pipe_causes_no_error(name: str, cache: Path) -> None:
    assert shell(f"{LUCE} {WRITING[name]} | (exec <&-; sleep 0; true)", cache) == (141, "", "")


@pytest.mark.parametrize("stream", ["2>&-", "2>/dev/full"])
def test_standard_error_that_takes_nothing(stream: str, cache: Path) -> None:
    assert shell(f"{LUCE} pull nowhere {stream}", cache) == (2, "", "")
    assert shell(f"{LUCE} pull {MODEL} {stream}", cache) == (0, f"{MODEL}\n", "")


def test_standard_input_is_closed(cache: Path) -> None:
    assert shell(f"{LUCE} run {MODEL} <&-", cache) == (2, "", "luce: PROMPT: missing; give a prompt or pipe one in\n")
    status, out, err = shell(f"{LUCE} run {MODEL} hi --max-tokens 2 <&-", cache)
    assert (status, err) == (0, "") and out


def test_a_file_does_not_become_a_closed_stream(tmp_path: Path, cache: Path) -> None:
    # Without standard streams the first file that is opened gets their numbers.
    copy = tmp_path / "model.gguf"
    copy.write_bytes(Path(MODEL).read_bytes())
    status, _, _ = shell(f"{LUCE} shard <&- >&- 2>&-", cache)
    assert status == 2
    assert shell(f"{LUCE} inspect {copy} <&- >&- 2>&-", cache)[0] == 1
    assert copy.read_bytes() == Path(MODEL).read_bytes()


def test_a_server_needs_no_standard_output(cache: Path) -> None:
    status, _, err = shell(f"{LUCE} serve {MODEL} --max-ctx x >&-", cache)
    assert status == 2 and "--max-ctx" in err


def test_an_interpreter_that_cannot_be_spawned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert main(["run", MODEL, "hi", "--max-ctx", "256"]) == 1
    problem = "its process cannot be started: No such file or directory: /nowhere/python"
    error = f"luce: {MODEL}: tokenizer.chat_template: {problem}\n"
    assert capsys.readouterr() == ("", error)
