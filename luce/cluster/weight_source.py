"""The coordinator's side of weights that members lack: reads the model file for them.

Members that ask at the same time get their pieces in turn. A tensor that several need, such as a head that is the
embedding too, goes to one after the other.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import logging
import socket
import ssl
import threading
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from luce.cluster import wire
from luce.errors import LuceError
from luce.gguf.fingerprint import tensors_begin
from luce.gguf.reader import GGUFFile, open_gguf
from luce.ipc.channel import Channel, ChannelError

_log = logging.getLogger("luce.cluster")
#: seconds that a member has to read a piece
_SEND_TIMEOUT = 60.0
#: bytes of a tensor that are hashed at a time
_PIECE = 4 << 20
#: seconds without a request behind which a member's turn to read a tensor is over, as it may stand still; and most
#: seconds that another one waits for its end, which are less than a member waits for a piece
TURN_SECONDS, LONGEST_WAIT = 2.0, 30.0
#: most connections of a member: it uses one at a time, and makes another where that is cut
MOST_STREAMS = 8


class WeightSource:
    """A model file that members read, or whose sums they ask for alone without `streams`.

    `rate`: most bytes that are sent in a second, 0 for no limit. Any thread may call it. Raises ModelError if the file
    cannot be opened.
    """

    def __init__(self, path: Path, rate: float = 0.0, *, streams: bool = True) -> None:
        self._file = open_gguf(path)
        self.streams = streams
        self._rate = rate
        self._lock = threading.Lock()
        #: when the next piece may be sent
        self._next = 0.0
        self._closed = threading.Event()
        self._sums: dict[str, bytes] = {}

        self._turns = threading.Condition()
        #: by part and offset of a tensor, which member reads it, and when it last asked
        self._readers: dict[tuple[int, int], tuple[str, float]] = {}
        infos = sorted((info.part, info.offset, info.nbytes) for info in self._file.tensors.values())
        self._places = [(part, offset) for part, offset, _ in infos]
        self._ends = [offset + size for _, offset, size in infos]

    def close(self) -> None:
        """Close the file. Whoever waits for its turn gets a ChannelError."""
        self._closed.set()
        with self._turns:
            self._turns.notify_all()
        self._file.close()

    def answer(self, request: wire.AskLayout | wire.AskBytes | wire.AskSum) -> wire.Weights:
        """What a member asks for. Raises ChannelError for what no member asks for, and ModelError."""
        match request:
            case wire.AskLayout():
                files = enumerate(self._file.files)
                return wire.Layout(tuple((file.size, tensors_begin(self._file, part)) for part, file in files))
            case wire.AskSum(name):
                return wire.TensorSum(self._sum(name))
            case wire.AskBytes(part, offset, size):
                return wire.FileBytes(self.read(part, offset, size))

    def wait_turn(self, member: str, part: int, offset: int) -> None:
        """Wait until no other member reads the tensor at an offset, or for as long as a member can wait; this one
        reads no other any more. Raises ChannelError if the file is closed meanwhile."""
        at = bisect.bisect_right(self._places, (part, offset)) - 1
        found = at >= 0 and self._places[at][0] == part and offset < self._ends[at]
        place = self._places[at] if found else None
        self.end_turn(member, beside=place)
        if place is None:
            return
        end = time.monotonic() + LONGEST_WAIT
        with self._turns:
            while not self._closed.is_set():
                reader, asked = self._readers.get(place, (member, 0.0))
                left = min(asked + TURN_SECONDS, end) - time.monotonic()
                if reader == member or left <= 0:
                    self._readers[place] = member, time.monotonic()
                    return
                self._turns.wait(left)
        raise ChannelError("the model file is read no more")

    def end_turn(self, member: str, beside: tuple[int, int] | None = None) -> None:
        """A member reads no tensor any more, but the one at the place `beside`."""
        with self._turns:
            for place in [at for at, (reader, _) in self._readers.items() if reader == member and at != beside]:
                del self._readers[place]
            self._turns.notify_all()

    def read(self, part: int, offset: int, size: int) -> NDArray[np.uint8]:
        """Bytes of a part, once it is their turn. Raises ChannelError for what no member asks for, and ModelError."""
        files = self._file.files
        if not self.streams or not 0 <= part < len(files) or not 0 < size <= wire.LARGEST_PIECE:
            raise ChannelError("it asked for bytes that nobody gets")
        if not 0 <= offset <= files[part].size - size:
            raise ChannelError("it asked for bytes behind the end of the model")
        self._pace(size)
        return files[part].read(offset, size)

    def _sum(self, name: str) -> bytes:
        if name not in self._file.tensors:
            raise ChannelError("it asked for a tensor that the model lacks")
        if name not in self._sums:
            self._sums[name] = tensor_sum(self._file, name)
        return self._sums[name]

    def _pace(self, size: int) -> None:
        """Wait until so many bytes may be sent. Raises ChannelError if the file is closed meanwhile."""
        if not self._rate:
            return
        with self._lock:
            begin = max(self._next, time.monotonic())
            self._next = begin + size / self._rate
        if self._closed.wait(max(0.0, begin - time.monotonic())):
            raise ChannelError("the model file is read no more")


def tensor_sum(file: GGUFFile, name: str) -> bytes:
    """The SHA-256 of a tensor's bytes. Raises ModelError if the file changes meanwhile."""
    info, digest = file.tensors[name], hashlib.sha256()
    for at in range(0, info.nbytes, _PIECE):
        digest.update(file.files[info.part].read(info.offset + at, min(_PIECE, info.nbytes - at)).data)
    return digest.digest()


class WeightStreams:
    """The connections over which members read the model file, each with a thread. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, set[ssl.SSLSocket]] = {}
        self._threads: set[threading.Thread] = set()
        #: of each member the bytes that it needs, and how many of them are there
        self._shares: dict[str, tuple[int, int]] = {}
        #: bytes sent since the start
        self.sent = 0

    def begin(self, member: str, sock: ssl.SSLSocket, source: WeightSource) -> None:
        """Answer what a member asks for over a connection, until it ends."""
        arguments = member, sock, source
        thread = threading.Thread(target=self._run, args=arguments, name="luce-weights", daemon=True)
        with self._lock:
            own = self._open.setdefault(member, set())
            if len(own) >= MOST_STREAMS:
                _log.warning("member %s reads the model file over %d connections: one more is closed", member, len(own))
                sock.close()
                return
            own.add(sock)
            self._threads.add(thread)
        thread.start()

    def share(self, member: str) -> float | None:
        """The share of its weights that a member has; None if it has not said how many it needs."""
        with self._lock:
            size, there = self._shares.get(member, (0, 0))
        return there / size if size else None

    def end(self, member: str) -> None:
        """End the connections of a member."""
        with self._lock:
            self._shares.pop(member, None)
            for sock in self._open.get(member, ()):
                with contextlib.suppress(OSError):
                    # Not SSLSocket.shutdown, which would let its thread read on without TLS.
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """End all connections, and their threads."""
        for member in list(self._open):
            self.end(member)
        for thread in list(self._threads):
            thread.join()

    def _run(self, member: str, sock: ssl.SSLSocket, source: WeightSource) -> None:
        channel: Channel[wire.ForWeights] = Channel(sock, wire.ForWeights)
        try:
            while True:
                number, request = channel.receive(timeout=None, limit=0)
                if isinstance(request, wire.Needs):
                    if request.there > request.size:
                        raise ChannelError("it has more than it needs")
                    with self._lock:
                        self._shares[member] = request.size, request.there
                    continue
                if isinstance(request, wire.AskBytes):
                    source.wait_turn(member, request.part, request.offset)
                answer = source.answer(request)
                channel.send(number, answer, timeout=_SEND_TIMEOUT)
                if isinstance(request, wire.AskSum):
                    # Sums are asked for behind the last piece.
                    source.end_turn(member)
                if isinstance(answer, wire.FileBytes):
                    with self._lock:
                        size, there = self._shares.get(member, (0, 0))
                        self._shares[member] = size, min(size, there + answer.data.nbytes)
                        self.sent += answer.data.nbytes
        except (ChannelError, LuceError, ValueError) as error:
            # ValueError: the file was closed, as there is another placement.
            _log.debug("weights for %s: %s", member, error)
        finally:
            channel.close()
            source.end_turn(member)
            with self._lock:
                self._open[member].discard(sock)
                self._threads.discard(threading.current_thread())
