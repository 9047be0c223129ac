"""The server's end of luce.text.template_process: starts the process, asks it, and ends it."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO

from luce.config.environment import environment

# The process sees this interpreter's modules and nothing of the environment, which may hold keys.
_CODE = (
    "import sys; parent = int(sys.argv[1]); sys.path[:] = sys.argv[2:]; "
    "from luce.text import template_process; template_process.main(parent)"
)
# Last on its path: a hook may find an editable install, which is not on the path then.
_LUCE = str(Path(__file__).parents[2])
_PIECE = 1 << 16


class HungError(Exception):
    """The process neither reads nor writes."""


class TemplateChild:
    """One process. It ends with `end`, with this object, and with this process, however that ends.

    Raises OSError if the interpreter cannot be started.
    """

    def __init__(self) -> None:
        started: Future[subprocess.Popen[bytes]] = Future()
        # The kernel kills the process when the thread that started it ends, so this thread lives as long.
        threading.Thread(target=_run, args=(started,), name="luce-template", daemon=True).start()
        self.process = started.result()
        #: kill the process; idempotent
        self.end = weakref.finalize(self, _end, self.process)
        self._moved: float | None = None

    def ask(self, line: bytes, seconds: float) -> bytes:
        """The line with which the process answers a line; without its end if the process has ended.

        Raises HungError if the process neither reads nor writes for `seconds`.
        """
        stdin, stdout = _pipes(self.process)
        unsent, response = memoryview(line), bytearray()
        try:
            with selectors.DefaultSelector() as ready:
                ready.register(stdin, selectors.EVENT_WRITE)
                ready.register(stdout, selectors.EVENT_READ)
                while not response.endswith(b"\n"):
                    self._moved = time.monotonic()
                    events = ready.select(seconds)
                    if not events:
                        raise HungError
                    for key, _ in events:
                        if key.fd == stdout.fileno():
                            piece = os.read(key.fd, _PIECE)
                            if not piece:
                                return bytes(response)
                            response += piece
                            continue
                        # A process that has ended reads no more; its output tells.
                        with suppress(BrokenPipeError):
                            unsent = unsent[os.write(key.fd, unsent[:_PIECE]) :]
                            if unsent:
                                continue
                        ready.unregister(stdin)
            return bytes(response)
        finally:
            self._moved = None

    def silence(self) -> float:
        """Seconds since the process read or wrote a part of the question that is being asked; 0 without one."""
        moved = self._moved
        return 0.0 if moved is None else time.monotonic() - moved


def _run(started: Future[subprocess.Popen[bytes]]) -> None:
    library_path = environment("LD_LIBRARY_PATH")
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _CODE, str(os.getpid()), *sys.path, _LUCE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={"LD_LIBRARY_PATH": library_path} if library_path else {},
            start_new_session=True,  # Ctrl+C at the terminal must not reach the child
        )
    except BaseException as error:
        started.set_exception(error)
        return
    for pipe in _pipes(process):
        os.set_blocking(pipe.fileno(), False)
    pid = process.pid
    started.set_result(process)
    del process, started
    with suppress(ChildProcessError):
        # It stays a zombie, for whoever wants to know its status.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


def _end(process: subprocess.Popen[bytes]) -> None:
    # Not waiting first: a child that renders would not end. A child without a request loses nothing.
    process.kill()
    process.wait()
    for pipe in _pipes(process):
        pipe.close()
