"""What Serve is told of ingress and replicas: how many, where, how long they have to end, and who gets a request. No
cluster runs.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.support.ray_cluster import PYTHON, ROOT

pytestmark = pytest.mark.ray

PROGRAM = """
import json, sys
from luce.ray.application import application
from luce.ray.cluster_config import parse_config
content, nodes, spare = json.load(sys.stdin)
front = application(parse_config(content), nodes, spare=spare)._bound_deployment
found = {each.name: each for each in (front, front.init_args[0]._bound_deployment)}
told = {
    name: {
        **each._deployment_config.autoscaling_config.model_dump(include={
            "min_replicas", "max_replicas", "initial_replicas", "target_ongoing_requests", "upscale_delay_s",
            "downscale_delay_s"}),
        "policy": each._deployment_config.autoscaling_config.policy.policy_function,
        "shutdown": each._deployment_config.graceful_shutdown_timeout_s,
        "surge": each._deployment_config.max_surge_percent,
        "period": each._deployment_config.health_check_period_s,
        "timeout": each._deployment_config.health_check_timeout_s,
        "router": each._deployment_config.request_router_config.request_router_class,
        "bundles": each._replica_config.placement_group_bundles,
        "strategy": each._replica_config.placement_group_strategy,
        "a node": each._replica_config.max_replicas_per_node,
        "version": each._version,
    }
    for name, each in found.items()
}
json.dump(told, sys.stdout)
"""
CONTENT: dict[str, Any] = {"model": "x", "luce_python": {"cpu": "/python", "hip": "/python"}}


ROUTES = """
import asyncio, json, sys, time
from types import SimpleNamespace as Made
from ray.serve._private.common import DeploymentHandleSource, DeploymentID
from luce.ray.request_router import LocalRouter
async def chosen(nodes, waited):
    source = DeploymentHandleSource.PROXY
    router = LocalRouter(self_node_id="here", deployment_id=DeploymentID("ingress", "luce"), handle_source=source)
    replicas = [Made(replica_id=node, node_id=node, availability_zone=None) for node in nodes]
    router._update_colocated_replica_ids_with_replicas(replicas)
    pending = Made(created_at=time.time() - waited, routing_context=Made(should_backoff=False))
    ranks = await router.choose_replicas(replicas, pending)
    return [pending.routing_context.should_backoff, *([each.node_id for each in rank] for rank in ranks if rank)]
json.dump([asyncio.run(chosen(*each)) for each in json.load(sys.stdin)], sys.stdout)
"""


def told(nodes: int = 1, *, spare: bool = False, **content: Any) -> Any:
    """What Serve is told, by deployment."""
    return answer(PROGRAM, [{**CONTENT, **content}, nodes, spare])


def answer(program: str, given: Any) -> Any:
    """What a program in Ray's environment makes of this."""
    if not PYTHON:
        pytest.skip("RAY_TEST_PYTHON names no interpreter with Ray")
    command = [PYTHON, "-c", program]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_serve_is_told_what_the_configuration_says() -> None:
    replica = told()["replica"]
    assert (replica["min_replicas"], replica["max_replicas"], replica["initial_replicas"]) == (1, 1, 1)
    assert (replica["target_ongoing_requests"], replica["upscale_delay_s"], replica["downscale_delay_s"]) == (
        4,
        30,
        600,
    )
    assert (replica["shutdown"], replica["period"], replica["timeout"], replica["surge"]) == (40, 2, 4, 0)
    assert (replica["bundles"], replica["strategy"]) == ([{"luce_cpu": 1}], "PACK")
    assert replica["router"] == "luce.ray.request_router:PrefixRouter"
    table = {"devices": ["hip", "hip"], "shards": ["cpu"], "one_machine": True, "parallel": 8, "least": 2, "most": 5}
    more = told(spare=True, routing="default", replica={**table, "drain": 5})["replica"]
    assert (more["min_replicas"], more["max_replicas"], more["target_ongoing_requests"]) == (2, 5, 8)
    assert (more["bundles"], more["strategy"]) == ([{"luce_hip": 2}, {"luce_cpu": 1}], "STRICT_PACK")
    assert (more["shutdown"], more["surge"]) == (15, 1) and "PrefixRouter" not in more["router"]


def test_each_node_has_an_ingress_that_updates_of_replicas_keep() -> None:
    ingress = told(3)["ingress"]
    assert (ingress["initial_replicas"], ingress["a node"]) == (3, 1)
    assert ingress["policy"] == "luce.ray.ingress_scaling:one_on_each_node"
    assert ingress["router"] == "luce.ray.request_router:LocalRouter"
    same = told(replica={"parallel": 2, "drain": 5, "flags": ["--max-ctx", "8k"]})["ingress"]
    assert same["version"] == ingress["version"]
    others = [{"routing": "default"}, {"resume": 1}, {"name": "other"}, {"head": {"timeout": 9}}]
    others.append({"api_key_file": "/keys"})
    others.append({"replica": {"flags": ["--max-body-mib", "1"]}})
    versions = {told(**other)["ingress"]["version"] for other in others}
    assert len(versions) == len(others) and ingress["version"] not in versions


def test_a_request_stays_on_its_machine_while_that_answers() -> None:
    here, long, elsewhere = answer(ROUTES, [[["here", "a"], 4], [["a", "here"], 6], [["a", "b"], 0]])
    # True: Serve waits before it asks again.
    assert (here, long, elsewhere) == ([True, ["here"]], [True, ["here"], ["a"]], [True, ["a", "b"]])
