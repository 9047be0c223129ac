"""Frames on a stream socket: a header, a message in MessagePack, the bytes of its larger arrays.

    3 bytes "LUC", uint8  PROTOCOL   uint32  bytes of the message
    uint64  number of the request that this is, or that this answers
    uint64  bytes of the arrays behind the message
    uint32  CRC-32 of the arrays, 0 for none
    uint32  CRC-32 of the header up to here, and of the message

All integers are little endian. A wrong checksum ends the channel. Arrays of activations, features and outputs have no
checksum: on one machine only this program touches them, TLS has checksums of its own, and 20 MB of a prompt would cost
either side some 10 ms. A message contains an array as [dtype, shape, bytes], or as [dtype, shape, nil]; then its bytes
follow the message, in the order of the arrays. The receiver trusts no length: `limit` bounds every frame, and each
array is checked against its dtype and shape before memory is allocated for it. Of a frame of another protocol the
receiver reads only the header and answers with a header of its own, so each side can name the protocol of the other,
however different the messages are.
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
from luce.decoders import msgpack_decoder

#: The version of all messages; raised with each change that an older peer does not understand. It began at 8: earlier
#: frames had a 1 in its place.
PROTOCOL = 21
_HEADER, _SUM = struct.Struct("<3sBIQQI"), struct.Struct("<I")
_MAGIC = b"LUC"
#: arrays of this many bytes or more follow the message; smaller ones are part of it
_INLINE_LIMIT = 2048
#: most bytes of a message, without the arrays behind it
_MESSAGE_LIMIT = 1 << 20
#: most bytes of arrays in a frame whose receiver expects no large arrays
SMALL_FRAME = 1 << 24
#: the dtypes that arrays may have, by their name in messages
DTYPES = {np.dtype(code).str: np.dtype(code) for code in "?bBhHiIlLefd"}
_MAX_DIMENSIONS = 8
_BOTH = select.POLLIN | select.POLLOUT

Incoming = TypeVar("Incoming")


class ChannelError(Exception):
    """The channel failed; it cannot be used any more. The message has the peer as its subject: "it ..."."""


class ConnectionClosedError(ChannelError):
    """The peer closed its end."""


class ChannelTimeoutError(ChannelError):
    """The peer did not send, or did not read, in time."""


class ProtocolError(ChannelError):
    """The peer sent bytes that are not a frame, a frame that is too large, or an unexpected message."""


class Channel(Generic[Incoming]):
    """One end of a connected stream socket, which it owns.

    One thread sends and receives; other threads may shut the channel down or close it meanwhile. `incoming` is the
    union of the message types that the peer sends.
    """

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._outgoing: list[NDArray[Any]] = []
        self._incoming: list[NDArray[Any]] = []
        self._announced_bytes = 0
        #: bytes of the whole frames so far; any thread may read them
        self.sent = self.received = 0
        #: Held while the descriptor is in use. If another thread closed a descriptor during a wait, the wait would go
        #: on with the next file that gets its number, and read from that.
        self._using = threading.RLock()
        #: held while the connection is shut down or the descriptor closed, neither of which blocks
        self._closing = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode)
        self._decoder = msgpack_decoder(incoming, self._decode)
        self._header = memoryview(bytearray(_HEADER.size + _SUM.size))
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)

    def send(
        self,
        number: int,
        message: msgspec.Struct,
        *,
        timeout: float,
        receive_pending: Callable[[], bool] | None = None,
    ) -> None:
        """Send a message as request `number`, or as the response to it. Raises ChannelError.

        While the peer sends a large frame it does not read. `receive_pending` is then called to receive that frame; it
        returns whether another one may follow. An exception that it raises ends the channel.
        """
        self._outgoing.clear()
        try:
            body = self._encoder.encode(message)
            size, array_checksum = sum(array.nbytes for array in self._outgoing), 0
            if not self._tls and getattr(message, "checksummed", True):
                for array in self._outgoing:
                    array_checksum = zlib.crc32(_bytes(array), array_checksum)
            deadline = time.monotonic() + timeout
            fields = _HEADER.pack(_MAGIC, PROTOCOL, len(body), number, size, array_checksum)
            with self._using:
                receive_pending = self._put(
                    fields + _SUM.pack(checksum(fields, body)) + body, deadline, receive_pending
                )
                for array in self._outgoing:
                    receive_pending = self._put(_bytes(array), deadline, receive_pending)
            self.sent += len(self._header) + len(body) + size
        finally:
            self._outgoing.clear()

    def ready(self, seconds: float = 0.0, *, spin: float = 0.0) -> bool:
        """Whether there is something to receive within `seconds`: a frame, a part of one, or the end of the connection.

        For the first `spin` seconds it polls without sleeping, because a sleeping thread takes tens of microseconds to
        wake up.
        """
        end = time.monotonic() + spin
        while spin and time.monotonic() < end:
            if self.ready():
                return True
        with self._using:
            if self._tls and isinstance(self.socket, ssl.SSLSocket) and self.socket.pending():
                return True
            # Of a closed socket, `receive` reports the end.
            return self.socket.fileno() < 0 or bool(self._poller.poll(1000 * seconds))

    def receive(self, *, timeout: float | None, limit: int = SMALL_FRAME, spin: float = 0.0) -> tuple[int, Incoming]:
        """The number of a request and the next message. After a ChannelError the channel cannot be used any more.

        `timeout` in seconds, None for no limit; `limit` in bytes of arrays behind the message; `spin` as in `ready`,
        part of the timeout.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        if spin:
            self.ready(spin=spin if timeout is None else min(spin, timeout))
        with self._using:
            return self._receive_frame(deadline, limit)

    def send_descriptor(self, fd: int, *, timeout: float) -> None:
        """Pass a file descriptor to the peer, after a message that announces it. Raises ChannelError."""
        deadline = time.monotonic() + timeout
        with self._using:
            while True:
                try:
                    socket.send_fds(self.socket, [b"f"], [fd])
                    return
                except OSError as error:
                    self._wait_to_retry(error, select.POLLOUT, deadline)

    def receive_descriptor(self, *, timeout: float) -> int:
        """The file descriptor that the peer passes; child processes do not inherit it. Raises ChannelError."""
        deadline = time.monotonic() + timeout
        with self._using:
            while True:
                try:
                    _, fds, _, _ = socket.recv_fds(self.socket, 1, 1)
                    break
                except OSError as error:
                    self._wait_to_retry(error, select.POLLIN, deadline)
        if not fds:
            raise ProtocolError("it sent no file descriptor")
        os.set_inheritable(fds[0], False)
        return fds[0]

    def shutdown(self) -> None:
        """End the connection, which wakes every thread that waits on it, at both ends. Any thread; idempotent."""
        with self._closing, contextlib.suppress(OSError):
            # SSLSocket.shutdown would remove the TLS session while another thread reads from it.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut down, and close the socket once the thread that waits on it has returned. Idempotent."""
        self.shutdown()
        with self._using, self._closing:
            self.socket.close()

    def _receive_frame(self, deadline: float, limit: int) -> tuple[int, Incoming]:
        self._read_into(self._header, deadline)
        magic, protocol, length, number, size, array_checksum = _HEADER.unpack_from(self._header)
        if magic != _MAGIC:
            raise ProtocolError("it sent bytes that are not a frame")
        if protocol != PROTOCOL:
            with contextlib.suppress(OSError):
                self.socket.send(_HEADER.pack(_MAGIC, PROTOCOL, 0, 0, 0, 0) + _SUM.pack(0))
            raise ProtocolError(f"it speaks protocol {protocol}, this is Luce {__version__} with protocol {PROTOCOL}")
        if length > _MESSAGE_LIMIT or size > limit:
            raise ProtocolError(f"it sent a frame of {length} + {size} bytes, more than the limit")
        body = bytearray(length)
        self._read_into(memoryview(body), deadline)
        fields, (found,) = self._header[: _HEADER.size], _SUM.unpack_from(self._header, _HEADER.size)
        if checksum(fields, body) != found:
            raise ProtocolError("it sent a message with a wrong checksum")
        self._incoming.clear()
        self._announced_bytes = size
        try:
            message: Incoming = self._decoder.decode(body)
        except (msgspec.DecodeError, ValueError, TypeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"it sent an invalid message: {error}") from error
        if self._announced_bytes:
            raise ProtocolError(f"it announced {self._announced_bytes} bytes of arrays that the message does not have")
        found = 0
        for array in self._incoming:
            self._read_into(_bytes(array), deadline)
            found = zlib.crc32(_bytes(array), found) if array_checksum else 0
        self._incoming.clear()
        if found != array_checksum:
            raise ProtocolError("it sent arrays with a wrong checksum")
        self.received += len(self._header) + length + size
        return number, message

    def _put(
        self, data: bytes | memoryview, deadline: float, receive_pending: Callable[[], bool] | None
    ) -> Callable[[], bool] | None:
        """Send bytes. Returns `receive_pending`, or None once no further frame is expected."""
        view = memoryview(data)
        while view:
            try:
                view = view[self.socket.send(view) :]
            except OSError as error:
                found = self._wait_to_retry(error, select.POLLOUT if receive_pending is None else _BOTH, deadline)
                if receive_pending is not None and found & select.POLLIN and not receive_pending():
                    receive_pending = None
        return receive_pending

    def _read_into(self, target: memoryview, deadline: float) -> None:
        while target:
            try:
                count = self.socket.recv_into(target)
            except OSError as error:
                self._wait_to_retry(error, select.POLLIN, deadline)
                continue
            if not count:
                raise ConnectionClosedError("it closed the connection")
            target = target[count:]

    def _wait_to_retry(self, error: OSError, event: int, deadline: float) -> int:
        """Wait until the call that raised `error` can be repeated; return the poll events that occurred.

        Raises ConnectionClosedError, or ChannelTimeoutError after the deadline.
        """
        if isinstance(error, ssl.SSLWantReadError):
            event = select.POLLIN
        elif isinstance(error, ssl.SSLWantWriteError):
            event = event if event & select.POLLOUT else select.POLLOUT
        elif not isinstance(error, BlockingIOError):
            raise ConnectionClosedError(f"it closed the connection ({error.strerror or error})") from error
        remaining = deadline - time.monotonic()
        poller = select.poll()
        poller.register(self.socket, event)
        if remaining > 0 and (found := poller.poll(None if remaining == math.inf else math.ceil(1000 * remaining))):
            # The record that TLS has to read before it can send is not a message.
            return 0 if isinstance(error, ssl.SSLWantReadError) else found[0][1]
        raise ChannelTimeoutError(
            "it does not respond" if event == select.POLLIN else "it does not read what it is sent"
        )

    def _encode(self, value: object) -> tuple[str, tuple[int, ...], bytes | None]:
        if not isinstance(value, np.ndarray):
            raise NotImplementedError(f"messages cannot contain a {type(value).__name__}")
        if value.nbytes < _INLINE_LIMIT:
            return value.dtype.str, value.shape, value.tobytes()
        self._outgoing.append(np.ascontiguousarray(value))
        return value.dtype.str, value.shape, None

    def _decode(self, expected: Any, value: Any) -> NDArray[Any]:
        """The array that `_encode` described. `expected` is ndarray, or an NDArray alias that names the dtype."""
        name, shape, data = value
        dtype = DTYPES.get(name)
        if dtype is None:
            raise ValueError(f"{name!r} is not a known dtype")
        wanted = _dtype_of(expected)
        if wanted is not None and dtype is not wanted:
            raise ValueError(f"an array of {dtype}, expected {wanted}")
        if len(shape) > _MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"{shape} is not a shape")
        size = math.prod(shape) * dtype.itemsize
        if data is not None:
            if len(data) != size:
                raise ValueError(f"{len(data)} bytes for {dtype} {shape}")
            # Writable, as arrays behind the message are: compiled code of the CPU takes no others.
            return np.ndarray(shape, dtype, bytearray(data))
        if size > self._announced_bytes:
            raise ValueError(f"{dtype} {shape} exceeds the frame")
        self._announced_bytes -= size
        array = np.empty(shape, dtype)
        self._incoming.append(array)
        return array


def checksum(fields: bytes | memoryview, body: bytes | bytearray) -> int:
    """The CRC-32 behind the fields of a header, over these fields and the message."""
    return zlib.crc32(body, zlib.crc32(fields))


def _bytes(array: NDArray[Any]) -> memoryview:
    """The memory of a C-contiguous array."""
    return array.reshape(-1).view(np.uint8).data


@functools.cache
def _dtype_of(expected: Any) -> np.dtype[Any] | None:
    """The dtype that an NDArray[...] alias names; None for any dtype."""
    if not isinstance(expected, types.GenericAlias):
        return None
    scalar = expected.__args__[1].__args__[0]
    return np.dtype(scalar) if scalar not in (Any, np.generic) else None
