"""What a node offers to Ray, and whether the nodes can hold a replica. Pure.

One unit of `luce_cuda`, `luce_hip` or `luce_cpu` is one device. Ray's own `GPU` is not used: it knows no AMD GPU beside
an NVIDIA one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Resources = Mapping[str, float]


def resources_of(report: Mapping[str, Any]) -> dict[str, int]:
    """The resources of a node, from the JSON of `luce doctor`: its devices that work, by kind."""
    found: dict[str, int] = {}
    for device in report["devices"]:
        if device["works"]:
            name = f"luce_{str(device['device']).partition(':')[0]}"
            found[name] = found.get(name, 0) + 1
    return found


def missing(bundles: Sequence[Resources], nodes: Sequence[Resources], *, one_node: bool) -> list[str]:
    """What `nodes` lack to hold all bundles at once, a line each; nothing if they fit.

    `one_node`: all bundles on the same node. The lines name the first bundle for which no room is found, though Ray
    may be out of room for another one.
    """
    if one_node:
        whole = _sum(bundles)
        if any(_fits(whole, node) for node in nodes):
            return []
        return [f"no node has {_words(whole)} together; {_largest(whole, nodes)}"]
    if _placed(sorted(bundles, key=lambda bundle: -sum(bundle.values())), [dict(node) for node in nodes]):
        return []
    lines = [
        f"bundle {number}: no node has {_words(bundle)}; {_largest(bundle, nodes)}"
        for number, bundle in enumerate(bundles)
        if not any(_fits(bundle, node) for node in nodes)
    ]
    if lines:
        return lines
    whole, there = _sum(bundles), _sum(nodes)
    short = {name: amount - there.get(name, 0) for name, amount in whole.items() if amount > there.get(name, 0)}
    if short:
        return [f"the nodes lack {_words(short)}: {len(bundles)} bundles need {_words(whole)}"]
    return [f"{len(bundles)} bundles need {_words(whole)}, which the nodes have only in other shares"]


def room_for(count: int, bundles: Sequence[Resources], nodes: Sequence[Resources], *, one_node: bool) -> bool:
    """Whether `nodes` hold so many times all bundles, each time on one node if `one_node`."""
    return not missing(count * ([_sum(bundles)] if one_node else list(bundles)), nodes, one_node=False)


def unlike_versions(found: Mapping[str, Mapping[str, str]]) -> str:
    """Why this machine cannot join, "" if it can. `found`: by `head` and `here`, the versions of `ray` and `python`,
    which must be the same, of Python without the last part."""

    def words(which: str) -> str:
        return f"Ray {found[which]['ray']} and Python {found[which]['python']}"

    def compared(which: str) -> tuple[str, list[str]]:
        return found[which]["ray"], found[which]["python"].split(".")[:2]

    if compared("head") == compared("here"):
        return ""
    return f"the head runs {words('head')}, this environment has {words('here')}; make one with the head's versions"


def _placed(bundles: Sequence[Resources], free: list[dict[str, float]]) -> bool:
    """Whether all bundles find a place: tries all nodes for each, as replicas have few bundles. Equal nodes count
    once."""
    if not bundles:
        return True
    tried = []
    for node in free:
        if node in tried or not _fits(bundles[0], node):
            continue
        tried.append(dict(node))
        for name, amount in bundles[0].items():
            node[name] = node.get(name, 0) - amount
        if _placed(bundles[1:], free):
            return True
        node.update(tried[-1])
    return False


def _fits(bundle: Resources, node: Resources) -> bool:
    return all(node.get(name, 0) >= amount for name, amount in bundle.items())


def _sum(parts: Sequence[Resources]) -> dict[str, float]:
    whole: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            whole[name] = whole.get(name, 0) + amount
    return whole


def _words(resources: Resources) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items())) or "nothing"


def _largest(wanted: Resources, nodes: Sequence[Resources]) -> str:
    """The most that any node has of each resource that is wanted."""
    most = {name: max((node.get(name, 0) for node in nodes), default=0) for name in wanted}
    return f"the most of a node is {_words(most)}"
