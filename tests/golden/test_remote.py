"""Every reference file gives the same bits through daemons as in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.runtime.host import HostDevice
from tests.support.covering import each_kind
from tests.support.daemons import devices, key_file, with_flags
from tests.support.make_driver import MakeDriver
from tests.support.placements import placement_results
from tests.support.reference import Reference
from tests.support.warm import WARM
from tools.listening_daemon import listener

FORKED: dict[str, object] = {"target_shard_ipc_bin": (("", WARM),)}
#: devices, and settings that put them into daemons
PLACEMENTS: dict[str, tuple[str, dict[str, object]]] = {
    "a device and a daemon": ("cpu:0,cpu:1", FORKED),
    "three daemons": ("cpu:0,cpu:1,cpu:2", {"target_shard_ipc_bin": (("cpu", WARM),), "isolate_shards": True}),
    "a daemon of two devices": ("cpu:0,cpu:1,cpu:2", FORKED),
}

Results = Callable[[Reference], NDArray[np.float32]]


@pytest.fixture(scope="module")
def known() -> dict[str, NDArray[np.float32]]:
    """What `local` has found, by the names of files."""
    return {}


@pytest.fixture
def local(known: dict[str, NDArray[np.float32]], make_driver: MakeDriver) -> Results:
    """Results of a file in one process, in the same steps: NumPy's products of 64 rows have other bits than of 135."""

    def results(reference: Reference) -> NDArray[np.float32]:
        if reference.name not in known:
            driver = make_driver(reference, [HostDevice(0), HostDevice(1)], microbatch=64)
            known[reference.name] = placement_results(driver, reference)
        return known[reference.name]

    return results


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The key file of daemons over TCP."""
    return key_file(tmp_path_factory.mktemp("keys") / "key")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[str, Path], ...]:
    """The interpreter of daemons whose devices wait for the input flag and raise the output flag."""
    return (("", with_flags(tmp_path_factory.mktemp("flags") / "python")),)


@each_kind()
def test_daemons_change_nothing(
    reference: Reference, local: Results, make_driver: MakeDriver, key: Path, flags: tuple[tuple[str, Path], ...]
) -> None:
    expected = local(reference)
    with listener(reference.path, key, python=WARM) as (port, _):
        network = f"cpu:0,tcp://127.0.0.1:{port}/cpu:0,tcp://127.0.0.1:{port}/cpu:1"
        over_tcp = network, {"target_shard_ipc_bin": (), "shard_key_file": key}
        by_flags = "cpu:0,cpu:1,cpu:2", {"target_shard_ipc_bin": flags}
        for placement, settings in (*PLACEMENTS.values(), over_tcp, by_flags):
            with devices(reference.among(placement), **settings) as opened, pytest.MonkeyPatch.context() as patch:
                if settings is by_flags[1]:
                    # The rows of few-row steps are handed over and taken over, as between GPUs.
                    patch.setattr(HostDevice, "maps_pinned", True)
                driver = make_driver(reference, opened, microbatch=64)
                found = placement_results(driver, reference)
                driver.backend.close()
            assert (found == expected).all()


def test_a_daemon_between_two_local_devices(local: Results, make_driver: MakeDriver) -> None:
    reference = Reference("gemma4-e-Q4_0")
    expected = local(reference)
    with devices("cpu:0,cpu:1", **FORKED) as opened:
        driver = make_driver(reference, [*opened, HostDevice(2)], microbatch=64)
        assert (placement_results(driver, reference) == expected).all()
        driver.backend.close()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_activations_in_messages(placement: str, local: Results, make_driver: MakeDriver) -> None:
    reference = Reference("gemma4-e-Q4_0")
    expected = local(reference)
    names, settings = PLACEMENTS[placement]
    with devices(names, **settings, shard_transport="stream") as opened:
        driver = make_driver(reference, opened, microbatch=64)
        assert (placement_results(driver, reference) == expected).all()
        driver.backend.close()


@pytest.mark.parametrize(("kind", "most"), [("f16", 0.005), ("bf16", 0.03)])
def test_activations_in_16_bits(kind: str, most: float, local: Results, make_driver: MakeDriver) -> None:
    reference = Reference("gemma4-e-Q4_0")
    expected = local(reference)
    names, settings = PLACEMENTS["three daemons"]
    with devices(names, **settings, shard_transport="stream", shard_activations=kind) as opened:
        driver = make_driver(reference, opened, microbatch=64)
        error = np.abs(placement_results(driver, reference) - expected).max() / np.abs(expected).max()
        driver.backend.close()
    assert 0 < error < most
