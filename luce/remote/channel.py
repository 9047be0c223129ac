"""Frames on a stream socket: a header, a message in MessagePack, the bytes of its larger arrays.

    uint32  0x3143554C ("LUC1")      uint32  bytes of the message
    uint64  request that this is or answers      uint64  bytes of arrays behind the message

All little endian. An array in a message is [dtype, shape, bytes], or [dtype, shape, nil] with its bytes behind the
message, in the order of the arrays. A receiver takes no length on trust: `limit` bounds every frame, and each array is
checked against its dtype and shape before memory is taken for it.
"""

from __future__ import annotations

import math
import os
import select
import socket
import ssl
import struct
import time
import types
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

_HEADER = struct.Struct("<IIQQ")
_MAGIC = 0x3143554C
#: arrays of so many bytes follow the message instead of lying in it
_APART = 2048
#: most bytes of a message without the arrays behind it
_MESSAGE = 1 << 20
#: what a frame may hold if its receiver expects no large arrays
SMALL = 1 << 24
_KINDS = "biuf"
_DIMENSIONS = 8

Incoming = TypeVar("Incoming")


class ChannelError(Exception):
    """The channel is of no use any more."""


class GoneError(ChannelError):
    """The peer closed its end."""


class LateError(ChannelError):
    """Nothing came in time."""


class GarbageError(ChannelError):
    """What came is no frame, or too large, or not what was expected."""


class Channel(Generic[Incoming]):
    """One end of a connected stream socket, which it owns. Not thread-safe.

    `incoming`: the union of the message types that the peer sends. `spin`: seconds to look for a frame without
    sleeping, as a sleeping thread takes tens of microseconds to wake.
    """

    def __init__(self, sock: socket.socket, incoming: Any, *, spin: float = 0.0) -> None:
        self.socket = sock
        self.spin = spin
        self._apart: list[NDArray[Any]] = []
        self._expected: list[NDArray[Any]] = []
        self._left = 0
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode)
        self._decoder = msgspec.msgpack.Decoder(incoming, dec_hook=self._decode)
        self._header = bytearray(_HEADER.size)
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)

    def send(self, number: int, message: msgspec.Struct, *, timeout: float) -> None:
        """Send a message as, or in answer to, request `number`. Raises ChannelError."""
        self._apart.clear()
        body = self._encoder.encode(message)
        size = sum(array.nbytes for array in self._apart)
        deadline = time.monotonic() + timeout
        try:
            self.socket.settimeout(timeout)
            self.socket.sendall(_HEADER.pack(_MAGIC, len(body), number, size) + body)
            for array in self._apart:
                self.socket.settimeout(max(1e-3, deadline - time.monotonic()))
                self.socket.sendall(_bytes(array))
        except TimeoutError:
            raise LateError("it does not read what it is sent") from None
        except OSError as error:
            raise GoneError(f"it closed the connection ({error.strerror or error})") from error
        finally:
            self._apart.clear()

    def ready(self) -> bool:
        """Whether something is there to receive: a frame, a part of one, the end."""
        if isinstance(self.socket, ssl.SSLSocket) and self.socket.pending():
            return True
        # A closed socket has an end to be received.
        return self.socket.fileno() < 0 or bool(self._poller.poll(0))

    def receive(self, *, timeout: float | None, limit: int = SMALL) -> tuple[int, Incoming]:
        """The next message and its request's number. Raises ChannelError; the channel is of no use then."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._wait(deadline)
        self._fill(memoryview(self._header), deadline)
        magic, length, number, size = _HEADER.unpack(self._header)
        if magic != _MAGIC:
            raise GarbageError("it sent something that is no frame")
        if length > _MESSAGE or size > limit:
            raise GarbageError(f"it sent a frame of {length} + {size} bytes, more than expected")
        body = bytearray(length)
        self._fill(memoryview(body), deadline)
        self._expected.clear()
        self._left = size
        try:
            message: Incoming = self._decoder.decode(body)
        except (msgspec.DecodeError, ValueError, TypeError, UnicodeDecodeError) as error:
            raise GarbageError(f"it sent a message that cannot be read: {error}") from error
        if self._left:
            raise GarbageError(f"it announced {self._left} bytes that belong to no array")
        for array in self._expected:
            self._fill(_bytes(array), deadline)
        self._expected.clear()
        return number, message

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self.socket.close()

    def _wait(self, deadline: float) -> None:
        """Until a frame begins."""
        end = min(deadline, time.monotonic() + self.spin) if self.spin else 0.0
        while time.monotonic() < end and not self.ready():
            pass

    def _fill(self, target: memoryview, deadline: float) -> None:
        at = 0
        while at < len(target):
            left = deadline - time.monotonic()
            if left <= 0:
                raise LateError("it does not answer")
            try:
                self.socket.settimeout(None if left == math.inf else left)
                count = self.socket.recv_into(target[at:])
            except TimeoutError:
                raise LateError("it does not answer") from None
            except OSError as error:
                raise GoneError(f"it closed the connection ({error.strerror or error})") from error
            if not count:
                raise GoneError("it closed the connection")
            at += count

    def _encode(self, value: object) -> tuple[str, tuple[int, ...], bytes | None]:
        if not isinstance(value, np.ndarray):
            raise NotImplementedError(f"no message has a {type(value).__name__}")
        if value.nbytes < _APART:
            return value.dtype.str, value.shape, value.tobytes()
        self._apart.append(np.ascontiguousarray(value))
        return value.dtype.str, value.shape, None

    def _decode(self, expected: Any, value: Any) -> NDArray[Any]:
        """An array of what `_encode` returned. `expected` is ndarray or an alias that names the dtype."""
        name, shape, data = value
        if not isinstance(name, str) or len(name) > 3 or name[1:2] not in _KINDS:
            raise ValueError(f"{name!r} is no dtype")
        dtype = np.dtype(name)
        wanted = _dtype_of(expected)
        if wanted is not None and dtype != wanted:
            raise ValueError(f"an array of {dtype}, expected {wanted}")
        if len(shape) > _DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"{shape} is no shape")
        size = math.prod(shape) * dtype.itemsize
        if data is not None:
            if len(data) != size:
                raise ValueError(f"{len(data)} bytes for {dtype} {shape}")
            return np.frombuffer(data, dtype).reshape(shape)
        if size > self._left:
            raise ValueError(f"{dtype} {shape} has more bytes than the frame")
        self._left -= size
        array = np.empty(shape, dtype)
        self._expected.append(array)
        return array


def send_descriptor(channel: Channel[Any], fd: int) -> None:
    """Hand a descriptor to the peer, behind a message that announces it. Raises ChannelError."""
    try:
        socket.send_fds(channel.socket, [b"f"], [fd])
    except OSError as error:
        raise GoneError(f"it closed the connection ({error.strerror or error})") from error


def receive_descriptor(channel: Channel[Any], *, timeout: float) -> int:
    """The descriptor that the peer hands over, not inherited by child processes. Raises ChannelError."""
    channel.socket.settimeout(timeout)
    try:
        _, fds, _, _ = socket.recv_fds(channel.socket, 1, 1)
    except TimeoutError:
        raise LateError("it does not answer") from None
    except OSError as error:
        raise GoneError(f"it closed the connection ({error.strerror or error})") from error
    if not fds:
        raise GarbageError("it sent no descriptor")
    os.set_inheritable(fds[0], False)
    return fds[0]


def _bytes(array: NDArray[Any]) -> memoryview:
    """The memory of a C-contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def _dtype_of(expected: Any) -> np.dtype[Any] | None:
    """The dtype that NDArray[...] names; None if it names none."""
    if not isinstance(expected, types.GenericAlias):
        return None
    scalar = expected.__args__[1].__args__[0]
    return np.dtype(scalar) if scalar not in (Any, np.generic) else None
