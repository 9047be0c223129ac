"""The part of `luce ray` that talks to Ray, as a program of its own: Ray reads its settings from the environment when
it is imported. `python -m luce.ray.serve_session VERB ADDRESS` reads JSON on standard input, and writes a JSON object.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve

from luce.ray.application import application
from luce.ray.cluster_config import parse_config
from luce.ray.leasing import NAMESPACE
from luce.ray.node_resources import missing


def deploy(content: Mapping[str, Any]) -> dict[str, Any]:
    """Start or update the application; `missing` has what the nodes lack, in which case nothing is started."""
    config = parse_config(content)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    lacking = missing(config.bundles, nodes, one_node=config.replica.one_machine)
    if lacking:
        return {"missing": lacking}
    serve.start(proxy_location="EveryNode", http_options={"host": config.head.http_host, "port": config.head.http_port})
    serve.run(application(config), name=config.name, route_prefix="/", blocking=False)
    return {"missing": []}


def status(content: Mapping[str, Any]) -> dict[str, Any]:
    """Nodes, the application as Serve sees it, and the replicas as Luce sees them."""
    config = parse_config(content)
    nodes = [
        {
            "address": node["NodeManagerAddress"],
            "alive": node["Alive"],
            "resources": {name: n for name, n in node["Resources"].items() if name.startswith("luce_")},
        }
        for node in ray.nodes()
    ]
    found: dict[str, Any] = {"ray": ray.__version__, "nodes": nodes, "application": None, "replicas": []}
    app = serve.status().applications.get(config.name)
    if app is not None:
        deployments = {name: each.replica_states for name, each in app.deployments.items()}
        found["application"] = {"status": app.status, "message": app.message, "deployments": deployments}
        handle = serve.get_app_handle(config.name)
        if app.status == "RUNNING":
            found["replicas"] = handle.status.remote().result(timeout_s=30)
    return found


def remove(content: Mapping[str, Any]) -> dict[str, Any]:
    """End the application in order: replicas drain, and write their prefix caches."""
    serve.delete(parse_config(content).name)
    serve.shutdown()
    return {}


def wait(content: Mapping[str, Any]) -> dict[str, Any]:
    """Nothing but the connection: the node answers."""
    return {"nodes": len(ray.nodes())}


VERBS = {"deploy": deploy, "status": status, "remove": remove, "wait": wait}


def main() -> None:
    """Run a verb."""
    verb, address = sys.argv[1:]
    content = json.load(sys.stdin)
    # Standard output has the answer alone.
    answer_to, sys.stdout = sys.stdout, sys.stderr
    ray.init(address, namespace=NAMESPACE, logging_level=logging.WARNING, log_to_driver=False)
    found = VERBS[verb](content)
    json.dump(found, answer_to, default=str)
    answer_to.flush()


if __name__ == "__main__":
    main()
