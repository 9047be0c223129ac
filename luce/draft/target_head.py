"""The target's embedding and head, for drafts that have none of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from luce.gguf.reader import GGUFFile
from luce.layers.build import LayerBuilder
from luce.layers.decoder_layer import Embedding
from luce.layers.state import StateOptions
from luce.models.spec import ModelSpec
from luce.ops.sample import find_candidates
from luce.runtime.device import Array, Device
from luce.runtime.step import MAX_CANDIDATES, Int32, Output
from luce.shard.shard import Pending


class HeadShard(Protocol):
    """The part of a luce.shard.shard.ShardEnds that drafts call."""

    @property
    def device(self) -> Device:
        """The device of its arrays."""

    @property
    def embedding(self) -> Embedding | None:
        """The token table where it is in this process; only the first shard has it."""

    def embed(self, tokens: Int32) -> Array:
        """Rows of the token table; only the first shard has it."""

    def project(self, hidden: Array, *, top: int = 0, scale: float = 0.0, softcap: float = 0.0) -> Pending:
        """The head's product with rows; only the last shard has it."""


@dataclass(frozen=True)
class TargetHead:
    """The embedding of the target's first shard and the head of its last one, for a draft on `device`, which may be
    one of theirs."""

    device: Device
    first: HeadShard
    last: HeadShard

    @property
    def embedding(self) -> Embedding | None:
        """The target's embedding where the draft's device has it, for work that takes tokens there."""
        return self.first.embedding if self.first.device is self.device else None

    def embed(self, tokens: Int32) -> Array:
        """Rows of the target's table, without its scale: int32 [n] -> float32 [n, hidden] on the draft's device."""
        rows = self.first.embed(tokens)
        if self.first.device is self.device:
            return rows
        return self.device.upload(rows if isinstance(rows, np.ndarray) else self.first.device.download(rows))

    def project(self, rows: Array, *, top: int = MAX_CANDIDATES, scale: float = 0.0, softcap: float = 0.0) -> Pending:
        """Queue the target's head on float32 [n, hidden] on the draft's device: ids and `top` candidates of each row.

        With a scale also the candidates' norms, as luce.ops.sample.argmax_logsumexp has them.
        """
        if self.last.device is not self.device:
            rows = self.device.download(rows)
        return self.last.project(rows, top=top, scale=scale, softcap=softcap)


class LoadedHead:
    """The embedding and head of a model, loaded to a device that need not have any of its layers."""

    def __init__(self, file: GGUFFile, spec: ModelSpec, device: Device) -> None:
        self.device = device
        builder = LayerBuilder(file, spec, range(0), device, StateOptions([0] * len(spec.page_groups), 0))
        self.embedding = builder.embedding()
        self._head = builder.head()

    def embed(self, tokens: Int32) -> Array:
        """As TargetHead.embed."""
        return self.embedding.rows(self.device.upload(tokens))

    def project(self, hidden: Array, *, top: int = 0, scale: float = 0.0, softcap: float = 0.0) -> Pending:
        """As TargetHead.project, for rows on this device."""
        device, rows = self.device, self._head.project(hidden)
        found = find_candidates(device, rows, top, scale, softcap)

        def wait() -> Output:
            ids, best = found()
            return Output(ids, np.empty((0, rows.shape[1]), np.float32), best)

        return wait
