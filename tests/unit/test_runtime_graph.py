"""Graphs of a driver without hardware: every capture ends, every graph is released."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from luce.errors import DeviceError
from luce.runtime.driver import Driver
from luce.runtime.graph import DriverGraph
from tests.support.fake_cuda import fake_driver


@pytest.fixture
def fake(tmp_path: Path) -> Driver:
    return fake_driver(tmp_path)


def number(fake: Driver, name: str) -> ctypes.c_int:
    return ctypes.c_int.in_dll(fake.library, name)


def test_launches_until_dropped(fake: Driver) -> None:
    graph = DriverGraph(fake, 5)
    with graph.capturing():
        assert number(fake, "capturing").value == 1
    for _ in range(3):
        graph.launch()
    assert [number(fake, name).value for name in ("capturing", "launches", "graphs")] == [0, 3, 1]
    del graph
    assert number(fake, "graphs").value == 0


@pytest.mark.parametrize("broken", [0, 1])
def test_work_that_fails_ends_the_capture(fake: Driver, broken: int) -> None:
    number(fake, "broken").value = broken
    graph = DriverGraph(fake, 5)
    with pytest.raises(KeyError), graph.capturing():
        raise KeyError
    del graph
    assert [number(fake, name).value for name in ("capturing", "graphs")] == [0, 0]


def test_a_capture_that_was_invalidated(fake: Driver) -> None:
    number(fake, "broken").value = 1
    graph = DriverGraph(fake, 5)
    with pytest.raises(DeviceError, match="cuStreamEndCapture: capture invalidated"), graph.capturing():
        pass
    assert number(fake, "capturing").value == 0


def test_host_work_runs_between_the_parts_of_each_launch(fake: Driver) -> None:
    graph, seen = DriverGraph(fake, 5), list[int]()
    with graph.capturing():
        for _ in range(2):
            graph.cut(lambda: seen.append(number(fake, "launches").value))
            assert number(fake, "capturing").value == 1
        assert not seen
    graph.launch()
    assert seen == [1, 2]
    graph.launch()
    assert seen == [1, 2, 4, 5]
    assert [number(fake, name).value for name in ("capturing", "launches", "graphs")] == [0, 6, 3]
    del graph
    assert number(fake, "graphs").value == 0


def test_a_cut_that_fails_ends_the_capture(fake: Driver) -> None:
    graph = DriverGraph(fake, 5)
    with pytest.raises(DeviceError, match="cuStreamEndCapture"), graph.capturing():
        number(fake, "broken").value = 1
        graph.cut(lambda: None)
    del graph
    assert number(fake, "graphs").value == 0
