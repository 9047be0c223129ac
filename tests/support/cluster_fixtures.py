"""Fixtures of tests with a coordinator and hosts in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from luce.cluster import gate
from luce.cluster.coordinator import Coordinator
from tests.support.clusters import Host, coordinator, joined
from tests.support.daemons import within

Patch = pytest.MonkeyPatch
Make = Callable[..., Host]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Directories of this test's own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "coordinator"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gate, "REFUSAL_DELAY", 0.0)
    return tmp_path


@pytest.fixture
def hosts(folder: Path, monkeypatch: Patch) -> Iterator[Make]:
    """Makes hosts that have joined a coordinator; they leave at the end of the test."""
    made: list[Host] = []

    def make(coordinator: Coordinator, name: str = "box") -> Host:
        made.append(joined(coordinator, monkeypatch, folder, name))
        return made[-1]

    yield make
    for host in made:
        host.stop()


@pytest.fixture
def home(folder: Path) -> Iterator[Coordinator]:
    """A coordinator, which leaves no thread behind."""
    before = set(threading.enumerate())
    with coordinator() as made:
        yield made
    assert within(10, lambda: {t for t in set(threading.enumerate()) - before if t.name.startswith("luce")} == set())
