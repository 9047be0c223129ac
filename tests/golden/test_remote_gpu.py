"""Daemons on GPUs and beside them give the same bits as one process."""

from __future__ import annotations

import pytest

from luce.config.settings import Config
from luce.remote.open import open_placement
from luce.runtime.found import found
from tests.support.daemons import HERE, devices, within
from tests.support.make_driver import MakeDriver
from tests.support.placements import placement_results
from tests.support.reference import Reference, references

pytestmark = pytest.mark.gpu

#: devices, G for a GPU, and the kinds of those that are in daemons
PLACEMENTS = {
    "a GPU and a daemon on the host": ("G:0,cpu:0", "cpu"),
    "a daemon on a GPU": ("cpu:0,G:0", "G"),
    "a GPU between two daemons": ("cpu:0,G:0,cpu:1", "cpu"),
    "daemons alone": ("G:0,cpu:0", "cpu,G"),
    "a GPU and a daemon on another": ("G:0,G:1", ""),
    "daemons on two GPUs": ("G:0,G:1", "G"),
}


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("reference", references(), ids=lambda r: r.name)
def test_daemons_change_nothing(reference: Reference, placement: tuple[str, str], make_driver: MakeDriver) -> None:
    gpus = [gpu.name for gpu in found() if gpu.name.kind != "cpu"]
    if len(gpus) <= placement[0].count("G") - 1:
        pytest.skip(f"needs {placement[0].count('G')} GPUs, {len(gpus)} found")
    names, kinds = (text.replace("G", gpus[0].kind) for text in placement)
    names = reference.among(names)
    # The daemons of `devices` hold float32 weights, too.
    here = open_placement(Config(target_devices=tuple(names.split(",")), cpu_weights="float32"))
    driver = make_driver(reference, here, microbatch=64)
    expected = placement_results(driver, reference)
    driver.backend.close()
    for device in here:
        device.close()
    interpreters = tuple((kind, HERE) for kind in kinds.split(","))
    with devices(names, target_shard_ipc_bin=interpreters, isolate_shards=True, shard_start_timeout=300.0) as there:
        driver = make_driver(reference, there, microbatch=64)
        assert (placement_results(driver, reference) == expected).all()
        left = driver.backend.memory
        assert within(60, lambda: set(left()) == {str(device.name) for device in there})
        assert all(0 < memory.free <= memory.total for memory in left().values())
        driver.backend.close()
