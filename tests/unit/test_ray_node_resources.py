"""What a node offers to Ray, whether nodes can hold a replica, and which actor has which device."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce.errors import DeviceError
from luce.ray.device_leases import DeviceLeases
from luce.ray.node_resources import missing, resources_of, room_for

CUDA, HIP = {"CPU": 1.0, "luce_cuda": 1.0}, {"CPU": 1.0, "luce_hip": 1.0}


def test_only_devices_that_work_count() -> None:
    devices = [("cuda:0", True), ("cuda:1", False), ("cuda:2", True), ("hip:0", True), ("cpu:0", True)]
    report = {"devices": [{"device": name, "works": works} for name, works in devices]}
    assert resources_of(report) == {"luce_cuda": 2, "luce_hip": 1, "luce_cpu": 1}


def test_what_is_missing_is_said() -> None:
    nodes = [{"CPU": 4.0, "luce_cuda": 2.0}, {"CPU": 4.0, "luce_cpu": 1.0}]
    assert missing([CUDA, CUDA], nodes, one_node=False) == []
    (line,) = missing([CUDA, HIP], nodes, one_node=False)
    assert line.startswith("bundle 1: no node has 1 CPU, 1 luce_hip") and "0 luce_hip" in line
    (line,) = missing([CUDA] * 3, nodes, one_node=False)
    assert line.startswith("the nodes lack 1 luce_cuda: 3 bundles")
    both = [*nodes, {"CPU": 4.0, "luce_hip": 1.0}]
    assert missing([CUDA, HIP], both, one_node=False) == []
    (line,) = missing([CUDA, HIP], both, one_node=True)
    assert line.startswith("no node has 2 CPU, 1 luce_cuda, 1 luce_hip together")
    # Two of each kind are there, but no node has two CPUs beside a device for the larger bundle.
    uneven = [{"CPU": 1.0, "luce_cuda": 2.0}, {"CPU": 3.0}]
    (line,) = missing([CUDA, CUDA], uneven, one_node=False)
    assert "only in other shares" in line
    assert missing([CUDA], [], one_node=False) != []


@given(
    st.lists(st.fixed_dictionaries({"a": st.integers(0, 3), "b": st.integers(0, 3)}), min_size=1, max_size=4),
    st.lists(st.fixed_dictionaries({"a": st.integers(0, 4), "b": st.integers(0, 4)}), max_size=3),
)
def test_bundles_fit_exactly_where_some_assignment_does(
    bundles: list[dict[str, float]], nodes: list[dict[str, float]]
) -> None:
    def holds(places: tuple[int, ...]) -> bool:
        return all(
            sum(bundle[name] for bundle, place in zip(bundles, places, strict=True) if place == number) <= node[name]
            for number, node in enumerate(nodes)
            for name in "ab"
        )

    possible = any(holds(places) for places in itertools.product(range(len(nodes)), repeat=len(bundles)))
    assert (missing(bundles, nodes, one_node=False) == []) == (possible and bool(nodes))


def test_room_for_several_replicas() -> None:
    bundles = [{"luce_cpu": 1.0}, {"luce_cpu": 1.0}]
    nodes = [{"luce_cpu": 3.0}, {"luce_cpu": 1.0}]
    assert room_for(2, bundles, nodes, one_node=False) and not room_for(3, bundles, nodes, one_node=False)
    assert room_for(1, bundles, nodes, one_node=True) and not room_for(2, bundles, nodes, one_node=True)


def test_devices_are_leased_once_and_come_back() -> None:
    leases = DeviceLeases({"cuda": 2, "cpu": 1})
    alive = {"a", "b", "c"}
    assert [leases.acquire("cuda", owner, alive) for owner in "ab"] == [0, 1]
    assert leases.acquire("cpu", "a", alive) == 0
    with pytest.raises(DeviceError, match="cuda: all 2 devices"):
        leases.acquire("cuda", "c", alive)
    # b is gone, and its device with it; those of the others stay theirs.
    assert leases.acquire("cuda", "c", {"a", "c"}) == 1
    with pytest.raises(DeviceError, match="cuda: all 2 devices"):
        leases.acquire("cuda", "d", {"a", "c", "d"})
    with pytest.raises(DeviceError, match="hip: all 0"):
        leases.acquire("hip", "a", alive)
