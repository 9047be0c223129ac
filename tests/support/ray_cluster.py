"""`luce ray` as processes: a head with replicas on this machine, in Ray's environment, with directories of its own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from luce.ray import process_list
from luce.ray.process_list import Process
from tests.support.daemons import within

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "tiny" / "target.gguf"
#: the interpreter of an environment with Ray
PYTHON = os.environ.get("RAY_TEST_PYTHON", "")
SECONDS = 300


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class RayCluster:
    """A head on this machine."""

    def __init__(self, folder: Path, replicas: int, replica: str) -> None:
        if not PYTHON:
            pytest.skip("RAY_TEST_PYTHON names no interpreter with Ray")
        self.folder, self._replicas = folder, replicas
        self.port, self._head_port = free_port(), free_port()
        self.file = folder / "ray.toml"
        paths = {"XDG_STATE_HOME": str(folder / "state"), "XDG_DATA_HOME": str(folder / "data")}
        self._environment = {**os.environ, **paths, "PYTHONPATH": str(ROOT)}
        self.write(replica=replica)

    def write(self, *flags: str, replica: str = "") -> None:
        """Write the configuration, with further flags of the replicas and lines of their table."""
        listed = ["--kv-cache-dir", "off", "--threads", "1", "--no-warmup", *flags]
        self.file.write_text(
            f'model = "{MODEL}"\n[luce_python]\ncpu = "{sys.executable}"\ncuda = "{sys.executable}"\n'
            f"[head]\nport = {self._head_port}\nhttp_port = {self.port}\n"
            f"[replica]\nleast = {self._replicas}\nmost = {self._replicas}\ndrain = 20\nflags = {json.dumps(listed)}\n"
            f"{replica}\n"
        )

    def luce(self, action: str, *more: str) -> subprocess.CompletedProcess[str]:
        """`luce ray ACTION`."""
        command = [PYTHON, "-m", "luce", "ray", action, str(self.file), *more]
        # Another folder: what is imported comes from where an installation has it.
        return subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=SECONDS, cwd=self.folder
        )

    def up(self, devices: int) -> None:
        """Start the head, or update the application, and wait until all replicas answer."""
        done = self.luce("up", "--resources", json.dumps({"luce_cpu": devices}))
        assert done.returncode == 0, done.stderr + self.node_log()
        self.until_healthy()

    def until_healthy(self) -> None:
        """Wait until all replicas answer and no other runs."""
        assert within(SECONDS, self.healthy), self.status()

    def healthy(self) -> bool:
        """Whether all replicas answer and no other runs."""
        found = self.status()
        states = ((found.get("application") or {}).get("deployments") or {}).get("replica")
        answering = [each for each in found.get("replicas", ()) if each["answers"]]
        return states == {"RUNNING": self._replicas} and len(answering) == self._replicas

    def status(self) -> dict[str, Any]:
        """`luce ray status`; empty while Ray does not answer."""
        done = self.luce("status", "--json")
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {}

    def node_log(self) -> str:
        """What Ray has written."""
        return "".join(path.read_text() for path in self.folder.glob("state/luce/ray/*/node.log"))

    def processes(self, *words: str) -> list[Process]:
        """Those of the cluster whose command has all words."""
        (path,) = self.folder.glob("state/luce/ray/*/processes.json")
        roots = [each.pid for each in process_list.read(path)[:1]]
        return [each for each in process_list.descendants(roots) if set(words) <= set(command_of(each))]

    def children(self) -> list[Process]:
        """The replicas' `luce serve`."""
        return self.processes("luce", "serve")

    def post(self, path: str, body: Any, timeout: float = SECONDS) -> Any:
        """The status and the JSON of a reply."""
        try:
            with self.open(path, body, timeout) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def open(self, path: str, body: Any, timeout: float = SECONDS) -> Any:
        """A response that is read by the caller."""
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self.port}{path}"
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout)


def command_of(process: Process) -> list[str]:
    """The words of its command line."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


def gone(processes: Sequence[Process]) -> bool:
    """Whether none of them runs."""
    return not any(map(process_list.runs, processes))


@contextlib.contextmanager
def ray_cluster(folder: Path, replicas: int, devices: int, replica: str = "") -> Iterator[RayCluster]:
    """A cluster of one node, which ends with nothing left of it. `replica`: lines of that table."""
    cluster = RayCluster(folder, replicas, replica)
    try:
        cluster.up(devices)
        yield cluster
    finally:
        known = cluster.processes()
        done = cluster.luce("down")
        assert done.returncode == 0, done.stderr
        assert within(60, lambda: gone(known)), [command_of(each) for each in known if process_list.runs(each)]
