"""Frames on a stream socket: a header, a message in MessagePack, the bytes of its larger arrays.

    3 bytes "LUC", uint8  PROTOCOL   uint32  bytes of the message
    uint64  request that this is or answers      uint64  bytes of arrays behind the message
    uint32  CRC-32 of the arrays, 0 for none     uint32  CRC-32 of the header up to here, and of the message

All little endian. A wrong sum ends the channel. Arrays of activations, features and outputs have none: on a machine
nothing but this program touches them, TLS has sums of its own, and 20 MB of a prompt would take either side some 10 ms.
An array in a message is [dtype, shape, bytes], or [dtype, shape, nil] with its bytes behind the message, in the order
of the arrays. A receiver takes no length on trust: `limit` bounds every frame, and each array is checked against its
dtype and shape before memory is taken for it. A frame of another protocol is not read beyond its header, and answered
with one, so each side can say which the other speaks, however different the messages are.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import select
import socket
import ssl
import struct
import threading
import time
import types
import zlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from luce import __version__

#: changes with every message that an older peer would not understand; not "1", which was all there was before it was 8
PROTOCOL = 8
_HEADER, _SUM = struct.Struct("<3sBIQQI"), struct.Struct("<I")
_MAGIC = b"LUC"
#: arrays of so many bytes follow the message instead of lying in it
_APART = 2048
#: most bytes of a message without the arrays behind it
_MESSAGE = 1 << 20
#: what a frame may hold if its receiver expects no large arrays
SMALL = 1 << 24
#: what arrays may consist of, by its name in messages
DTYPES = {np.dtype(code).str: np.dtype(code) for code in "?bBhHiIlLefd"}
_DIMENSIONS = 8
_BOTH = select.POLLIN | select.POLLOUT

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
    """One end of a connected stream socket, which it owns. For one thread; others may end or close it meanwhile.

    `incoming`: the union of the message types that the peer sends.
    """

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._apart: list[NDArray[Any]] = []
        self._expected: list[NDArray[Any]] = []
        self._left = 0
        #: bytes of whole frames; any thread may read them
        self.sent = self.received = 0
        #: Held while the descriptor is in use. A thread that waits for a descriptor which is closed meanwhile waits for
        #: whatever gets its number next, and reads from it.
        self._using = threading.RLock()
        #: held while the connection is ended or the descriptor closed, which takes no time
        self._ending = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode)
        self._decoder = msgspec.msgpack.Decoder(incoming, dec_hook=self._decode)
        self._header = memoryview(bytearray(_HEADER.size + _SUM.size))
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)

    def send(
        self, number: int, message: msgspec.Struct, *, timeout: float, hear: Callable[[], bool] | None = None
    ) -> None:
        """Send a message as, or in answer to, request `number`. Raises ChannelError.

        `hear`: a peer that sends something large reads nothing until that has been received. This is called to receive
        it, and says whether there may be more. What it raises ends the channel.
        """
        self._apart.clear()
        try:
            body = self._encoder.encode(message)
            size, summed = sum(array.nbytes for array in self._apart), 0
            if not self._tls and getattr(message, "summed", True):
                for array in self._apart:
                    summed = zlib.crc32(_bytes(array), summed)
            deadline = time.monotonic() + timeout
            fields = _HEADER.pack(_MAGIC, PROTOCOL, len(body), number, size, summed)
            with self._using:
                hear = self._put(fields + _SUM.pack(checksum(fields, body)) + body, deadline, hear)
                for array in self._apart:
                    hear = self._put(_bytes(array), deadline, hear)
            self.sent += len(self._header) + len(body) + size
        finally:
            self._apart.clear()

    def ready(self, seconds: float = 0.0, *, spin: float = 0.0) -> bool:
        """Whether something is there to receive, or comes in so many seconds: a frame, a part of one, the end.

        `spin`: seconds to look for it without sleeping before, as a sleeping thread takes tens of microseconds to wake.
        """
        end = time.monotonic() + spin
        while spin and time.monotonic() < end:
            if self.ready():
                return True
        with self._using:
            if self._tls and isinstance(self.socket, ssl.SSLSocket) and self.socket.pending():
                return True
            # A closed socket has an end to be received.
            return self.socket.fileno() < 0 or bool(self._poller.poll(1000 * seconds))

    def receive(self, *, timeout: float | None, limit: int = SMALL, spin: float = 0.0) -> tuple[int, Incoming]:
        """The next message and its request's number. Raises ChannelError; the channel is of no use then.

        `spin`: as in `ready`, within the time.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        if spin:
            self.ready(spin=spin if timeout is None else min(spin, timeout))
        with self._using:
            return self._frame(deadline, limit)

    def send_descriptor(self, fd: int, *, timeout: float) -> None:
        """Hand a descriptor to the peer, behind a message that announces it. Raises ChannelError."""
        deadline = time.monotonic() + timeout
        with self._using:
            while True:
                try:
                    socket.send_fds(self.socket, [b"f"], [fd])
                    return
                except OSError as error:
                    self._after(error, select.POLLOUT, deadline)

    def receive_descriptor(self, *, timeout: float) -> int:
        """The descriptor that the peer hands over, not inherited by child processes. Raises ChannelError."""
        deadline = time.monotonic() + timeout
        with self._using:
            while True:
                try:
                    _, fds, _, _ = socket.recv_fds(self.socket, 1, 1)
                    break
                except OSError as error:
                    self._after(error, select.POLLIN, deadline)
        if not fds:
            raise GarbageError("it sent no descriptor")
        os.set_inheritable(fds[0], False)
        return fds[0]

    def end(self) -> None:
        """End the connection, which wakes whoever waits on it, at either end. For any thread, any number of times."""
        with self._ending, contextlib.suppress(OSError):
            # SSLSocket's own would take the TLS session from under the thread that reads.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, once a thread that waits on it has seen its end. Idempotent."""
        self.end()
        with self._using, self._ending:
            self.socket.close()

    def _frame(self, deadline: float, limit: int) -> tuple[int, Incoming]:
        self._fill(self._header, deadline)
        magic, protocol, length, number, size, summed = _HEADER.unpack_from(self._header)
        if magic != _MAGIC:
            raise GarbageError("it sent something that is no frame")
        if protocol != PROTOCOL:
            with contextlib.suppress(OSError):
                self.socket.send(_HEADER.pack(_MAGIC, PROTOCOL, 0, 0, 0, 0) + _SUM.pack(0))
            raise GarbageError(f"it speaks protocol {protocol}, this is Luce {__version__} with protocol {PROTOCOL}")
        if length > _MESSAGE or size > limit:
            raise GarbageError(f"it sent a frame of {length} + {size} bytes, more than expected")
        body = bytearray(length)
        self._fill(memoryview(body), deadline)
        fields, (found,) = self._header[: _HEADER.size], _SUM.unpack_from(self._header, _HEADER.size)
        if checksum(fields, body) != found:
            raise GarbageError("it sent a message whose checksum is wrong")
        self._expected.clear()
        self._left = size
        try:
            message: Incoming = self._decoder.decode(body)
        except (msgspec.DecodeError, ValueError, TypeError, UnicodeDecodeError) as error:
            raise GarbageError(f"it sent a message that cannot be read: {error}") from error
        if self._left:
            raise GarbageError(f"it announced {self._left} bytes that belong to no array")
        found = 0
        for array in self._expected:
            self._fill(_bytes(array), deadline)
            found = zlib.crc32(_bytes(array), found) if summed else 0
        self._expected.clear()
        if found != summed:
            raise GarbageError("it sent arrays whose checksum is wrong")
        self.received += len(self._header) + length + size
        return number, message

    def _put(
        self, data: bytes | memoryview, deadline: float, hear: Callable[[], bool] | None
    ) -> Callable[[], bool] | None:
        """Send bytes. Returns `hear`, or None once there is nothing more."""
        view = memoryview(data)
        while view:
            try:
                view = view[self.socket.send(view) :]
            except OSError as error:
                found = self._after(error, select.POLLOUT if hear is None else _BOTH, deadline)
                if hear is not None and found & select.POLLIN and not hear():
                    hear = None
        return hear

    def _fill(self, target: memoryview, deadline: float) -> None:
        while target:
            try:
                count = self.socket.recv_into(target)
            except OSError as error:
                self._after(error, select.POLLIN, deadline)
                continue
            if not count:
                raise GoneError("it closed the connection")
            target = target[count:]

    def _after(self, error: OSError, event: int, deadline: float) -> int:
        """Wait until what failed can go on: which of the events that makes it so has come.

        Raises what has become of the channel if none ever will, or not in time.
        """
        if isinstance(error, ssl.SSLWantReadError):
            event = select.POLLIN
        elif isinstance(error, ssl.SSLWantWriteError):
            event = event if event & select.POLLOUT else select.POLLOUT
        elif not isinstance(error, BlockingIOError):
            raise GoneError(f"it closed the connection ({error.strerror or error})") from error
        left = deadline - time.monotonic()
        poller = select.poll()
        poller.register(self.socket, event)
        if left > 0 and (found := poller.poll(None if left == math.inf else math.ceil(1000 * left))):
            # What TLS has to read before it can send is no message.
            return 0 if isinstance(error, ssl.SSLWantReadError) else found[0][1]
        raise LateError("it does not answer" if event == select.POLLIN else "it does not read what it is sent")

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
        dtype = DTYPES.get(name)
        if dtype is None:
            raise ValueError(f"{name!r} is no dtype")
        wanted = _dtype_of(expected)
        if wanted is not None and dtype is not wanted:
            raise ValueError(f"an array of {dtype}, expected {wanted}")
        if len(shape) > _DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"{shape} is no shape")
        size = math.prod(shape) * dtype.itemsize
        if data is not None:
            if len(data) != size:
                raise ValueError(f"{len(data)} bytes for {dtype} {shape}")
            return np.ndarray(shape, dtype, data)
        if size > self._left:
            raise ValueError(f"{dtype} {shape} has more bytes than the frame")
        self._left -= size
        array = np.empty(shape, dtype)
        self._expected.append(array)
        return array


def checksum(fields: bytes | memoryview, body: bytes | bytearray) -> int:
    """What stands behind a header's fields."""
    return zlib.crc32(body, zlib.crc32(fields))


def _bytes(array: NDArray[Any]) -> memoryview:
    """The memory of a C-contiguous array."""
    return array.reshape(-1).view(np.uint8).data


@functools.cache
def _dtype_of(expected: Any) -> np.dtype[Any] | None:
    """The dtype that NDArray[...] names; None if it names none."""
    if not isinstance(expected, types.GenericAlias):
        return None
    scalar = expected.__args__[1].__args__[0]
    return np.dtype(scalar) if scalar not in (Any, np.generic) else None
