"""Two machines under Ray with TLS, the second one in a network namespace: a replica over both, and one that stands
still."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import luce
from luce.ray.pending_groups import PATIENCE
from tests.support.daemons import within
from tests.support.network_namespaces import ADDRESS, NAMESPACE, NETWORK, cable, ip
from tests.support.ray_cluster import MODEL, ROOT, SECONDS, RayCluster, ended, events, gone, streamed

pytestmark = pytest.mark.ray
__all__ = ["cable"]

BODY = {"prompt": "Once upon a time", "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture
def machines(cable: None, tmp_path: Path) -> Iterator[tuple[RayCluster, RayCluster]]:
    """The head and a further node, a device each; nothing is deployed before both are there."""
    ip("-n", NAMESPACE, "link", "set", "lo", "up")
    keys = f'tls_folder = "{tmp_path}/keys"'
    head = RayCluster(tmp_path, 1, 'shards = ["cpu"]', head=keys, address=ADDRESS, http="0.0.0.0")
    inside = ("ip", "netns", "exec", NAMESPACE)
    other = head.node(f"{NETWORK}2", *inside)
    for more in ((), ("--node", f"{NETWORK}2")):
        assert head.luce("keys", *more).returncode == 0
    with contextlib.ExitStack() as running:
        running.enter_context(ended(head))
        done = head.luce("up", "--resources", '{"luce_cpu": 1}')
        # One machine has no room for both devices: the head runs, and says what is missing.
        assert done.returncode == 3 and "lack 1 luce_cpu" in done.stderr, done.stderr + head.node_log()
        # Another Python does not join, and leaves nothing.
        (tmp_path / "sitecustomize.py").write_text("import platform\nplatform.python_version = lambda: '3.99.1'\n")
        other.inside = [*inside, "env", f"PYTHONPATH={tmp_path}:{ROOT}"]
        done = other.luce("up", "--node", f"{NETWORK}2", "--resources", '{"luce_cpu": 1}')
        assert done.returncode == 3 and "this environment has Ray" in done.stderr and "3.99.1" in done.stderr
        other.inside = list(inside)
        running.enter_context(ended(other))
        other.start(1, "--node", f"{NETWORK}2")
        head.up(0)
        yield head, other


def shaken(head: RayCluster, folder: Path, *, known: bool) -> bool:
    """Whether the head's store takes a connection of TLS; `known`: with a certificate of the cluster's authority."""
    context = ssl.create_default_context(cafile=folder / "authority.pem")
    if known:
        context.load_cert_chain(folder / f"{ADDRESS}.pem", folder / f"{ADDRESS}.key")
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((ADDRESS, head.head_port), 10) as plain,
            context.wrap_socket(plain, server_hostname=ADDRESS) as connection,
        ):
            # In TLS 1.3 the server looks at the client's certificate behind the client's end of the handshake; HTTP/2
            # begins with its settings.
            return bool(connection.recv(9))
    except (ssl.SSLError, ConnectionError):
        return False


def test_a_replica_over_two_machines_and_a_machine_that_stands_still(
    machines: tuple[RayCluster, RayCluster], tmp_path: Path
) -> None:
    head, other = machines
    with luce.load(MODEL, target_device="cpu:0", threads=1, kv_cache_dir="off") as model:
        text = "".join(t.text for t in model.generate("Once upon a time", max_tokens=40, temperature=0.0))
    assert streamed(head, {**BODY, "max_tokens": 40, "ignore_eos": False}) == (text, [])
    assert shaken(head, tmp_path / "keys", known=True) and not shaken(head, tmp_path / "keys", known=False)
    # Each machine has one of the processes of the replica.
    parts = [[*each.processes("luce", "serve"), *each.processes("luce", "shard")] for each in machines]
    assert [len(each) for each in parts] == [1, 1]
    expected = streamed(head, BODY)
    with head.open("/v1/completions", BODY) as response:
        stream = events(response)
        found = [next(stream)]
        stopped = other.processes()
        for each in stopped:
            os.kill(each.pid, signal.SIGSTOP)
        began = time.monotonic()
        # A shard is silent: its replica ends, and none of its processes is left here.
        assert within(60, lambda: gone(parts[0]))
        print(f"\nthe replica of a machine that stands still ended after {time.monotonic() - began:.1f} s")
        assert within(60, lambda: not head.alive(f"{NETWORK}2"))
        # Awake again, the machine was given up: its processes end by themselves. No device is left for another shard,
        # which is told after a minute, so the stream waits until the machine is back, with processes of a new life.
        for each in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGCONT)
        began = time.monotonic()
        assert within(60, lambda: gone(parts[1]))
        print(f"awake again, its processes ended after {time.monotonic() - began:.1f} s")
        other.luce("down")
        (group,) = pending(head)
        assert group["seconds"] >= PATIENCE and "luce_cpu" in group["lacks"]
        other.start(1, "--node", f"{NETWORK}2")
        found += stream
    assert ("".join(event["choices"][0]["text"] for event in found), list[str]()) == expected
    head.until_healthy()
    assert within(SECONDS, lambda: head.status().get("pending") == [])


def pending(head: RayCluster) -> list[dict[str, Any]]:
    """The groups that wait, once there are any."""
    found: list[dict[str, Any]] = []

    def look() -> bool:
        # A question takes a core for seconds, which other tests have use for.
        time.sleep(3)
        found.extend(head.status().get("pending", ()))
        return bool(found)

    assert within(SECONDS, look)
    return found
