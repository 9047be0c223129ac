"""Rows of few-row steps are handed over to a daemon, which waits for them, and not where that is impossible.

Devices are CPUs that do as GPUs do; tests/ops/test_handover.py has the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.errors import DeviceError
from luce.ipc.arena import Arena
from luce.ops import handover
from luce.remote import shard as remote_shard
from luce.remote.rpc import Requests
from luce.remote.shard import RemoteShard
from luce.runtime.device import Flag
from luce.runtime.host import HostDevice
from luce.shard import pipeline
from tests.support.daemons import devices, with_flags
from tests.support.drive import Driver
from tests.support.make_driver import MakeDriver
from tests.support.reference import Reference

REFERENCE = Reference("gemma4-e-Q4_0")
TOKENS = REFERENCE.expected["prompt_17"]


class Handed:
    """Counts what is handed over, and what is sent meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        #: rows of each activation that was handed over
        self.rows: list[int] = []
        self.sent: list[str] = []
        hand_over, send = handover.hand_over, Requests.send

        def noted(device: HostDevice, rows: Sequence[Any], places: Sequence[Any], flag: Flag) -> None:
            # Announced, and not raised by anyone else.
            assert self.sent[-1] == "Announce" and not flag.done()
            hand_over(device, rows, places, flag)
            assert flag.done()
            self.rows.append(len(rows[0]))

        def noted_send(requests: Requests, message: Any) -> None:
            self.sent.append(type(message).__name__)
            send(requests, message)

        monkeypatch.setattr(pipeline, "hand_over", noted)
        monkeypatch.setattr(Requests, "send", noted_send)


def results(driver: Driver) -> list[NDArray[np.float32]]:
    """Logits behind a prompt of five tokens, and behind each of five more."""
    sequence = driver.start()
    return [driver.feed((sequence, part))[0] for part in np.split(TOKENS[:10], range(5, 10))]


def fail(*arguments: object) -> None:
    raise DeviceError("it does not compile")


@pytest.mark.parametrize(
    "how", ["handed over", "not mapped", "not pinned", "no kernel", "too many bytes", "in messages"]
)
def test_steps_of_few_rows(how: str, make_driver: MakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = results(make_driver(REFERENCE, [HostDevice(0), HostDevice(1)]))
    handed = Handed(monkeypatch)
    monkeypatch.setattr(HostDevice, "maps_pinned", how != "not mapped")
    if how == "not pinned":
        monkeypatch.setattr(Arena, "pin", lambda arena, devices: ["no memory may be pinned here"])
    if how == "no kernel":
        monkeypatch.setattr(remote_shard, "hand_over", fail)
    if how == "too many bytes":
        monkeypatch.setattr(handover, "MOST_BYTES", 4 * REFERENCE.spec.hidden)
    settings: dict[str, Any] = {"target_shard_ipc_bin": (("", with_flags(tmp_path / "python")),)}
    if how == "in messages":
        settings["shard_transport"] = "stream"
    with devices("cpu:0,cpu:1", **settings) as opened:
        driver = make_driver(REFERENCE, opened)
        (shard,) = (each for each in driver.backend.shards if isinstance(each, RemoteShard))
        found = results(driver)
        assert shard.info.layers.stop == len(REFERENCE.spec.layers)
        driver.backend.close()
    for each, logits in zip(found, expected, strict=True):
        np.testing.assert_array_equal(each, logits)
    assert handed.rows == ([5, 1, 1, 1, 1, 1] if how == "handed over" else [])


def test_microbatches_are_not_handed_over(
    make_driver: MakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread for each shard queues them, and only the shard's own may announce its steps."""
    handed = Handed(monkeypatch)
    monkeypatch.setattr(HostDevice, "maps_pinned", True)
    settings: dict[str, Any] = {"target_shard_ipc_bin": (("", with_flags(tmp_path / "python")),)}
    with devices("cpu:0,cpu:1", **settings) as opened:
        driver = make_driver(REFERENCE, opened, microbatch=64)
        driver.feed((driver.start(), np.resize(TOKENS, 150)))
        driver.backend.close()
    assert handed.sent.count("Announce") == 2
    assert not handed.rows
