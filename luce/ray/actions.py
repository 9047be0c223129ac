"""What the actions of `luce ray` do: start a node, deploy, show, end what was started."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from luce.config.environment import child_environment
from luce.errors import ServerError, UnsupportedError, UsageError
from luce.ray.cluster_config import ClusterConfig
from luce.ray.node import Node
from luce.ray.node_resources import resources_of
from luce.ray.tls_keys import make_keys

#: seconds beside those that requests have, in which the application ends
_MORE = 30.0

Say = Callable[[str], None]


def resources(config: ClusterConfig) -> dict[str, int]:
    """What this machine offers: the devices that `luce doctor` finds with the interpreter of each kind.

    Raises UsageError if an interpreter does not run it.
    """
    found: dict[str, int] = {}
    for kind, python in config.luce_python.items():
        command = [python, "-P", "-m", "luce", "doctor", "--json"]
        try:
            done = subprocess.run(command, env=child_environment({}), capture_output=True, text=True, check=False)
            report = json.loads(done.stdout)
        except (OSError, ValueError) as error:
            raise UsageError(f"luce_python.{kind}: {python} does not run `luce doctor`: {error}") from None
        if count := resources_of(report).get(f"luce_{kind}"):
            found[f"luce_{kind}"] = count
    return found


def up(config: ClusterConfig, offered: Mapping[str, float] | None, node: str | None, say: Say) -> None:
    """Start the head with the application, or with `node`, the address of this machine, a further node.

    `offered`: resources instead of those that are found. Raises UsageError, ServerError, and UnsupportedError if the
    nodes cannot hold a replica.
    """
    _require_ray()
    here = Node(config, node)
    if here.running():
        if node is not None:
            raise UsageError(f"a node of {config.head.address}:{config.head.port} runs on this machine already")
        say("the head runs; the application is updated")
    else:
        here.start(resources(config) if offered is None else offered)
        say(f"node {here.address} of {config.head.address}:{config.head.port} runs")
    if node is not None:
        return
    found = here.ask("deploy", config)
    if lacking := found["missing"]:
        raise UnsupportedError(f"the nodes cannot hold a replica: {'; '.join(lacking)}")
    here.note()
    url = f"http://{config.head.http_host}:{config.head.http_port}"
    if found["runs"]:
        say(f"{config.name} runs; {url} answers")
    else:
        say(f"{config.name} is deployed; {url} answers once a replica has loaded the model: see `luce ray status`")


def down(config: ClusterConfig, say: Say) -> None:
    """End the node of this machine, on the head the application before."""
    _require_ray()
    here = Node(config, None)
    if here.is_head and here.running():
        with contextlib.suppress(ServerError):
            # A head whose raylet is gone does not answer.
            here.ask("remove", config, config.replica.drain + _MORE)
    say(f"{here.stop()} processes ended")


def keys(config: ClusterConfig, node: str | None, say: Say) -> None:
    """Make the keys of TLS for the head, or with `node`, its address, for another machine. Raises UsageError."""
    folder = config.head.tls_folder
    if not folder:
        raise UsageError("luce ray keys: name a folder for them, head.tls_folder of the file")
    files = make_keys(Path(folder), node or config.head.address)
    if node is None:
        say(
            f"keys of the head, {config.head.address}, are in {folder}; `--node ADDRESS` makes those of another machine"
        )
    else:
        say("\n".join([f"copy these to {folder} of {node}, where its user alone can read the key:", *map(str, files)]))


def status(config: ClusterConfig) -> dict[str, Any]:
    """What Ray and Luce say; `differences` has a line for each disagreement. Raises ServerError."""
    _require_ray()
    found = Node(config, None).ask("status", config)
    return {**found, "differences": differences(found)}


def differences(found: Mapping[str, Any]) -> list[str]:
    """Where Ray and Luce disagree. Pure."""
    replicas = found["replicas"]
    lines = [
        f"replica {each['replica']}: Ray has it running, Luce is silent" for each in replicas if not each["answers"]
    ]
    dead = {node["address"] for node in found["nodes"]} - {n["address"] for n in found["nodes"] if n["alive"]}
    lines += [
        f"replica {each['replica']}: it answers, Ray has its node {each['node']} dead"
        for each in replicas
        if each["answers"] and each["node"] in dead
    ]
    states = ((found["application"] or {}).get("deployments") or {}).get("replica", {})
    running = states.get("RUNNING", 0)
    answering = sum(each["answers"] for each in replicas)
    if answering > running:
        lines.append(f"{answering} replicas answer, Ray has {running} running")
    return lines


def check_address(address: str) -> None:
    """Raises UsageError for what is no IP address of one machine: Ray asks a server of the internet for its own address
    unless it is told, and listens on all interfaces for 0.0.0.0."""
    try:
        unusable = ipaddress.ip_address(address).is_unspecified
    except ValueError:
        unusable = True
    if unusable:
        raise UsageError(f"{address}: expected the IP address of this machine that the other nodes reach")


def _require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise UsageError("luce ray: needs Ray, in an environment of its own: pip install 'luce-llm[ray]' there")
