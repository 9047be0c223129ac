"""The part of `luce ray` that talks to Ray, as a program of its own: Ray reads its settings from the environment when
it is imported.

`python -m luce.ray.serve_session VERB ADDRESS PARENT` reads JSON on standard input, writes a JSON object, and ends with
the process PARENT.
"""

from __future__ import annotations

import json
import logging
import platform
import sys
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray._private.ray_constants import KV_NAMESPACE_CLUSTER
from ray._private.state import available_resources_per_node
from ray._raylet import GcsClient
from ray.serve import RunTarget
from ray.serve.schema import ApplicationStatus

from luce.errors import ServerError
from luce.ipc.parent import die_with_parent
from luce.ray.application import application
from luce.ray.cluster_config import ClusterConfig, parse_config
from luce.ray.ingress_scaling import living_nodes
from luce.ray.leasing import NAMESPACE
from luce.ray.node_resources import missing, room_for

#: for an answer of the control store
_ASK_SECONDS = 20
#: that `luce ray up` waits for the application to run
_SETTLE_SECONDS = 60


def deploy(content: Mapping[str, Any]) -> dict[str, Any]:
    """Start or update the application; `missing` has what the nodes lack, in which case nothing is started."""
    config = parse_config(content)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    lacking = missing(config.bundles, nodes, one_node=config.replica.one_machine)
    if lacking:
        return {"missing": lacking}
    serve.start(proxy_location="EveryNode", http_options={"host": config.head.http_host, "port": config.head.http_port})
    target = RunTarget(
        application(config, living_nodes(), spare=_has_spare(config)), name=config.name, route_prefix="/"
    )
    serve.run_many([target], wait_for_applications_running=False)
    return {"missing": [], "runs": _settles(config.name)}


def _has_spare(config: ClusterConfig) -> bool:
    """Whether the nodes have room for one more replica than there may be, however many there are when it starts."""
    app = serve.status().applications.get(config.name)
    states = app.deployments["replica"].replica_states if app is not None and "replica" in app.deployments else {}
    further = config.replica.most - states.get("RUNNING", 0) + 1
    free = list(available_resources_per_node().values())
    return room_for(max(1, further), config.bundles, free, one_node=config.replica.one_machine)


def _settles(name: str) -> bool:
    """Whether the application runs within a minute: a large model takes longer to load, and a replica may wait for a
    node that joins later. Raises ServerError if it cannot start."""
    end = time.monotonic() + _SETTLE_SECONDS
    while (app := serve.status().applications[name]).status != ApplicationStatus.RUNNING:
        if app.status == ApplicationStatus.DEPLOY_FAILED:
            raise ServerError(f"{name} does not start: {app.message}")
        if time.monotonic() > end:
            return False
        time.sleep(0.5)
    return True


def status(content: Mapping[str, Any]) -> dict[str, Any]:
    """Nodes, the application as Serve sees it, the replicas as Luce sees them, and the groups that find no place."""
    config = parse_config(content)
    nodes = [
        {
            "address": node["NodeManagerAddress"],
            "alive": node["Alive"],
            "resources": {name: n for name, n in node["Resources"].items() if name.startswith("luce_")},
        }
        for node in ray.nodes()
    ]
    found: dict[str, Any] = {
        "ray": ray.__version__,
        "python": platform.python_version(),
        "nodes": nodes,
        "application": None,
    }
    found |= {"replicas": [], "pending": []}
    app = serve.status().applications.get(config.name)
    if app is not None:
        deployments = {name: each.replica_states for name, each in app.deployments.items()}
        found["application"] = {"status": app.status, "message": app.message, "deployments": deployments}
        # It tells of replicas that cannot start as well.
        if deployments.get("ingress", {}).get("RUNNING"):
            found |= serve.get_app_handle(config.name).status.remote().result(timeout_s=30)
    return found


def remove(content: Mapping[str, Any]) -> dict[str, Any]:
    """End the application in order: replicas drain, and write their prefix caches."""
    serve.delete(parse_config(content).name)
    serve.shutdown()
    return {}


def wait(content: Mapping[str, Any]) -> dict[str, Any]:
    """Nothing but the connection, and that the node `address`, if there is one, has joined. Raises ServerError."""
    alive = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if content["address"] and content["address"] not in alive:
        raise ServerError(f"{content['address']} has not joined")
    return {"nodes": len(alive)}


def versions(address: str) -> dict[str, Any]:
    """Those of the head and of this environment, before this machine joins. Raises ServerError."""
    # What Ray's own processes compare once they have joined.
    found = GcsClient(address).internal_kv_get(
        b"CLUSTER_METADATA", namespace=KV_NAMESPACE_CLUSTER, timeout=_ASK_SECONDS
    )
    if found is None:
        raise ServerError("the head does not tell its versions")
    head = json.loads(found)
    return {
        "head": {"ray": head["ray_version"], "python": head["python_version"]},
        "here": {"ray": ray.__version__, "python": platform.python_version()},
    }


VERBS = {"deploy": deploy, "status": status, "remove": remove, "wait": wait}


def main() -> None:
    """Run a verb."""
    verb, address, parent = sys.argv[1:]
    # Ray's calls may wait for ever, and nobody would read the answer.
    die_with_parent(int(parent))
    content = json.load(sys.stdin)
    # Standard output has the answer alone.
    answer_to, sys.stdout = sys.stdout, sys.stderr
    if verb == "versions":
        found = versions(address)
    else:
        ray.init(address, namespace=NAMESPACE, logging_level=logging.WARNING, log_to_driver=False)
        found = VERBS[verb](content)
    json.dump(found, answer_to, default=str)
    answer_to.flush()


if __name__ == "__main__":
    main()
