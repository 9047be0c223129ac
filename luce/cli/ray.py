"""`luce ray`: many copies of a model on many machines, placed and scaled by Ray."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from luce.cli.arguments import add_json
from luce.cli.options import raise_together
from luce.errors import UsageError
from luce.ray import actions as ray_actions
from luce.ray.cluster_config import read_config

_ACTIONS = {
    "up": "start Ray on this machine, and on the head the model; again on the head: deploy what has changed",
    "status": "show nodes, replicas, and those that wait for a place",
    "down": "end what `up` has started on this machine",
    "keys": "make keys of TLS for the head, or with --node for another machine",
    "resources": "show the devices of this machine as Ray gets them",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """ACTION, FILE and what the actions take."""
    actions = "; ".join(f"{action}: {text}" for action, text in _ACTIONS.items())
    parser.add_argument("action", metavar="ACTION", choices=_ACTIONS, help=actions)
    parser.add_argument("file", metavar="FILE", help="TOML file that describes the whole, the same on all machines")
    parser.add_argument(
        "--node",
        metavar="ADDRESS",
        help="up: join the head of FILE as the machine with this IP address; keys: make those of that machine",
    )
    parser.add_argument(
        "--resources", metavar="JSON", help="up: devices that Ray gets, instead of what `luce ray resources` shows"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the action; returns 0. Raises UsageError, ServerError, and UnsupportedError where nothing fits."""
    raise_together(list(_misused(arguments)))
    config = read_config(Path(arguments.file))
    ray_actions.check_address(arguments.node or config.head.address)
    match arguments.action:
        case "up":
            ray_actions.up(config, _resources(arguments.resources), arguments.node, print)
        case "down":
            ray_actions.down(config, print)
        case "keys":
            ray_actions.keys(config, arguments.node, print)
        case "resources":
            print(json.dumps(ray_actions.resources(config)))
        case _:
            found = ray_actions.status(config)
            if arguments.json:
                print(json.dumps(found, indent=2))
            else:
                print("\n".join(report_lines(found)))
    return 0


def _misused(arguments: argparse.Namespace) -> Iterator[UsageError]:
    for name, actions in (("node", ("up", "keys")), ("resources", ("up",))):
        if getattr(arguments, name) is not None and arguments.action not in actions:
            yield UsageError(f"luce ray {arguments.action}: --{name} is for {' and '.join(actions)}", param=name)
    if arguments.json and arguments.action != "status":
        yield UsageError(f"luce ray {arguments.action}: --json is for status", param="json")


def _resources(text: str | None) -> dict[str, float] | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
        if isinstance(found, dict) and all(isinstance(count, int) and count > 0 for count in found.values()):
            return found
    except ValueError:
        pass
    raise UsageError(f'--resources {text}: expected JSON such as {{"luce_cuda": 2}}', param="resources")


def report_lines(found: dict[str, Any]) -> Iterator[str]:
    """The report for people."""
    yield f"Ray {found['ray']}, Python {found['python']}"
    for node in found["nodes"]:
        devices = ", ".join(f"{count:g} {name}" for name, count in sorted(node["resources"].items()))
        yield f"node {node['address']}: {'alive' if node['alive'] else 'dead'}; {devices or 'no devices'}"
    app = found["application"]
    if app is None:
        yield "nothing is deployed"
    else:
        states = ", ".join(f"{count} {state.lower()}" for state, count in app["deployments"].get("replica", {}).items())
        yield f"application: {app['status'].lower()}; replicas: {states or 'none'}"
        if app["message"]:
            yield app["message"].strip().splitlines()[-1]
    for each in found["replicas"]:
        yield f"replica {each['replica']}: {_replica(each)}"
    for each in found["pending"]:
        yield f"a replica finds no place since {each['seconds']:.0f} s; it lacks {each['lacks']}"
    yield from found["differences"]


def _replica(each: dict[str, Any]) -> str:
    """A replica's place, versions and load."""
    if not each["answers"]:
        return "silent"
    where = f"node {each['node']}; {', '.join(each['devices'])}; Luce {each['luce']}; life {each['life'][:8]}"
    return f"{where}; {each['requests']} of {each['parallel']} requests, {each['blocks']} blocks cached"
