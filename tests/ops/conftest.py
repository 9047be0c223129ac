"""The fixtures `device` and `gpu` of the op tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from luce.runtime.device import Device
from tests.support.devices import opened
from tests.support.gpu import gpu

__all__ = ["gpu"]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """The device that `on_devices` names for a case."""
    yield from opened(request.param, request)
