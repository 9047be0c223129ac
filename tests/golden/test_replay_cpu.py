"""Replayed steps of the CPU give the bits of eager ones, for every family."""

from __future__ import annotations

import pytest

from luce.runtime.cpu import CpuDevice
from luce.shard.local import LocalShard
from tests.support.covering import each_kind
from tests.support.golden_checks import check_replayed
from tests.support.make_driver import MakeDriver
from tests.support.reference import Reference


class Eager(CpuDevice):
    """One that runs every step call by call."""

    captures = False


@each_kind()
def test_bits(reference: Reference, make_driver: MakeDriver) -> None:
    driver = make_driver(reference, [CpuDevice()])
    check_replayed(reference, driver, make_driver(reference, [Eager()]))
    (shard,) = driver.backend.shards
    assert isinstance(shard, LocalShard)
    # Four shapes recur: eager, then captured and replayed, then replayed.
    assert shard.replayed == 8


@pytest.mark.parametrize("name", ["qwen35-a-Q8_0", "gemma4-e-Q4_0", "qwen35moe-b-Q4_K_M"])
def test_shards_send_what_they_replay(name: str, make_driver: MakeDriver) -> None:
    # On one device, so that both shards' graphs share their memory.
    reference, device = Reference(name), CpuDevice()
    check_replayed(reference, make_driver(reference, [device, device]), make_driver(reference, [Eager()]))
