"""A saved state in the memory of a daemon, as the server sees it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from luce.ipc.channel import DTYPES, SMALL_FRAME, ProtocolError
from luce.remote.messages import Fetch, Response, Save, Saved, SavedTensor, Tensors
from luce.remote.rpc import PER_BYTE, Expected, Request, Requests
from luce.runtime.step import PAGE
from luce.shard import saved_state
from luce.shard.saved_state import layer_of

#: bytes of tensors that are fetched at a time, unless one tensor is larger
WINDOW_BYTES = 4 << 20


class RemoteSavedState:
    """What the daemon of `layers` saves for a Save message, which is sent here. Released with its last reference.

    `seconds`: as Expected.seconds.
    """

    def __init__(self, requests: Requests, layers: range, message: Save, *, seconds: float) -> None:
        self._requests = requests
        self._layers = layers
        self._tensors: Mapping[str, SavedTensor] = {}
        self._nbytes = 0
        self._request: Request | None = None
        #: its number in later messages
        self.number = message.saved
        self.pages = max(map(len, message.pages), default=0)
        self._request = requests.ask(message, Expected(self._take, seconds))

    def __del__(self) -> None:
        if self._request is not None:
            self._requests.dropped.append(self.number)

    @property
    def nbytes(self) -> int:
        self.wait()
        return self._nbytes

    def ready(self) -> bool:
        return self._request is not None and self._request.done()

    def wait(self) -> None:
        assert self._request is not None
        self._request.wait()

    def windows(self, first: int = 0, count: int | None = None) -> Iterator[saved_state.Tensors]:
        self.wait()
        names: list[str] = []
        size = 0
        for name, tensor in self._tensors.items():
            own = _size(tensor, count)
            if names and size + own > WINDOW_BYTES:
                yield self.fetch(names, first, count, size)
                names, size = [], 0
            names.append(name)
            size += own
        if names:
            yield self.fetch(names, first, count, size)

    def _take(self, response: Response) -> None:
        if not isinstance(response, Saved):
            raise ProtocolError(f"it sent {type(response).__name__} instead of Saved")
        tensors = response.tensors
        if any(layer_of(name) not in self._layers for name in tensors):
            raise ProtocolError("it saved tensors of other layers than its own")
        if not all(tensor.dtype in DTYPES and min(tensor.shape, default=0) >= 0 for tensor in tensors.values()):
            raise ProtocolError("it saved tensors of an invalid type or shape")
        if not 0 <= sum(map(_size, tensors.values())) <= response.nbytes:
            raise ProtocolError("it saved tensors of more bytes than it reports")
        self._tensors, self._nbytes = tensors, response.nbytes

    def fetch(self, names: list[str], first: int, count: int | None, size: int) -> saved_state.Tensors:
        """Fetch tensors of `size` bytes in total."""
        found: dict[str, NDArray[np.generic]] = {}

        def take(response: Response) -> None:
            if not isinstance(response, Tensors) or response.tensors.keys() != set(names):
                raise ProtocolError("it sent other tensors than it was asked for")
            for name, tensor in response.tensors.items():
                known = self._tensors[name]
                if (tensor.dtype.str, tensor.nbytes) != (known.dtype, _size(known, count)):
                    raise ProtocolError(f"it sent {name} of shape {tensor.shape} and type {tensor.dtype}")
            found.update(response.tensors)

        message = Fetch(self.number, tuple(names), first, count)
        self._requests.ask(message, Expected(take, PER_BYTE * size, SMALL_FRAME + size)).wait()
        return found


def _size(tensor: SavedTensor, count: int | None = None) -> int:
    """Bytes of a tensor, or of `count` pages of it."""
    whole = math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize
    return whole if count is None or not tensor.paged else whole * count * PAGE // max(1, tensor.shape[0])
