"""`luce ray` as processes: a head with replicas on this machine, in Ray's environment, with directories of its own."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from luce.ray import process_list
from luce.ray.process_list import Process
from tests.support.daemons import within
from tests.support.key_files import write_keys

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "tiny" / "target.gguf"
#: the interpreter of an environment with Ray
PYTHON = os.environ.get("RAY_TEST_PYTHON", "")
SECONDS = 300


def free_port() -> int:
    """A port that is free now, and below those of outgoing connections, one of which could take it before Ray does."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("", port))
            return port


class RayCluster:
    """A head on this machine. `replica`, `head`: further lines of these tables of the configuration; `address`: of the
    head; `http`: where the machines answer clients; `routing`, `drain`, `flags`: as in the configuration."""

    def __init__(
        self,
        folder: Path,
        replicas: int,
        replica: str = "",
        *,
        head: str = "",
        address: str = "127.0.0.1",
        http: str = "127.0.0.1",
        routing: str = "prefix",
        drain: int = 20,
        flags: Sequence[str] = (),
    ) -> None:
        if not PYTHON:
            pytest.skip("RAY_TEST_PYTHON names no interpreter with Ray")
        self.folder, self._replicas, self._most = folder, replicas, replicas
        self.address, self._http = address, http
        #: where clients talk to this machine
        self.reached = address
        self.port, self.head_port = free_port(), free_port()
        self.file = folder / "ray.toml"
        self._replica, self._head, self._routing = replica, head, routing
        self._drain, self._flags = drain, flags
        #: that clients need from the next `write` on; "": they need none
        self.api_key = ""
        #: the folder of what `up` writes down, and what a command begins with
        self.state, self.inside = folder / "state", list[str]()
        #: this one and its further machines
        self._machines = [self]
        self.write()

    def node(self, reached: str, *inside: str) -> RayCluster:
        """A further machine of the cluster, with the address `reached`, whose commands begin with `inside`."""
        other = copy.copy(self)
        other.reached, other.state, other.inside = reached, self.folder / "other", list(inside)
        self._machines.append(other)
        return other

    def change(self, replicas: int, replica: str = "", *, most: int = 0) -> None:
        """Update the application to so many replicas, with other lines of their table, and wait until all answer.
        `most`: where there may be more."""
        self._replicas, self._most, self._replica = replicas, most or replicas, replica
        self.write()
        self.up(0)

    @property
    def _environment(self) -> dict[str, str]:
        paths = {"XDG_STATE_HOME": str(self.state), "XDG_DATA_HOME": str(self.folder / "data")}
        # Serve's processes report their load each 10 s unless told: scaling would wait for it.
        reports = {f"RAY_SERVE_{each}_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1" for each in ("HANDLE", "REPLICA")}
        return {**os.environ, **paths, **reports, "PYTHONPATH": str(ROOT)}

    def write(self, *flags: str, replica: str = "") -> None:
        """Write the configuration, with further flags of the replicas and lines of their table."""
        listed = ["--kv-cache-dir", "off", "--threads", "1", "--no-warmup", *self._flags, *flags]
        keys = ""
        if self.api_key:
            keys = f'api_key_file = "{write_keys(self.folder / "keys", self.api_key)}"\n'
        self.file.write_text(
            f'{keys}model = "{MODEL}"\nresume = {SECONDS}\nrouting = "{self._routing}"\n'
            f'[luce_python]\ncpu = "{sys.executable}"\ncuda = "{sys.executable}"\n'
            f'[head]\naddress = "{self.address}"\nport = {self.head_port}\n'
            f'http_host = "{self._http}"\nhttp_port = {self.port}\n{self._head}\n'
            f"[replica]\nleast = {self._replicas}\nmost = {self._most}\n"
            f"drain = {self._drain}\nflags = {json.dumps(listed)}\n"
            f"{self._replica}\n{replica}\n"
        )

    def _command(self, action: str, *more: str) -> list[str]:
        return [*self.inside, PYTHON, "-m", "luce", "ray", action, str(self.file), *more]

    def luce(self, action: str, *more: str) -> subprocess.CompletedProcess[str]:
        """`luce ray ACTION`."""
        # Another folder: what is imported comes from where an installation has it.
        return subprocess.run(
            self._command(action, *more),
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            cwd=self.folder,
        )

    @contextlib.contextmanager
    def guarded(self) -> Iterator[subprocess.Popen[bytes]]:
        """A process that ends the machine where this one is interrupted or killed: the end of its standard input
        tells."""
        waiting = ["sh", "-c", 'cat; exec "$@"', "sh", *self._command("down")]
        silent = subprocess.DEVNULL
        with subprocess.Popen(
            waiting,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=silent,
            stderr=silent,
            cwd=self.folder,
            start_new_session=True,
        ) as guard:
            yield guard

    def up(self, devices: int) -> None:
        """Start the head with so many devices, or update the application, and wait until all replicas answer."""
        self.start(devices)
        self.until_healthy()

    def start(self, devices: int, *more: str) -> None:
        """`luce ray up`, where this machine has so many devices; 0: it runs."""
        offered = ["--resources", json.dumps({"luce_cpu": devices})] if devices else []
        done = self.luce("up", *offered, *more)
        assert done.returncode == 0, done.stderr + self.node_log()

    def until_healthy(self) -> None:
        """Wait until all replicas answer and no other runs."""
        assert within(SECONDS, self.healthy), self.status()

    def healthy(self) -> bool:
        """Whether all replicas answer and no other runs."""
        return self.runs(self._replicas)

    def runs(self, replicas: int) -> bool:
        """Whether so many replicas answer and no other runs."""
        # To look at processes costs nothing, to ask Ray seconds of CPU.
        if sum(len(each.children()) for each in self._machines) != replicas:
            time.sleep(0.2)
            return False
        found = self.status()
        states = ((found.get("application") or {}).get("deployments") or {}).get("replica")
        # Without Luce's router only Ray knows of them.
        answering = sum(each["answers"] for each in found["replicas"]) if self._routing == "prefix" else replicas
        return states == {"RUNNING": replicas} == {"RUNNING": answering}

    def status(self) -> dict[str, Any]:
        """`luce ray status`; empty while Ray does not answer."""
        done = self.luce("status", "--json")
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {}

    def running(self) -> list[int]:
        """How many replicas Ray has as running; nothing while it does not answer."""
        application = self.status().get("application")
        return [] if application is None else [int(application["deployments"]["replica"].get("RUNNING", 0))]

    def alive(self, address: str) -> bool:
        """Whether Ray has a machine with this address as alive."""
        return any(node["alive"] for node in self.status().get("nodes", ()) if node["address"] == address)

    def token(self) -> str:
        """Ray's token, which `up` on the head has made."""
        return (self.folder / "data" / "luce" / "ray-token").read_text()

    def node_log(self) -> str:
        """What Ray has written."""
        return "".join(path.read_text() for path in self.state.glob("luce/ray/*/node.log"))

    def processes(self, *words: str) -> list[Process]:
        """Those of the cluster whose command has all words."""
        paths = self.state.glob("luce/ray/*/processes.json")
        roots = [each.pid for path in paths for each in process_list.read(path)[:1]]
        return [each for each in process_list.descendants(roots) if set(words) <= set(command_of(each))]

    def children(self) -> list[Process]:
        """The replicas' `luce serve`."""
        return self.processes("luce", "serve")

    def post(self, path: str, body: Any, key: str | None = None) -> Any:
        """The status and the JSON of a reply. `body`, `key`: as of open."""
        try:
            with self.open(path, body, key) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def open(self, path: str, body: Any, key: str | None = None) -> Any:
        """A response that is read by the caller. `body`: None for GET. `key`: instead of the clients'."""
        headers = {"Content-Type": "application/json"}
        if key or (key is None and self.api_key):
            # urllib encodes headers in Latin-1, as which the bytes of UTF-8 pass.
            headers["Authorization"] = f"Bearer {key or self.api_key}".encode().decode("latin-1")
        url = f"http://{self.reached}:{self.port}{path}"
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=SECONDS)


def events(response: Any) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def streamed(cluster: RayCluster, body: dict[str, Any]) -> tuple[str, list[str]]:
    """The text of a streamed completion, and its errors."""
    text, errors = "", []
    with cluster.open("/v1/completions", body) as response:
        for event in events(response):
            if "error" in event:
                errors.append(event["error"]["code"])
            else:
                text += event["choices"][0]["text"]
    return text, errors


def command_of(process: Process) -> list[str]:
    """The words of its command line."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


def gone(processes: Sequence[Process]) -> bool:
    """Whether none of them runs."""
    return not any(map(process_list.runs, processes))


@contextlib.contextmanager
def ray_cluster(folder: Path, replicas: int, devices: int, replica: str = "", **more: Any) -> Iterator[RayCluster]:
    """A cluster of one node, which ends with nothing left of it. Arguments as of RayCluster."""
    cluster = RayCluster(folder, replicas, replica, **more)
    with ended(cluster):
        cluster.up(devices)
        yield cluster


@contextlib.contextmanager
def ended(machine: RayCluster) -> Iterator[None]:
    """Ends what runs on a machine, with no process and no file of it left but logs."""
    with machine.guarded() as guard:
        try:
            yield
        finally:
            _end(machine)
            guard.kill()


def _end(machine: RayCluster) -> None:
    known = machine.processes()
    folders = [Path(path.read_text()) for path in machine.state.glob("luce/ray/*/folder")]
    done = machine.luce("down")
    assert done.returncode == 0, done.stderr
    assert within(60, lambda: gone(known)), [command_of(each) for each in known if process_list.runs(each)]
    assert not any(path.exists() for path in folders)
    assert {path.name for path in machine.state.glob("luce/ray/*/*")} == {"logs", "node.log"}
