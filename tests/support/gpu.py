"""The machine's GPU as a fixture; import it into the conftest of the tests that need it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from luce.runtime.found import found
from luce.runtime.gpu import GpuDevice


@pytest.fixture(scope="session")
def gpu() -> Iterator[GpuDevice]:
    """The first GPU. Skips without one; a GPU that does not open is a failure."""
    gpus = found()
    if not gpus:
        pytest.skip("no CUDA or HIP device on this machine")
    name = gpus[0].name
    assert name.kind != "cpu"
    device = GpuDevice(name.kind, name.index)
    yield device
    device.close()
