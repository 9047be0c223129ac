"""The service manager's datagrams, on a socket of our own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from luce.server.sdnotify import Notifier


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """The manager's end; its address is in the file system."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(10)
        yield sock


def test_states_are_lines(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.getsockname())
    notifier = Notifier()
    notifier.send(READY=1, STATUS="serving m")
    assert manager.recv(4096) == b"READY=1\nSTATUS=serving m"
    notifier.reloading()
    first, second = manager.recv(4096).decode().splitlines()
    assert first == "RELOADING=1" and int(second.removeprefix("MONOTONIC_USEC=")) > 0
    notifier.close()


def test_an_abstract_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0luce-test-{os.getpid()}")
        sock.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@luce-test-{os.getpid()}")
        notifier = Notifier()
        notifier.send(STOPPING=1)
        assert sock.recv(100) == b"STOPPING=1"
        notifier.close()


def test_nothing_happens_without_a_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    notifier = Notifier()
    notifier.send(READY=1)
    assert notifier.watchdog == 0
    notifier.close()


def test_a_manager_that_is_gone_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    notifier = Notifier()
    notifier.send(READY=1)
    notifier.close()


@pytest.mark.parametrize("pid, seconds", [(None, 3.0), ("own", 3.0), ("1", 0.0)])
def test_the_watchdog_is_for_one_process(pid: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    if pid is not None:
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()) if pid == "own" else pid)
    notifier = Notifier()
    assert notifier.watchdog == seconds
    notifier.close()


def test_children_do_not_inherit_the_variables(manager: socket.socket) -> None:
    code = (
        "import subprocess, sys; from luce.server.sdnotify import Notifier; Notifier().close();"
        "sys.exit(subprocess.run(['env']).returncode)"
    )
    mine = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "1", "LISTEN_FDS": "1", "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code], env=mine, capture_output=True, text=True, check=True)
    assert "PATH=" in done.stdout
    assert not any(name in done.stdout for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS"))
