"""Lets an actor end with its node: where that is gone, or was given up by the control store."""

from __future__ import annotations

import ray
from ray import NodeID
from ray._private.worker import global_worker

from luce.ray.cluster_config import ClusterConfig
from luce.ray.process_guard import end_now, watch

_ASK_SECONDS = 2


def guard_this_actor(config: ClusterConfig) -> None:
    """Watch the raylet and the control store from now on."""
    client = global_worker.gcs_client
    node = NodeID.from_hex(ray.get_runtime_context().get_node_id())

    def alive() -> bool | None:
        try:
            return bool(client.check_alive([node], timeout=_ASK_SECONDS)[0])
        except Exception:
            return None

    watch(alive, config.head.timeout, end_now)
