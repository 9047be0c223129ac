"""Lets an actor end with its node, and where the control store is silent for long."""

from __future__ import annotations

from ray._private.worker import global_worker

from luce.ray.cluster_config import ClusterConfig
from luce.ray.process_guard import end_now, watch

_ASK_SECONDS = 2


def guard_this_actor(config: ClusterConfig) -> None:
    """Watch the raylet and the control store from now on."""
    client = global_worker.gcs_client

    def answers() -> bool:
        try:
            client.internal_kv_exists(b"luce", namespace=b"luce", timeout=_ASK_SECONDS)
        except Exception:
            return False
        return True

    watch(answers, config.head.timeout, end_now)
