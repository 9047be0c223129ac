"""Placement groups that find no place: since when, and what they lack. Pure: the caller gives Ray's table and the time.

Ray lets a group pend for ever and does not say for what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from luce.ray.node_resources import Resources, missing

#: seconds that a group may pend before it is told
PATIENCE = 60.0
_WAITING = ("PENDING", "RESCHEDULING")


class PendingGroups:
    """The groups that had no place whenever somebody looked."""

    def __init__(self) -> None:
        #: by id, when it was first seen to wait
        self._since: dict[str, float] = {}

    def report(
        self,
        table: Mapping[str, Mapping[str, Any]],
        nodes: Sequence[Resources],
        free: Sequence[Resources],
        now: float,
    ) -> list[dict[str, Any]]:
        """Note which groups of Ray's table wait; of each that has waited for long: `seconds` and `lacks`. `nodes`,
        `free`: what each node has, and what of it nobody uses."""
        waiting = [name for name, group in table.items() if group["state"] in _WAITING]
        self._since = {name: self._since.get(name, now) for name in waiting}
        return [
            {"seconds": now - since, "lacks": lacks(table[name], nodes, free)}
            for name, since in self._since.items()
            if now - since >= PATIENCE
        ]


def lacks(group: Mapping[str, Any], nodes: Sequence[Resources], free: Sequence[Resources]) -> str:
    """What the bundles of a group that have no node yet would need."""
    places = group["bundles_to_node_id"]
    # Ray's id of no node: nothing, or all bits set.
    bundles = [bundle for number, bundle in sorted(group["bundles"].items()) if not places.get(number, "").strip("f")]
    together = group["strategy"] == "STRICT_PACK"
    if lines := missing(bundles, nodes, one_node=together):
        return "; ".join(lines)
    lines = missing(bundles, free, one_node=together)
    return f"others use what it needs: {'; '.join(lines)}" if lines else "nothing: Ray has not placed it yet"
