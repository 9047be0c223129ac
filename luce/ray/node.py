"""Ray on this machine: its processes, the environment they get, and the files that go with them.

Ray runs in processes of its own, with its settings in their environment: tokens are required, statistics off, and a
node that stands still counts as dead after 8 s instead of a minute. All that they write lies in one folder of this
user, which goes when the node ends; the logs of the last node are kept.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from luce.config.directories import user_data_directory, user_state_directory
from luce.config.environment import child_environment
from luce.errors import ServerError, UnsupportedError, UsageError
from luce.ray import process_list
from luce.ray.cluster_config import ClusterConfig, plain_content
from luce.ray.node_resources import unlike_versions
from luce.ray.tls_keys import ray_settings

#: a node is dead after an initial second and three pings, one a second, that each wait for 2 s at most
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
#: seconds for a node to start, for a call of the session, and for processes to end
_START, _CALL, _END = 120.0, 300.0, 20.0
#: how often a node is started before that fails
_TRIES = 2
#: seconds for which Ray's processes wait for a control store that is away, where nothing else is said: a year
_NEVER = 31_536_000
_MIB = 1 << 20
_HEAD = "head"


class Node:
    """The node of this machine: its files, its environment, its processes. `address`: its own, None for that of a node
    which runs here, and for the head."""

    def __init__(self, config: ClusterConfig, address: str | None) -> None:
        head = config.head
        self._head, self._drain = head, config.replica.drain
        self.state = user_state_directory() / "ray" / f"{head.address}-{head.port}"
        self._list, self._log = self.state / "processes.json", self.state / "node.log"
        self._role, self._folder = self.state / "role", self.state / "folder"
        role = address or (self._role.read_text() if self._role.exists() else _HEAD)
        self.is_head = role == _HEAD
        self.address = head.address if self.is_head else role
        self._token = Path(head.token_file) if head.token_file else user_data_directory() / "ray-token"
        self._tls = Path(head.tls_folder) if head.tls_folder else None

    def running(self) -> bool:
        """Whether it runs: its first process, which ends when another one that it needs is gone."""
        return any(map(process_list.runs, process_list.read(self._list)[:1]))

    def start(self, offered: Mapping[str, float]) -> None:
        """Start Ray's processes, and wait until they answer. Raises ServerError, and UnsupportedError where the head
        runs other versions."""
        token = read_token(self._token, make=self.is_head)
        if not self.is_head and (unlike := unlike_versions(self._call("versions", {}, _START))):
            raise UnsupportedError(f"{self._head.address}:{self._head.port}: {unlike}")
        self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Of a node whose raylet was lost, some of Ray's processes wait for the control store to tell it.
        process_list.end(process_list.read(self._list), 1.0)
        self._remove_folder()
        # Ray ends if its processes need more than 15 or 30 s to start, as they may on a busy machine.
        for _ in range(_TRIES):
            process = self._begin(offered, token)
            end = time.monotonic() + _START
            while process.poll() is None and time.monotonic() < end:
                with contextlib.suppress(ServerError):
                    self._call("wait", {"address": "" if self.is_head else self.address}, end - time.monotonic())
                    self._note([process.pid])
                    return
                time.sleep(0.5)
            ended = process.poll() is not None
            self.stop()
            if not ended:
                break
        raise ServerError(f"Ray does not start; see {self._log}")

    def _begin(self, offered: Mapping[str, float], token: Path) -> subprocess.Popen[bytes]:
        # In the system's directory for temporary files: the paths of Ray's sockets may have 107 bytes.
        folder = tempfile.mkdtemp(prefix="luce-ray-")
        self._folder.write_text(folder)
        self._role.write_text(_HEAD if self.is_head else self.address)
        with open(self._log, "wb") as log:
            process = subprocess.Popen(
                self._command(offered, folder),
                env={**self._environment(token), "TMPDIR": folder, **self._ending(), **self._waiting()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._note([process.pid])
        return process

    def _command(self, offered: Mapping[str, float], folder: str) -> list[str]:
        head = self._head
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += ["--node-ip-address", self.address, "--object-store-memory", str(head.object_store_mib * _MIB)]
        command += ["--resources", json.dumps(dict(offered)), "--include-log-monitor", "false", "--temp-dir", folder]
        if not self.is_head:
            return [*command, "--address", f"{head.address}:{head.port}"]
        command += ["--head", "--port", str(head.port), "--include-dashboard", "false"]
        return [*command, "--system-config", json.dumps(HEALTH)]

    def _environment(self, token: Path) -> dict[str, str]:
        return child_environment(
            {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(token),
                "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
                "RAY_USAGE_STATS_ENABLED": "0",
                # By default Serve sends replies as calls of actors. At the end of a reply, Ray then stops the replica's
                # event loop until the caller has received all items: for ever, if the caller is lost together with the
                # control store.
                "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
                "PYTHONUNBUFFERED": "1",
                **({} if self._tls is None else ray_settings(self._tls, self.address)),
            }
        )

    def _ending(self) -> dict[str, str]:
        """How long Ray lets a node's replicas end before its processes do. On the head `down` has ended them before."""
        return {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0" if self.is_head else f"{self._drain:g}"}

    def _waiting(self) -> dict[str, str]:
        """How long Ray's processes wait for a control store that does not answer; a minute unless told.

        On the head they end with it.
        """
        if self.is_head:
            return {}
        return {"RAY_gcs_rpc_server_reconnect_timeout_s": f"{math.ceil(self._head.timeout) or _NEVER}"}

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
        command = [sys.executable, "-m", "luce.ray.serve_session", verb, address, str(os.getpid())]
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
        ended = process_list.end(roots[:1], _END + (0 if self.is_head else self._drain))
        # Ray ends its own with the first of them; what does not listen is killed.
        process_list.end([*roots, *below], 1.0)
        self._remove_folder()
        self._list.unlink(missing_ok=True)
        self._role.unlink(missing_ok=True)
        return max(ended, len({*roots, *below}))

    def _remove_folder(self) -> None:
        """Remove the folder of a node that has ended, but for its logs."""
        if not self._folder.exists():
            return
        folder, logs = Path(self._folder.read_text()), self.state / "logs"
        for session in folder.glob("session_*"):
            if not session.is_symlink() and (session / "logs").is_dir():
                shutil.rmtree(logs, ignore_errors=True)
                shutil.move(session / "logs", logs)
        shutil.rmtree(folder, ignore_errors=True)
        self._folder.unlink()


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
