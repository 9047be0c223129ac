"""How many ingresses run: one on each node, so that what a node's clients talk to does not end with another one.

A policy of Serve's autoscaling, which its controller asks again and again.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.serve.config import AutoscalingContext


def one_on_each_node(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """The number of nodes that are alive, and a state that nobody needs."""
    return living_nodes(), {}


def living_nodes() -> int:
    """How many nodes Ray has as alive, at least one."""
    return max(1, sum(bool(node["Alive"]) for node in ray.nodes()))
