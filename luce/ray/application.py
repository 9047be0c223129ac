"""The application of Serve: the ingress before the replicas, with how many there are and how they are placed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

import luce
from luce.ray.cluster_config import ClusterConfig, plain_content
from luce.ray.ingress import Ingress
from luce.ray.replica import Replica
from luce.ray.request_facts import body_limit

#: calls that a replica takes beside the requests that it serves: its queue, reports and keys
_MORE_CALLS = 64
#: most nodes of a cluster: Serve wants a limit
_MOST_NODES = 1000


def application(config: ClusterConfig, nodes: int, *, spare: bool) -> Any:
    """The application, for Serve. `nodes`: how many there are. `spare`: whether they have room for one more replica,
    which an update starts before it ends an old one; otherwise it ends one, starts one, and so on."""
    content, replica = plain_content(config), config.replica
    router = {}
    if config.routing == "prefix":
        router["request_router_config"] = RequestRouterConfig(
            request_router_class="luce.ray.request_router:PrefixRouter",
            request_router_kwargs={"app": config.name},
        )
    scaling = AutoscalingConfig(
        min_replicas=replica.least,
        max_replicas=replica.most,
        initial_replicas=replica.least,
        target_ongoing_requests=replica.parallel,
        upscale_delay_s=replica.upscale_delay,
        downscale_delay_s=replica.downscale_delay,
        # The mean of longer would delay what a short delay asks for; reports come each 10 s.
        look_back_period_s=min(30.0, max(11.0, replica.upscale_delay)),
    )
    replicas = serve.deployment(Replica).options(
        name="replica",
        autoscaling_config=scaling,
        max_ongoing_requests=2 * replica.parallel + _MORE_CALLS,
        health_check_period_s=2,
        health_check_timeout_s=4,
        graceful_shutdown_timeout_s=replica.drain + 10,
        # Rounded up to one replica. Without room Serve would wait for it, and update nothing.
        max_surge_percent=int(spare),
        placement_group_bundles=config.bundles,
        placement_group_strategy=config.strategy,
        ray_actor_options={"num_cpus": 0},
        **router,
    )
    # One on each node, for requests to Serve's HTTP proxy there: it has the records of that node's streams, which go
    # on when other nodes are lost, the head too.
    everywhere = AutoscalingConfig(
        min_replicas=1,
        max_replicas=_MOST_NODES,
        initial_replicas=nodes,
        upscale_delay_s=0,
        downscale_delay_s=0,
        policy=AutoscalingPolicy(policy_function="luce.ray.ingress_scaling:one_on_each_node"),
    )
    front = serve.deployment(Ingress).options(
        name="ingress",
        autoscaling_config=everywhere,
        max_ongoing_requests=10_000,
        max_replicas_per_node=1,
        graceful_shutdown_timeout_s=replica.drain + 10,
        ray_actor_options={"num_cpus": 0},
        request_router_config=RequestRouterConfig(request_router_class="luce.ray.request_router:LocalRouter"),
    )
    # Serve replaces what has another version, and by default makes up a new one each time. Streams of an ingress that
    # is replaced end with it.
    front = front.options(version=ingress_version(config), _internal=True)
    return front.bind(replicas.bind(content), content)


def ingress_version(config: ClusterConfig) -> str:
    """A text that changes with Luce's code, and with what an ingress reads of a configuration."""
    read = (config.name, config.routing, config.resume, config.head.timeout, config.api_key_file)
    digest = hashlib.sha256(repr(read).encode())
    digest.update(b"%d" % body_limit(config.replica.flags))
    package = Path(luce.__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(f"\0{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
