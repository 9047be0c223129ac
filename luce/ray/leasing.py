"""The device leases of a node, as an actor that outlives replicas. Only the node's own processes ask it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from luce.ray import process_list
from luce.ray.device_leases import DeviceLeases
from luce.ray.process_list import Process

#: namespace of Luce's named actors
NAMESPACE = "luce"


class Leasing:
    """The actor. An owner is a process of this node; its leases end with it."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._leases = DeviceLeases(counts)
        self._owners: dict[str, Process] = {}

    def acquire(self, kind: str, pid: int) -> int:
        """The index of a device for a process. Raises DeviceError."""
        owner = process_list.process(pid)
        assert owner is not None, f"process {pid} asks from another node"
        self._owners[str(owner)] = owner
        alive = {name for name, process in self._owners.items() if process_list.runs(process)}
        return self._leases.acquire(kind, str(owner), alive)


def acquire_devices(kinds: tuple[str, ...]) -> list[str]:
    """Devices of this node for this process, by name: one of each kind. They come back when this process ends."""
    own = _own_node()
    node, resources = own["NodeID"], own["Resources"]
    actor = _actor(node, {name[5:]: int(count) for name, count in resources.items() if name.startswith("luce_")})
    return [f"{kind}:{ray.get(actor.acquire.remote(kind, os.getpid()))}" for kind in kinds]


def node_address() -> str:
    """The address of this node that `luce ray up` was given. Ray's own guess may be that of another network."""
    return str(_own_node()["NodeManagerAddress"])


def _own_node() -> Mapping[str, Any]:
    """This node, as Ray has it."""
    node = ray.get_runtime_context().get_node_id()
    (found,) = (each for each in ray.nodes() if each["NodeID"] == node)
    return dict(found)


def _actor(node: str, counts: Mapping[str, int]) -> Any:
    """The actor of a node, which the first who asks starts."""
    options = {
        "name": f"leases-{node}",
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    return ray.remote(Leasing).options(**options).remote(dict(counts))
