"""The messages about a daemon's life: opening its devices, its heartbeat, and the errors that it reports.

On the request channel the server sends Open first and gets Hello. Every later request has its own response type, or
Failed. On the heartbeat channel the server sends Ping and gets Pong, whatever the daemon is doing. The end of the
connection ends the daemon. A message type with `checksummed` False sends its arrays without a checksum.
"""

from __future__ import annotations

import msgspec

from luce.errors import (
    BackendError,
    DeviceError,
    FormatError,
    LuceError,
    ModelError,
    OutOfMemoryError,
    UnsupportedError,
    UsageError,
)


class Open(msgspec.Struct, tag=True):
    """The first request: open these devices."""

    #: the server's version
    luce: str
    #: names of the devices, as in --target-devices
    devices: tuple[str, ...]
    log_level: str
    #: as --threads
    threads: int
    #: as --cpu-weights
    cpu_weights: str


class DeviceFacts(msgspec.Struct):
    """A device as the server plans with it."""

    name: str
    #: whether it computes on the CPU
    host: bool
    #: whether weights stay in their file's types
    packed: bool
    #: lanes of a warp or a wavefront, 1 for the CPU
    lanes: int
    kv_dtype: str
    #: free and total memory in bytes
    free: int
    total: int
    #: what `luce doctor` and /props show
    facts: dict[str, str | int]
    #: bytes that are not free, but are for the next load, which uses the weights there or lets go of them first
    kept: int = 0


class Hello(msgspec.Struct, tag=True):
    """The response to Open."""

    #: the daemon's version
    luce: str
    pid: int
    devices: tuple[DeviceFacts, ...]


class Failed(msgspec.Struct, tag=True):
    """The response to a request that failed."""

    #: the name of a class in luce.errors
    error: str
    message: str


class Ping(msgspec.Struct, tag=True):
    """Asks for a Pong."""


class Pong(msgspec.Struct, tag=True):
    """The daemon's heartbeat: what it is doing."""

    #: message type of the oldest request without a response, empty if there is none
    request: str = ""
    #: seconds since that request arrived
    seconds: float = 0.0
    #: requests without a response
    requests: int = 0
    #: share of its layers that the daemon has loaded, 0..1
    loaded: float = 0.0
    #: free and total bytes of each device when the daemon last measured them; empty before that
    memory: tuple[tuple[int, int], ...] = ()


#: error classes that a daemon may report for any request, and those that it may report only while it starts
_REQUEST_ERRORS: dict[str, type[LuceError]] = {kind.__name__: kind for kind in (DeviceError, OutOfMemoryError)}
_START_ERRORS = {kind.__name__: kind for kind in (UsageError, ModelError, FormatError, UnsupportedError)}


def error_of(failed: Failed, name: str, *, starting: bool = False) -> LuceError:
    """The exception for an error that the daemon `name` reports. `starting`: before it has loaded anything."""
    kinds = {**_REQUEST_ERRORS, **_START_ERRORS} if starting else _REQUEST_ERRORS
    return kinds.get(failed.error, BackendError)(f"{name}: {failed.message}")
