"""Placement groups that find no place are told, with what they lack, once they have waited for a minute."""

from __future__ import annotations

from typing import Any

from luce.ray.pending_groups import PATIENCE, PendingGroups, lacks

NODES, FREE = [{"luce_cpu": 2.0}, {"luce_cuda": 1.0}], [{"luce_cpu": 0.0}, {"luce_cuda": 1.0}]


def group(state: str = "PENDING", strategy: str = "PACK", placed: str = "", **bundle: float) -> dict[str, Any]:
    bundles = {0: {"luce_cuda": 1.0}, 1: bundle or {"luce_cpu": 1.0}}
    return {
        "state": state,
        "strategy": strategy,
        "bundles": bundles,
        "bundles_to_node_id": {0: placed, 1: ""},
    }


def test_a_group_is_told_once_it_has_waited_for_long() -> None:
    groups, waits = PendingGroups(), {"a": group(), "b": group(state="CREATED"), "c": group(state="RESCHEDULING")}
    assert groups.report(waits, NODES, FREE, 10.0) == []
    assert groups.report(waits, NODES, FREE, 9.9 + PATIENCE) == []
    told = groups.report(waits, NODES, FREE, 10.0 + PATIENCE)
    assert [each["seconds"] for each in told] == [PATIENCE, PATIENCE]
    # One that found its place meanwhile begins anew.
    assert groups.report({"a": group(state="CREATED")}, NODES, FREE, 80.0) == []
    assert groups.report(waits, NODES, FREE, 90.0) == []
    assert groups.report({}, NODES, FREE, 300.0) == groups.report(waits, NODES, FREE, 300.0) == []


def test_what_a_group_lacks_is_what_no_node_has_or_what_others_use() -> None:
    assert "no node has 1 luce_hip" in lacks(group(luce_hip=1.0), NODES, FREE)
    assert lacks(group(), NODES, FREE).startswith("others use what it needs: bundle 1: no node has 1 luce_cpu")
    assert lacks(group(strategy="STRICT_PACK"), NODES, FREE).startswith("no node has 1 luce_cpu, 1 luce_cuda together")
    assert "not placed it yet" in lacks(group(), NODES, NODES)
    # A bundle that has its place needs no other.
    taken = [{"luce_cpu": 1.0}, {"luce_cuda": 0.0}]
    assert "not placed it yet" in lacks(group(placed="3f"), NODES, taken)
    assert lacks(group(placed="ff" * 28), NODES, taken).startswith("others use")
