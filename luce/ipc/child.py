"""A daemon's process: how it is started, what it said last, how it ended."""

from __future__ import annotations

import contextlib
import ctypes
import logging
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
from luce.config.environment import child_environment
from luce.errors import DeviceError

_log = logging.getLogger(__name__)

#: last lines of standard error that are kept for the reason of death
_LINES = 20
_SHOWN = 3
#: seconds between asking a process to end, asking harder, and killing it
_PATIENCE = 5.0
_PR_SET_PDEATHSIG = 1


class Child:
    """`python -m luce shard` with two sockets, its messages in the log under `name`.

    The thread that makes it must live as long as the child, which is killed when that thread ends: this way none is
    left over by a killed server. Raises DeviceError if the interpreter cannot be started.
    """

    silent = ""

    def __init__(self, name: str, interpreter: Path, variables: Mapping[str, str]) -> None:
        self.name = name
        with contextlib.ExitStack() as failing, contextlib.ExitStack() as passed:
            try:
                pairs = [socket.socketpair() for _ in range(2)]
                for ours, theirs in pairs:
                    failing.enter_context(ours)
                    passed.enter_context(theirs)
                fds = [theirs.fileno() for _, theirs in pairs]
                self._process = subprocess.Popen(
                    [str(interpreter), "-P", "-m", "luce", "shard", "--fds", ",".join(map(str, fds))],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=fds,
                    env=child_environment({**_path(), **variables}),
                    # Ctrl-C is for the server, which ends its daemons in order.
                    process_group=0,
                )
            except OSError as error:
                raise DeviceError(f"{name}: cannot run {interpreter}: {error.strerror}") from error
            failing.pop_all()
        #: the server's ends; the caller closes them
        self.requests, self.watch = (ours for ours, _ in pairs)
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._reader = threading.Thread(target=self._read, name=f"luce-{name}-log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it runs, or is stopped."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End it at once; the reason of its death is that it was killed."""
        self._process.kill()

    def end(self, patience: float = _PATIENCE) -> str:
        """Wait for the end of a process that was asked to, and say how it came; ask harder when patience is over."""
        for harder in (self._process.terminate, self._process.kill, None):
            try:
                self._process.wait(patience)
                break
            except subprocess.TimeoutExpired:
                if harder is None:
                    # As while the kernel waits for a device that hangs.
                    return self._with_words("it was killed and has not ended")
                harder()
        # The pipe stays open if the daemon has left a process of its own behind.
        self._reader.join(_PATIENCE)
        return self._reason()

    def _reason(self) -> str:
        status = self._process.returncode
        if status < 0:
            with contextlib.suppress(ValueError):
                return self._with_words(f"it was ended by {signal.Signals(-status).name}")
        return self._with_words(f"it ended with status {status}")

    def _with_words(self, how: str) -> str:
        words = [line for line in list(self._lines)[-_SHOWN:] if line]
        return f"{how}; its last words: {' | '.join(words)}" if words else how

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            # A line without an end must not take all memory.
            while line := lines.readline(1 << 16):
                level, text = log.split_priority(line.decode(errors="replace").rstrip())
                if level >= logging.WARNING:
                    self._lines.append(text)
                _log.log(level, "%s: %s", self.name, text)


def interpreter_of(path: Path) -> Path:
    """The Python of an interpreter's or a virtual environment's path."""
    return path / "bin" / "python" if path.is_dir() else path


def _path() -> dict[str, str]:
    """Variables by which another interpreter finds this very Luce, if it runs from its sources."""
    root = Path(luce.__file__).parents[1]
    return {"PYTHONPATH": str(root)} if (root / "kernels").is_dir() else {}


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, even while it is stopped.

    If that has happened already, the sockets have ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def descriptors(text: str) -> Sequence[int]:
    """The two descriptors that `--fds` names. Raises ValueError."""
    requests, watch = (int(part) for part in text.split(","))
    return requests, watch
