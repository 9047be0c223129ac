"""What a daemon holds for its server, layers, a drafter or a scorer of texts, as the daemon's session sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from luce.errors import BackendError
from luce.runtime.device import Device


class Completion(Protocol):
    """When work is over. An Event of a device is one."""

    def done(self) -> bool:
        """Whether it is over, without waiting. Raises DeviceError if it failed."""

    def wait(self) -> None:
        """Block this thread until it is over. Raises DeviceError if it failed."""


@dataclass(frozen=True)
class Work:
    """A request whose work is queued: the response follows once it is over."""

    over: Completion
    response: Callable[[], msgspec.Struct]
    #: whether threads of this process are still queueing the work, which polling would slow down
    threaded: bool = False


#: Handles a request of one type. Returns the response, Work if the response follows later, or None if there is no
#: response. An exception becomes the response Failed.
Handler = Callable[[Any], msgspec.Struct | Work | None]


class Service:
    """Dispatches requests to handlers by their type. A subclass adds its handlers to `handlers`."""

    #: what it consists of, for messages
    holds = "nothing"

    def __init__(self) -> None:
        self.handlers: Mapping[type[msgspec.Struct], Handler] = {}

    def handle(self, message: msgspec.Struct) -> msgspec.Struct | Work | None:
        """Handle a request, as Handler says."""
        handler = self.handlers.get(type(message))
        if handler is None:
            raise BackendError(f"a daemon that holds {self.holds} does not handle {type(message).__name__} requests")
        return handler(message)

    def loaded(self) -> msgspec.Struct:
        """The response to the message that loaded it."""
        raise NotImplementedError

    @property
    def announced(self) -> bool:
        """Whether the server has announced a request that comes next."""
        return False

    @property
    def frame_limit(self) -> int:
        """Bytes of tensors that a request may contain."""
        return 0

    @property
    def failed(self) -> bool:
        """Whether queued work has failed, so that what is queued behind it fails too, until `settle`."""
        return False

    def settle(self) -> None:
        """Wait until nothing runs; afterwards requests work again."""

    def abandon(self) -> None:
        """The server is gone: no device waits for it any longer."""


@dataclass(frozen=True)
class Loader:
    """Loads a service of a package above this one into a daemon."""

    #: the type of the message that loads it
    message: type[msgspec.Struct]
    #: the union of all requests to it, this message among them
    requests: Any
    #: opens the service on the devices of this process; the stack closes it
    load: Callable[[Any, Sequence[Device], contextlib.ExitStack], Service]
