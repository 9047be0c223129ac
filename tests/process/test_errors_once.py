"""An error that ends a verb is told once: not by the log and then again by the verb."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.reference import Reference

MODEL = str(Reference("qwen3-a-F32").path)
DYING = ["--target-devices", "cpu:0,cpu:1", "--target-shard-ipc-bin", "{folder}/dying"]

#: by case, the arguments, the exit status, and what the error says
CASES: dict[str, tuple[list[str], int, str]] = {
    "serve: no file": (["serve", "/nowhere.gguf", "--port", "{free}"], 3, "/nowhere.gguf: No such file"),
    "serve: no alias": (["serve", "nosuch", "--port", "{free}"], 2, "not an alias"),
    "serve: no model": (["serve", "{folder}/bad.gguf", "--port", "{free}"], 3, "bad.gguf: "),
    "serve: port in use": (["serve", MODEL, "--port", "{used}"], 5, "Address already in use"),
    "serve: bad TOML": (["serve", MODEL, "--config", "{folder}/bad.toml"], 2, "bad.toml: Invalid value"),
    "serve: daemon dies": (["serve", MODEL, "--port", "{free}", *DYING], 4, "it ended with status 3"),
    "run: no file": (["run", "/nowhere.gguf", "hi"], 3, "/nowhere.gguf: No such file"),
    "run: no model": (["run", "{folder}/bad.gguf", "hi"], 3, "bad.gguf: "),
    "run: bad TOML": (["run", MODEL, "hi", "--config", "{folder}/unknown.toml"], 2, "nope: no such setting"),
    "run: daemon dies": (["run", MODEL, "hi", *DYING], 4, "it ended with status 3"),
    "run: no draft": (["run", MODEL, "hi", "--draft", "/nowhere.gguf", "-n", "1"], 0, "/nowhere.gguf: No such file"),
    "chat: no model": (["chat", "{folder}/bad.gguf"], 3, "bad.gguf: "),
    "chat: daemon dies": (["chat", MODEL, *DYING], 4, "it ended with status 3"),
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_is_told_once(case: str, tmp_path: Path) -> None:
    arguments, status, error = CASES[case]
    (tmp_path / "bad.gguf").write_bytes(Path(MODEL).read_bytes()[:1000])
    (tmp_path / "bad.toml").write_text("x = = 1\n")
    (tmp_path / "unknown.toml").write_text("nope = 1\n")
    (tmp_path / "dying").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "dying").chmod(0o755)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as used:
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
            ports = {"free": str(free.getsockname()[1]), "used": str(used.getsockname()[1])}
        words = [word.format(folder=tmp_path, **ports) for word in arguments]
        words += ["--kv-cache-dir", "off"]
        ran = subprocess.run(
            [sys.executable, "-m", "luce", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    assert ran.returncode == status, ran.stderr
    assert ran.stderr.count(error) == 1 and "Traceback" not in ran.stderr, ran.stderr
    if status:
        # The verb's line is the last one, and no line of the log says it before.
        *before, last = ran.stderr.splitlines()
        assert last.startswith("luce: ") and error in last, ran.stderr
        assert all(" info " in line for line in before), ran.stderr
