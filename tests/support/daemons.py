"""Devices in daemons that run this interpreter, and checks for what daemons leave behind."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from luce.config.settings import Config
from luce.ipc.child import Child
from luce.remote.device import RemoteDevice
from luce.remote.open import open_placement
from luce.runtime.device import Device
from tests.support.warm import program
from tools.listening_daemon import make_key_file

HERE = Path(sys.executable)


@contextmanager
def devices(names: str, **settings: Any) -> Iterator[list[Device]]:
    """Devices of a placement whose daemons run this interpreter: by default all but the first."""
    fields: dict[str, Any] = {"target_shard_ipc_bin": (("", HERE),), "shard_start_timeout": 60.0, **settings}
    with ExitStack() as stack:
        opened = open_placement(Config(target_devices=tuple(names.split(",")), **{"cpu_weights": "float32", **fields}))
        for device in opened:
            stack.callback(device.close)
        yield opened


def interpreter(path: Path, text: str) -> Path:
    """A program that replaces a daemon's interpreter: Python code, with the daemon's command in sys.argv[3:]."""
    path.write_text(f"#!{sys.executable}\nimport os, signal, socket, sys, time\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def with_flags(path: Path) -> Path:
    """An interpreter whose CPU devices wait for flags in shared memory, raise them and take over rows, as GPUs do."""
    return program(
        path,
        "from luce.cli.main import main\n"
        "from luce.runtime.host import HostDevice\n"
        "HostDevice.uses_flags = HostDevice.maps_pinned = True\n"
        "sys.exit(main(['shard', *sys.argv[5:]]))\n",
    )


def key_file(path: Path) -> Path:
    """A new key file for network daemons. Skips the test if nothing here makes keys."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make keys")
    return make_key_file(path)


def signed_key_file(path: Path, signer: Path) -> Path:
    """A key file whose certificate the key of another one has signed; the signer's certificate comes behind it."""
    key, request, certificate = (path.with_suffix(f".{suffix}") for suffix in ("key", "csr", "crt"))
    asked = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=other"]
    subprocess.run([*asked, "-keyout", str(key), "-out", str(request)], check=True, capture_output=True)
    signed = ["openssl", "x509", "-req", "-in", str(request), "-CA", str(signer), "-CAkey", str(signer)]
    subprocess.run([*signed, "-CAcreateserial", "-out", str(certificate)], check=True, capture_output=True)
    own = signer.with_suffix(".crt").read_text()
    path.write_text(key.read_text() + certificate.read_text() + own)
    path.chmod(0o600)
    return path


def remote(opened: Sequence[Device], number: int) -> RemoteDevice:
    """One of the devices, which is in a daemon."""
    device = opened[number]
    assert isinstance(device, RemoteDevice)
    return device


def pid_of(device: RemoteDevice) -> int:
    """The child process that holds a device now."""
    peer = device.daemon.peer
    assert isinstance(peer, Child)
    return peer.process.pid


def children() -> set[int]:
    """Daemons that this process has started, zombies too."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        # A thread may end between the two.
        with contextlib.suppress(FileNotFoundError):
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return {pid for pid in found if _counts(pid)}


def _counts(pid: int) -> bool:
    """Whether a child is a daemon or one that ends, which has no command line: others render templates, or were left by
    multiprocessing for as long as this process lives."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        # A program that begins has none either; one that ends loses it before it is a zombie.
        return b"shard" in command or (command == [b""] and _ends(pid))
    return False


def _ends(pid: int) -> bool:
    """Whether a process ends, or has ended: PF_EXITING of Linux, which zombies have too."""
    return bool(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6]) & 4)


def state(pid: int) -> str:
    """The state of a process: T stopped, Z dead and not waited for, or gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def descriptors() -> list[str]:
    """The open files of this process."""
    names = []
    for name in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            # The descriptor of the listing itself.
            continue
    return sorted(names)


@contextmanager
def nothing_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No daemon, descriptor or thread that begins inside remains afterwards."""
    gc.collect()
    # Descriptors of earlier tests may be closed meanwhile.
    before, threads = Counter(descriptors()), set(threading.enumerate())
    yield
    # Log records refer to errors, errors to stack frames, and these to the shared memory.
    caplog.get_records("call").clear()
    gc.collect()
    assert not children()
    assert not Counter(descriptors()) - before
    # The thread that waits for a template's process ends a moment after it.
    assert within(5, lambda: not set(threading.enumerate()) - threads)


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether a condition comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
