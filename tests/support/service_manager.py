"""A stand-in for systemd: starts `luce serve` with a notify socket, a held socket and credentials, as systemd does."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "reference" / "qwen3-a-F32.gguf"

# Starts a service as a service manager does: with the listening socket as descriptor 3.
ACTIVATE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""

#: seconds that end a test which waits for a server: on a machine with ten times the work a start took more than 60
_PATIENCE = 300


class Child:
    """A server process, its log, and its notifications of the service manager."""

    def __init__(self, process: subprocess.Popen[str], notify: socket.socket) -> None:
        self.process = process
        self._notify = notify
        self.lines: list[str] = []
        self._port: int | None = None
        self._open: list[http.client.HTTPConnection | http.client.HTTPResponse] = []
        self._listening = threading.Event()
        assert process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(process.stderr,))
        self._reader.start()

    def _read(self, stderr: IO[str]) -> None:
        for line in stderr:
            self.lines.append(line)
            if found := re.search(r"listening url=http://127\.0\.0\.1:(\d+)", line):
                self._port = int(found[1])
                self._listening.set()
        self._listening.set()

    def close(self) -> None:
        """Kill it if it still runs, and close its files."""
        self.process.kill()
        self.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        for item in self._open:
            item.close()

    @property
    def port(self) -> int:
        assert self._listening.wait(_PATIENCE) and self._port is not None, "".join(self.lines)
        return self._port

    def notified(self, wanted: str) -> list[str]:
        """Datagrams until one that has the wanted line."""
        seen = []
        while True:
            seen.append(self._notify.recv(4096).decode())
            if wanted in seen[-1].splitlines():
                return seen

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        status = self.process.wait(_PATIENCE)
        self._reader.join()
        return status

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def request(self, path: str, body: Any = None, key: str = "") -> http.client.HTTPResponse:
        """A response whose headers have been read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE)
        data = None if body is None else json.dumps(body).encode()
        headers = ({"x-api-key": key} if key else {}) | ({} if data is None else {"Content-Type": "application/json"})
        connection.request("GET" if data is None else "POST", path, data, headers)
        self._open.append(connection)
        response = connection.getresponse()
        self._open.append(response)
        return response


class StartServer(Protocol):
    """Starts a server of a model with flags and variables; `inherit`: the listening socket that it is given;
    `credentials`: those of LoadCredential, by name."""

    def __call__(
        self,
        *flags: str,
        model: Path = MODEL,
        inherit: socket.socket | None = None,
        credentials: Mapping[str, str] | None = None,
        **env: str,
    ) -> Child: ...


@contextlib.contextmanager
def service_manager(folder: Path) -> Iterator[StartServer]:
    """What starts servers; those that still run are killed at the end. `folder` is their home."""
    with contextlib.ExitStack() as stack:

        def start(
            *flags: str,
            model: Path = MODEL,
            inherit: socket.socket | None = None,
            credentials: Mapping[str, str] | None = None,
            **env: str,
        ) -> Child:
            notify = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            notify.bind(str(folder / f"notify-{notify.fileno()}"))
            notify.settimeout(_PATIENCE)
            if credentials is not None:
                env["CREDENTIALS_DIRECTORY"] = str(_loaded(folder / f"credentials-{notify.fileno()}", credentials))
            verb = ["-m", "luce", "serve", str(model), "--target-devices", "cpu:0", "--port", "0", *flags]
            lead = [sys.executable] if inherit is None else [sys.executable, "-c", ACTIVATE, str(inherit.fileno())]
            process = subprocess.Popen(
                [*lead, *verb],
                cwd=ROOT,
                env={
                    "PATH": os.environ["PATH"],
                    "HOME": str(folder),
                    "NOTIFY_SOCKET": notify.getsockname(),
                    # A new home would compile the CPU's kernels for each test.
                    "LUCE_CPU_WEIGHTS": "float32",
                    **env,
                },
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=[] if inherit is None else [inherit.fileno()],
            )
            child = Child(process, notify)
            stack.callback(child.close)
            return child

        yield start


def _loaded(folder: Path, credentials: Mapping[str, str]) -> Path:
    """A directory of credentials, with the modes that systemd gives them."""
    folder.mkdir(mode=0o700)
    for name, text in credentials.items():
        path = folder / name
        path.write_text(text)
        path.chmod(0o400)
    folder.chmod(0o500)
    return folder
