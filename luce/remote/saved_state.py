"""What a daemon has put aside for the server, in its own host memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from luce.ipc.channel import DTYPES, SMALL, GarbageError
from luce.ipc.messages import Fetch, Fetched, Kind, Reply, Save, Saved
from luce.remote.rpc import PER_BYTE, Request, Requests
from luce.runtime.step import PAGE
from luce.shard.saved_state import Tensors, layer_of

#: bytes of kept tensors that are fetched at a time, or one tensor's
_WINDOW = 4 << 20


class RemoteSavedState:
    """What the daemon of `layers` puts aside, asked for here. It is told when the last reference is gone.

    `seconds`: as in Requests.ask.
    """

    def __init__(self, requests: Requests, layers: range, message: Save, *, seconds: float) -> None:
        self._requests = requests
        self._layers = layers
        self._kinds: Mapping[str, Kind] = {}
        self._nbytes = 0
        self._saved: Request | None = None
        self._saved = requests.ask(message, seconds=seconds, limit=SMALL, take=self._take)

    def __del__(self) -> None:
        if self._saved is not None:
            self._requests.dropped.append(self._saved.number)

    @property
    def number(self) -> int:
        """How the daemon knows it."""
        assert self._saved is not None
        return self._saved.number

    @property
    def nbytes(self) -> int:
        self.wait()
        return self._nbytes

    def ready(self) -> bool:
        return self._saved is not None and self._saved.done()

    def wait(self) -> None:
        assert self._saved is not None
        self._saved.wait()

    def windows(self, first: int = 0, count: int | None = None) -> Iterator[Tensors]:
        self.wait()
        names: list[str] = []
        size = 0
        for name, kind in self._kinds.items():
            own = _size(kind, count)
            if names and size + own > _WINDOW:
                yield self._fetch(names, first, count, size)
                names, size = [], 0
            names.append(name)
            size += own
        if names:
            yield self._fetch(names, first, count, size)

    def _take(self, reply: Reply) -> None:
        if not isinstance(reply, Saved) or any(layer_of(name) not in self._layers for name in reply.kinds):
            raise GarbageError("it put aside something else than its layers")
        if not all(kind.dtype in DTYPES and min(kind.shape, default=0) >= 0 for kind in reply.kinds.values()):
            raise GarbageError("it put aside what no tensor is")
        if not 0 <= sum(map(_size, reply.kinds.values())) <= reply.nbytes:
            raise GarbageError("it put aside more than it says")
        self._kinds, self._nbytes = reply.kinds, reply.nbytes

    def _fetch(self, names: list[str], first: int, count: int | None, size: int) -> Tensors:
        """Tensors of together `size` bytes."""
        found: dict[str, NDArray[np.generic]] = {}

        def take(reply: Reply) -> None:
            if not isinstance(reply, Fetched) or reply.tensors.keys() != set(names):
                raise GarbageError("it sent other tensors than were asked for")
            for name, tensor in reply.tensors.items():
                if (tensor.dtype.str, tensor.nbytes) != (self._kinds[name].dtype, _size(self._kinds[name], count)):
                    raise GarbageError(f"it sent {name} of shape {tensor.shape} and type {tensor.dtype}")
            found.update(reply.tensors)

        message = Fetch(self.number, tuple(names), first, count)
        self._requests.ask(message, seconds=PER_BYTE * size, limit=SMALL + size, take=take).wait()
        return found


def _size(kind: Kind, count: int | None = None) -> int:
    """Bytes of a tensor, or of `count` pages of it."""
    whole = math.prod(kind.shape) * np.dtype(kind.dtype).itemsize
    return whole if count is None or not kind.paged else whole * count * PAGE // max(1, kind.shape[0])
