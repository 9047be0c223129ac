"""The pipeline of shards, by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from luce.errors import BackendError, DeviceError
from luce.runtime.host import HostDevice, HostEvent
from luce.runtime.step import PendingMasks
from luce.shard.pipeline import Pipeline
from luce.shard.shard import DeferredOutput, Pending


def test_an_output_that_cannot_be_queued_names_its_shard() -> None:
    """Such an output is queued behind its step, by a call of its own."""
    shard: Any = SimpleNamespace(device=HostDevice(), remote=False, close=lambda: None)
    pipeline = Pipeline(peer=False)
    pipeline.add("shard 0 (cuda:0)", "cuda:0", shard)

    def lost(masks: PendingMasks | None) -> Pending:
        raise DeviceError("the device is gone")

    try:
        with pytest.raises(BackendError, match=r"^shard 0 \(cuda:0\): the device is gone$"):
            pipeline.queue_output((DeferredOutput(lost), HostEvent()), None)
    finally:
        pipeline.close()
