"""Two machines under Ray, of which the head is lost, or gives the other one up: what goes on, and what comes back.

One cluster, which each test but the last leaves as it was: they run in their order.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from luce.ray.process_list import Process
from tests.support.daemons import within
from tests.support.network_namespaces import ADDRESS, NAMESPACE, NETWORK, cabled, ip
from tests.support.ray_cluster import SECONDS, RayCluster, command_of, ended, events, gone, streamed

pytestmark = pytest.mark.ray

BODY = {"prompt": "Once upon a time", "max_tokens": 2000, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RayCluster, RayCluster]]:
    """The head and a further node, with a replica each."""
    # What cannot ask the head any more is told to end, and killed when its replicas have had their time.
    head = RayCluster(tmp_path_factory.mktemp("ray"), 1, address=ADDRESS, http="0.0.0.0", drain=1)
    other = head.node(f"{NETWORK}2", "ip", "netns", "exec", NAMESPACE)
    with contextlib.ExitStack() as running:
        running.enter_context(cabled())
        ip("-n", NAMESPACE, "link", "set", "lo", "up")
        running.enter_context(ended(head))
        head.start(1)
        running.enter_context(ended(other))
        other.start(1, "--node", f"{NETWORK}2")
        head.change(2)
        yield head, other


def named(machine: RayCluster, name: str) -> Process:
    """The process of a machine with this name."""
    (found,) = [each for each in machine.processes() if Path(f"/proc/{each.pid}/comm").read_text().strip() == name]
    return found


def actors(machine: RayCluster) -> list[Process]:
    """Ray's actors on a machine: ingress, replica, leases, and the proxy that listens for clients."""
    return [each for each in machine.processes() if re.match("ray::(Serve|Proxy|Leasing)", command_of(each)[0])]


def sockets(process: Process) -> int:
    """How many it has open."""
    count = 0
    for path in Path(f"/proc/{process.pid}/fd").iterdir():
        # One that was closed meanwhile has no target.
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(path).startswith("socket:")
    return count


def lose(head: RayCluster) -> None:
    """Kill the control store: what holds devices or ports on the head's machine ends with it."""
    below = [*head.children(), *actors(head), named(head, "raylet")]
    os.kill(named(head, "gcs_server").pid, signal.SIGKILL)
    assert within(60, lambda: gone(below))


def test_a_node_that_was_given_up_keeps_nothing_though_its_raylet_is_there(
    machines: tuple[RayCluster, RayCluster],
) -> None:
    head, other = machines
    children, raylet = other.children(), named(other, "raylet")
    os.kill(raylet.pid, signal.SIGSTOP)
    assert children and within(60, lambda: gone(children))
    os.kill(raylet.pid, signal.SIGCONT)
    # The raylet learns it, and the node can join anew.
    other.luce("down")
    other.start(1, "--node", f"{NETWORK}2")
    head.until_healthy()


def test_a_new_head_ends_what_is_left_of_the_old_life_and_all_come_back(
    machines: tuple[RayCluster, RayCluster],
) -> None:
    head, other = machines
    workers = other.processes()
    lose(head)
    assert other.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
    with ThreadPoolExecutor(1) as threads:
        # `up` waits for both replicas, of which the second one has a place once the other machine has joined.
        starting = threads.submit(head.start, 1)
        assert within(SECONDS, lambda: gone(workers)), [command_of(each) for each in workers if not gone([each])]
        other.start(1, "--node", f"{NETWORK}2")
        starting.result()
    head.until_healthy()
    assert [len(each.children()) for each in machines] == [1, 1]


def test_what_has_reached_a_machine_goes_on_without_the_head(machines: tuple[RayCluster, RayCluster]) -> None:
    # The last test of this cluster.
    head, other = machines
    assert [len(each.children()) for each in machines] == [1, 1]
    expected = streamed(head, BODY)
    (lost,), (kept,) = head.children(), other.children()
    quiet = sockets(lost)
    with contextlib.ExitStack() as opened, ThreadPoolExecutor(14) as threads:
        responses = [opened.enter_context(other.open("/v1/completions", BODY)) for _ in range(8)]
        streams = [events(each) for each in responses]
        found = [[next(each)] for each in streams]
        # Twice what a replica serves at once: both have some, and that of the head goes.
        assert sockets(lost) > quiet + 1
        # Requests of the head's clients that the other machine serves end with the head, and stop nothing there.
        busy = sockets(kept)
        for _ in range(6):
            threads.submit(head.open, "/v1/completions", BODY)
        # They may take free connections instead of new ones: 5 s are enough for either.
        within(5, lambda: sockets(kept) > busy)
        lose(head)
        list(threads.map(list.extend, found, streams))
    for each in found:
        assert ("".join(event["choices"][0]["text"] for event in each), list[str]()) == expected
    assert streamed(other, BODY) == expected
    # With its raylet all ends that holds a device or a port, though no control store tells that the node is lost.
    workers, children, rays = other.processes(), other.children(), actors(other)
    assert children and len(rays) == 4
    os.kill(named(other, "raylet").pid, signal.SIGKILL)
    assert within(60, lambda: gone([*children, *rays]))
    # Two of Ray's own processes wait for the control store to tell it.
    other.luce("down")
    assert gone(workers)
