"""What the actions of `luce ray` do: start a node, deploy, show, end what was started.

Ray runs in processes of its own, with its settings in their environment: tokens are required, statistics off, and a
node that stands still counts as dead after 8 s instead of a minute.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import json
import os
import secrets
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from luce.config.directories import user_data_directory, user_state_directory
from luce.config.environment import child_environment
from luce.errors import ServerError, UnsupportedError, UsageError
from luce.ray import process_list
from luce.ray.cluster_config import ClusterConfig, plain_content
from luce.ray.node_resources import resources_of

#: a node is dead after an initial second and three pings, one a second, that each wait for 2 s at most
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
#: seconds for a node to start, for a call of the session, and for processes to end
_START, _CALL, _END = 120.0, 300.0, 20.0
#: seconds beside those that requests have, in which the application ends
_MORE = 30.0
_MIB = 1 << 20

Say = Callable[[str], None]


def resources(config: ClusterConfig) -> dict[str, int]:
    """What this machine offers: the devices that `luce doctor` finds with the interpreter of each kind.

    Raises UsageError if an interpreter does not run it.
    """
    found: dict[str, int] = {}
    for kind, python in config.luce_python.items():
        command = [python, "-P", "-m", "luce", "doctor", "--json"]
        try:
            done = subprocess.run(command, env=child_environment({}), capture_output=True, text=True, check=False)
            report = json.loads(done.stdout)
        except (OSError, ValueError) as error:
            raise UsageError(f"luce_python.{kind}: {python} does not run `luce doctor`: {error}") from None
        if count := resources_of(report).get(f"luce_{kind}"):
            found[f"luce_{kind}"] = count
    return found


def up(config: ClusterConfig, offered: Mapping[str, float] | None, node: str | None, say: Say) -> None:
    """Start the head with the application, or with `node`, the address of this machine, a further node.

    `offered`: resources instead of those that are found. Raises UsageError, ServerError, and UnsupportedError if the
    nodes cannot hold a replica.
    """
    _require_ray()
    here = Node(config, node)
    if here.running():
        if node is not None:
            raise UsageError(f"a node of {config.head.address}:{config.head.port} runs on this machine already")
        say("the head runs; the application is updated")
    else:
        here.start(resources(config) if offered is None else offered)
        say(f"node {here.address} of {config.head.address}:{config.head.port} runs")
    if node is not None:
        return
    lacking = here.ask("deploy", config)["missing"]
    if lacking:
        raise UnsupportedError(f"the nodes cannot hold a replica: {'; '.join(lacking)}")
    here.note()
    say(f"{config.name} is deployed; http://{config.head.http_host}:{config.head.http_port} answers once it is loaded")


def down(config: ClusterConfig, say: Say) -> None:
    """End the node of this machine, on the head the application before."""
    _require_ray()
    here = Node(config, None)
    if here.is_head and here.running():
        with contextlib.suppress(ServerError):
            # A head whose raylet is gone does not answer.
            here.ask("remove", config, config.replica.drain + _MORE)
    say(f"{here.stop()} processes ended")


def status(config: ClusterConfig) -> dict[str, Any]:
    """What Ray and Luce say; `differences` has a line for each disagreement. Raises ServerError."""
    _require_ray()
    found = Node(config, None).ask("status", config)
    return {**found, "differences": differences(found)}


def differences(found: Mapping[str, Any]) -> list[str]:
    """Where Ray and Luce disagree. Pure."""
    lines = [
        f"replica {each['replica']}: Ray has it running, Luce is silent"
        for each in found["replicas"]
        if not each["answers"]
    ]
    states = ((found["application"] or {}).get("deployments") or {}).get("replica", {})
    running = states.get("RUNNING", 0)
    answering = sum(each["answers"] for each in found["replicas"])
    if answering > running:
        lines.append(f"{answering} replicas answer, Ray has {running} running")
    return lines


class Node:
    """The node of this machine: its files, its environment, its processes. `address`: its own, None for the head."""

    def __init__(self, config: ClusterConfig, address: str | None) -> None:
        head = config.head
        self._head = head
        folder = user_state_directory() / "ray" / f"{head.address}-{head.port}"
        self._list, self._log = folder / "processes.json", folder / "node.log"
        self._role = folder / "role"
        self.is_head = address is None and (not self._role.exists() or self._role.read_text() == "head")
        self.address = address or head.address
        self._token = Path(head.token_file) if head.token_file else user_data_directory() / "ray-token"

    def running(self) -> bool:
        """Whether processes of it run."""
        return any(map(process_list.runs, process_list.read(self._list)))

    def start(self, offered: Mapping[str, float]) -> None:
        """Start Ray's processes, and wait until they answer. Raises ServerError."""
        token = read_token(self._token, make=self.is_head)
        self._list.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._role.write_text("head" if self.is_head else "node")
        with open(self._log, "wb") as log:
            process = subprocess.Popen(
                self._command(offered),
                env=self._environment(token),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._note([process.pid])
        end = time.monotonic() + _START
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(ServerError):
                self._call("wait", {}, end - time.monotonic())
                self._note([process.pid])
                return
            time.sleep(0.5)
        self.stop()
        raise ServerError(f"Ray does not start; see {self._log}")

    def _command(self, offered: Mapping[str, float]) -> list[str]:
        head = self._head
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += ["--node-ip-address", self.address, "--object-store-memory", str(head.object_store_mib * _MIB)]
        command += ["--resources", json.dumps(dict(offered)), "--include-log-monitor", "false"]
        if not self.is_head:
            return [*command, "--address", f"{head.address}:{head.port}"]
        command += ["--head", "--port", str(head.port), "--include-dashboard", "false"]
        return [*command, "--system-config", json.dumps(HEALTH)]

    def _environment(self, token: Path) -> dict[str, str]:
        return child_environment(
            {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(token),
                "RAY_USAGE_STATS_ENABLED": "0",
                "PYTHONUNBUFFERED": "1",
            }
        )

    def note(self) -> None:
        """Write down what runs by now: workers come and go."""
        self._note([each.pid for each in process_list.read(self._list) if process_list.runs(each)][:1])

    def _note(self, roots: list[int]) -> None:
        process_list.write(self._list, process_list.descendants(roots))

    def ask(self, verb: str, config: ClusterConfig, timeout: float = _CALL) -> dict[str, Any]:
        """What the session with Ray answers. Raises ServerError."""
        return self._call(verb, plain_content(config), timeout)

    def _call(self, verb: str, content: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        address = f"{self._head.address}:{self._head.port}"
        command = [sys.executable, "-m", "luce.ray.serve_session", verb, address]
        environment = self._environment(read_token(self._token, make=False))
        try:
            done = subprocess.run(
                command, env=environment, input=json.dumps(content), capture_output=True, text=True, timeout=timeout
            )
            return dict(json.loads(done.stdout))
        except subprocess.TimeoutExpired:
            raise ServerError(f"Ray at {address} does not answer within {timeout:g} s") from None
        except ValueError:
            lines = done.stderr.strip().splitlines() or ["no answer"]
            raise ServerError(f"Ray at {address}: {lines[-1]}") from None

    def stop(self) -> int:
        """End what was written down and what these have started; returns how many processes that were."""
        known = process_list.read(self._list)
        roots = [each for each in known if process_list.runs(each)]
        below = process_list.descendants([each.pid for each in roots[:1]])
        ended = process_list.end(roots[:1], _END)
        # Ray ends its own with the first of them; what does not listen is killed.
        process_list.end([*roots, *below], 1.0)
        self._list.unlink(missing_ok=True)
        self._role.unlink(missing_ok=True)
        return max(ended, len({*roots, *below}))


def read_token(path: Path, *, make: bool) -> Path:
    """The file of Ray's token, made if it is missing and `make` says so. Raises UsageError if there is none, or if
    others can read it."""
    if make and not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise UsageError(f"head.token_file {path}: {error.strerror}; copy that of the head") from None
    if mode & 0o077:
        raise UsageError(f"head.token_file {path}: other users can read it (mode {mode:04o}); run chmod 600")
    return path


def check_address(address: str) -> None:
    """Raises UsageError for what is no IP address of one machine: Ray asks a server of the internet for its own address
    unless it is told, and listens on all interfaces for 0.0.0.0."""
    try:
        unusable = ipaddress.ip_address(address).is_unspecified
    except ValueError:
        unusable = True
    if unusable:
        raise UsageError(f"{address}: expected the IP address of this machine that the other nodes reach")


def _require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise UsageError("luce ray: needs Ray, in an environment of its own: pip install 'luce-llm[ray]' there")
