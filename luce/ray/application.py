"""The application of Serve: the ingress before the replicas, with how many there are and how they are placed."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from luce.ray.cluster_config import ClusterConfig, plain_content
from luce.ray.ingress import Ingress
from luce.ray.replica import Replica

#: calls that a replica takes beside the requests that it serves: its queue, reports and keys
_MORE_CALLS = 64


def application(config: ClusterConfig) -> Any:
    """The application, for serve.run."""
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
    )
    replicas = serve.deployment(Replica).options(
        name="replica",
        autoscaling_config=scaling,
        max_ongoing_requests=2 * replica.parallel + _MORE_CALLS,
        health_check_period_s=2,
        health_check_timeout_s=4,
        graceful_shutdown_timeout_s=replica.drain + 10,
        placement_group_bundles=config.bundles,
        placement_group_strategy=config.strategy,
        ray_actor_options={"num_cpus": 0},
        **router,
    )
    front = serve.deployment(Ingress).options(
        name="ingress", max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0}
    )
    return front.bind(replicas.bind(content), content)
