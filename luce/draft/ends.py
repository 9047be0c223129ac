"""The target's embedding and head, for drafts that have none of their own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from luce.backend.shard import Shard
from luce.runtime.device import Array, Device
from luce.runtime.step import TOP, Int32, Output


@dataclass(frozen=True)
class Ends:
    """`first` and `last` shard of the target, for a draft on `device`, which may be one of theirs."""

    device: Device
    first: Shard
    last: Shard

    def embed(self, tokens: Int32) -> Array:
        """Plain rows of the target's table: float32 [n, hidden] on the draft's device."""
        rows = self.first.embed(tokens)
        if self.first.device is self.device:
            return rows
        return self.device.upload(rows if isinstance(rows, np.ndarray) else self.first.device.download(rows))

    def project(self, rows: Array) -> Output:
        """Ids and TOP candidates of float32 [n, hidden] on the draft's device, by the target's head."""
        if self.last.device is not self.device:
            rows = self.device.download(rows)
        return self.last.project(rows, top=TOP)()
