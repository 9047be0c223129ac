"""A daemon as a child process: its start, its log lines, and the reason of its end."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import luce
from luce import log
from luce.config.environment import child_environment, environment
from luce.errors import DeviceError

_log = logging.getLogger(__name__)

#: last warnings of the process that are remembered, and that an error message shows
_REMEMBERED, _SHOWN = 20, 3
#: seconds that the process has to end by itself, then after SIGTERM, then after SIGKILL
_END_TIMEOUT = 5.0


class Child:
    """`python -m luce shard` with two sockets. Its log lines appear in this process's log under `name`.

    The thread that makes the child must live as long as the child: the kernel kills the child when that thread ends, so
    a killed server leaves no child behind. Raises DeviceError if the interpreter cannot be started.
    """

    silence_hint = ""

    def __init__(self, name: str, interpreter: Path, variables: Mapping[str, str]) -> None:
        self.name = name
        with contextlib.ExitStack() as failing, contextlib.ExitStack() as passed:
            try:
                pairs = [socket.socketpair() for _ in range(2)]
                for ours, theirs in pairs:
                    failing.enter_context(ours)
                    passed.enter_context(theirs)
                fds = [theirs.fileno() for _, theirs in pairs]
                self.process = subprocess.Popen(
                    [str(interpreter), "-P", "-m", "luce", "shard", "--fds", ",".join(map(str, fds))],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=fds,
                    env=child_environment({"PYTHONPATH": search_path(interpreter), **variables}),
                    # Ctrl-C must reach the server alone, which ends its daemons in order.
                    process_group=0,
                )
            except OSError as error:
                raise DeviceError(f"{name}: cannot run {interpreter}: {error.strerror}") from error
            failing.pop_all()
        #: the server's ends of the sockets; the caller closes them
        self.requests, self.heartbeat = (ours for ours, _ in pairs)
        self._lines: deque[str] = deque(maxlen=_REMEMBERED)
        self._reader = threading.Thread(target=self._read, name=f"luce-{name}-log", daemon=True)
        self._reader.start()

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()

    def join(self, timeout: float = _END_TIMEOUT) -> str:
        """Wait for the process to end, and return how it ended. Sends SIGTERM and SIGKILL after each `timeout`."""
        for harder in (self.process.terminate, self.process.kill, None):
            try:
                self.process.wait(timeout)
                break
            except subprocess.TimeoutExpired:
                if harder is None:
                    # The kernel may wait for a device that hangs.
                    return self._with_last_lines("it was killed and has not ended")
                harder()
        # The pipe stays open if a process that the daemon started is still running.
        self._reader.join(_END_TIMEOUT)
        return self._reason()

    def _reason(self) -> str:
        status = self.process.returncode
        if status < 0:
            with contextlib.suppress(ValueError):
                return self._with_last_lines(f"it was ended by {signal.Signals(-status).name}")
        return self._with_last_lines(f"it ended with status {status}")

    def _with_last_lines(self, how: str) -> str:
        lines = [line for line in list(self._lines)[-_SHOWN:] if line]
        return f"{how}; its last log lines: {' | '.join(lines)}" if lines else how

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            # Bounded, as an endless line would take all memory.
            while line := lines.readline(1 << 16):
                level, text = log.split_priority(line.decode(errors="replace").rstrip())
                if level >= logging.WARNING:
                    self._lines.append(text)
                _log.log(level, "%s: %s", self.name, text)


def interpreter_of(path: Path) -> Path:
    """The interpreter of a path, which may be that of a virtual environment."""
    return path / "bin" / "python" if path.is_dir() else path


def search_path(interpreter: Path) -> str:
    """PYTHONPATH with which an interpreter finds what this process imports.

    For this interpreter all of sys.path: it may come from PYTHONPATH, a wrapper or a .pth file. The current directory
    is left out, unless PYTHONPATH names it or Luce lies there: `-P` keeps daemons from importing what lies around.
    Another interpreter has packages of its own; it gets PYTHONPATH as any program does, and this Luce if it runs from
    its sources.
    """
    root = Path(luce.__file__).parents[1]
    given = [entry for entry in (environment("PYTHONPATH") or "").split(os.pathsep) if entry]
    if not _is_this(interpreter):
        entries = [str(root), *given] if (root / "kernels").is_dir() else given
    else:
        kept = {*given, str(root)}
        entries = [entry for entry in sys.path if entry in kept or (entry and not _is_current(entry))]
        # Last on its path: a hook may find an editable install, which is not on the path then.
        entries += [] if str(root) in entries else [str(root)]
    return os.pathsep.join(entries)


def _is_this(interpreter: Path) -> bool:
    """Whether it is the interpreter of this process: the same file in the same environment."""
    found = shutil.which(interpreter)
    # An environment's interpreter is a link to one that has no packages, or those of others.
    return found is not None and all(
        os.path.realpath(one) == os.path.realpath(other)
        for one, other in ((found, sys.executable), (os.path.dirname(found), os.path.dirname(sys.executable)))
    )


def _is_current(directory: str) -> bool:
    # The current directory may have been removed.
    with contextlib.suppress(OSError):
        return os.path.samefile(directory, os.curdir)
    return False


def descriptors(text: str) -> Sequence[int]:
    """The descriptors in the value of `--fds`: requests, heartbeat. Raises ValueError."""
    requests, heartbeat = (int(part) for part in text.split(","))
    return requests, heartbeat
