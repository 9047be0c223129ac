"""Daemons that are forked from one process with all imports done, for tests of what daemons compute.

An interpreter imports for 0.4 s of CPU until it is a daemon, and a suite of tests starts a thousand of them. The
programs here take the place of an interpreter: each hands its arguments and descriptors to a process that forks (this
file, run as a program), waits for the end, and ends the same way. If the program is killed, so is the daemon. Tests of
starts, signals and deaths need a real interpreter, as the daemon has another process id than the program.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import json
import os
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_SHARD = "from luce.cli.main import main\nsys.exit(main(['shard', *sys.argv[5:]]))\n"
#: of the interpreter that takes the arguments of `python -P -m luce shard`: no site, no environment, so 15 ms
_PROGRAM = """#!{python} -IS
import array, json, os, signal, socket, struct, sys
fds = []
for name in os.listdir("/proc/self/fd"):
    try:
        os.fstat(int(name))
        fds.append(int(name))
    except OSError:
        pass  # that of the listing
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as process:
    process.connect({address!r})
    task = {{"text": {text!r}, "argv": sys.argv, "environment": dict(os.environ), "fds": fds}}
    process.sendmsg(
        [json.dumps(task).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())]
    )
    for fd in fds[3:]:
        os.close(fd)
    status = int(process.recv(64) or b"1")
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


def program(path: Path, text: str = _SHARD) -> Path:
    """A program that replaces a daemon's interpreter: Python code, with the daemon's command in sys.argv[3:]."""
    path.write_text(_PROGRAM.format(python=sys.executable, address=_ADDRESS, text=f"import sys\n{text}"))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def _serve(listener: socket.socket) -> None:
    """Fork for every connection, until standard input ends."""
    with selectors.DefaultSelector() as ready:
        ready.register(sys.stdin, selectors.EVENT_READ)
        ready.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is sys.stdin:
                    return
                if key.fileobj is not listener:
                    _reap(ready, *key.data)
                    continue
                # Here, not at the start: whoever needs no daemon pays nothing.
                import luce.cli.shard
                import luce.cpu_kernels.catalogue  # noqa: F401

                peer, _ = listener.accept()
                pid = _fork(peer)
                if pid:
                    end = os.pidfd_open(pid)
                    for waited in (end, peer):
                        ready.register(waited, selectors.EVENT_READ, (pid, end, peer))


def _reap(ready: selectors.BaseSelector, pid: int, end: int, peer: socket.socket) -> None:
    """The daemon has ended, or the program has, and takes the daemon with it."""
    if end not in ready.get_map():
        return  # both at once
    signal.pidfd_send_signal(end, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for waited in (end, peer):
        ready.unregister(waited)
    os.close(end)
    with peer, contextlib.suppress(BrokenPipeError):
        peer.send(str(status).encode())


def _fork(peer: socket.socket) -> int:
    """Receive what a program is to do, and fork; the process id, 0 if the program has gone."""
    received, rights, _, _ = peer.recvmsg(1 << 20, 1 << 12)
    fds = array.array("i")
    for _, _, data in rights:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    pid = os.fork() if received else 0
    if received and not pid:
        _become(json.loads(received), list(fds))
    for fd in fds:
        os.close(fd)
    if not pid:
        peer.close()
    return pid


def _become(task: dict[str, Any], fds: list[int]) -> None:
    """Do what the program is to do, in its place: with its descriptors, its environment and its arguments."""
    status = 1
    try:
        # First out of the way: the numbers may be those of one another.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 1 << 10) for fd in fds]
        os.closerange(0, 1 << 10)
        for fd, number in zip(high, task["fds"], strict=True):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(task["environment"])
        sys.argv[:] = task["argv"]
        exec(compile(task["text"], "<daemon>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _start(address: str) -> subprocess.Popen[bytes]:
    """The process that forks; it ends when its standard input does, so not later than this process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        fd = listener.fileno()
        entries = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entries)}
        command = [sys.executable, "-P", __file__, str(fd)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[fd], env=environment)


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as _listener:
        _serve(_listener)
        # Here, as the process of the tests may have been killed.
        shutil.rmtree(Path(_listener.getsockname()).parent)
else:
    _PLACE = Path(tempfile.mkdtemp(prefix="luce-warm-"))
    _ADDRESS = str(_PLACE / "socket")
    atexit.register(_stop, _start(_ADDRESS))
    #: what stands for this interpreter
    WARM = program(_PLACE / "python")
