"""A cluster as `luce serve` has it, with a model that has no layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from luce.config.resolve import resolve
from luce.config.settings import Config
from tests.support.clusters import needs_keys


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directories of this test's own."""
    needs_keys()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def config(**fields: Any) -> Config:
    """The settings of a server of the cluster home."""
    return resolve({"cluster": "home", "cluster_listen": "127.0.0.1:0", "target_devices": "cpu:0", **fields}, env={})


class Loaded:
    """A model of no layers."""

    placement: tuple[Any, ...] = ()
    plan = None
