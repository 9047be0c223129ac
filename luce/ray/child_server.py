"""`luce serve` as the child of a replica: its start, its address, its keys, its end."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from luce.config.environment import child_environment
from luce.errors import ServerError
from luce.ray.cluster_config import ClusterConfig
from luce.ray.private_folder import private_folder
from luce.ray.process_guard import Nursery, stop

#: seconds beside `drain` in which a child that was told to end writes its prefix cache to the disk
CLOSE_SECONDS = 10.0


class ChildServer:
    """A server on a loopback address. `devices`: names, as --target-devices. `on_exit` is called, on a thread, when the
    child ends without having been told to.

    admin   the key by which the replica asks what clients may not
    client  the key that requests carry on; "" if clients have keys of their own
    """

    def __init__(
        self,
        nursery: Nursery,
        config: ClusterConfig,
        devices: Sequence[str],
        on_exit: Callable[[int], None],
        shard_key: bytes = b"",
    ) -> None:
        self.admin = secrets.token_urlsafe(32)
        self.client = "" if config.api_key_file else secrets.token_urlsafe(32)
        self._drain = config.replica.drain
        self._on_exit = on_exit
        self._stopping = False
        self._listening = threading.Event()
        self._url = ""
        #: the last lines that it has written, for the error if it does not start
        self._last: list[str] = []
        self._folder = private_folder()
        try:
            command = self._command(config, devices, shard_key)
            environment = child_environment({"LUCE_API_KEY": self.admin})
            self._child = nursery.start(command, environment, output=subprocess.PIPE)
        except BaseException:
            shutil.rmtree(self._folder)
            raise
        threading.Thread(target=self._read, name="child-log", daemon=True).start()

    def _command(self, config: ClusterConfig, devices: Sequence[str], shard_key: bytes) -> list[str]:
        replica, keys = config.replica, config.api_key_file
        if not keys:
            keys = self._write("keys", f"client:{self.client}\n".encode())
        python = config.luce_python[replica.devices[0]]
        command = [
            python,
            "-P",
            "-m",
            "luce",
            "serve",
            config.model,
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--log-json",
        ]
        command += ["--target-devices", ",".join(devices), "--parallel", str(replica.parallel)]
        command += ["--drain-seconds", str(replica.drain), "--api-key-file", keys]
        if shard_key:
            command += ["--shard-key-file", self._write("shards.pem", shard_key)]
        return [*command, *replica.flags]

    def _write(self, name: str, content: bytes) -> str:
        """A file for this user alone, which goes with the server."""
        path = self._folder / name
        path.touch(0o600)
        path.write_bytes(content)
        return str(path)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    def url(self, timeout: float) -> str:
        """Its address, once it listens. Raises ServerError."""
        if not self._listening.wait(timeout) or not self._url:
            raise ServerError(f"luce serve does not start: {' | '.join(self._last[-3:])}")
        return self._url

    def runs(self) -> bool:
        """Whether the child is there."""
        return self._child.poll() is None

    def close(self) -> None:
        """Let running requests end, and the prefix cache be written; then end the child. Idempotent."""
        self._stopping = True
        stop(self._child, self._drain + CLOSE_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self) -> None:
        """Pass on what the child writes, and find its address in it; in the end tell that it has ended."""
        assert self._child.stdout is not None
        with self._child.stdout as lines:
            for line in lines:
                text = line.decode(errors="replace").rstrip()
                self._last = [*self._last[-9:], text]
                print(text, file=sys.stderr, flush=True)
                if not self._url and (found := listening_url(text)):
                    self._url = found
                    self._listening.set()
        status = self._child.wait()
        self._listening.set()
        if not self._stopping:
            self._on_exit(status)


def listening_url(line: str) -> str:
    """The address in the line of the JSON log that says where a server listens; "" in others."""
    try:
        found = json.loads(line)
    except ValueError:
        return ""
    if not isinstance(found, dict) or found.get("event") != "listening":
        return ""
    return str(found.get("url", ""))
