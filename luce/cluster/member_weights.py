"""A member's weights: its own copy of the model file, or what it gets of the coordinator's.

Tensors of either are compared with the coordinator's by their SHA-256.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from luce.cluster import wire
from luce.cluster.model_files import find_model
from luce.cluster.partial_model import Parts, make_room
from luce.cluster.weight_source import tensor_sum
from luce.config.directories import user_cache_directory
from luce.errors import DeviceError, LuceError, UnreachableError
from luce.gguf.fingerprint import fingerprint, sampled
from luce.gguf.reader import GGUFFile, TensorInfo, open_gguf
from luce.ipc.channel import Channel, ChannelError, ChannelTimeoutError
from luce.layers.tensors import shard_tensors
from luce.log import event
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.profiles.cached_file import read_cached, write_cached
from luce.remote.messages import Load

_log = logging.getLogger("luce.cluster")
#: pieces that are asked for before the first one is there
AHEAD = 4
#: seconds that the coordinator has to answer: its disk may be slow, and its rate limited
_ANSWER_TIMEOUT = 120.0
#: most bytes of arrays in an answer
_LIMIT = wire.LARGEST_PIECE
#: attempts to connect anew without a piece in between, and the seconds before each
_ATTEMPTS, RETRY_DELAY = 5, 1.0
#: most files of a model
_MOST_FILES = 1000

Verify = Literal["once", "always", "never"]
Answer = TypeVar("Answer", bound=msgspec.Struct)
#: connects to the coordinator's file; raises OSError and ValueError
Connect = Callable[[], "Weights"]


class Weights:
    """A connection over which a member reads the coordinator's file. `is_over`: whether nobody needs it any more.

    Its methods raise ChannelError, and UnreachableError once it is over.
    """

    def __init__(self, channel: Channel[Any], is_over: Callable[[], bool]) -> None:
        self._channel = channel
        self._is_over = is_over

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def send(self, request: msgspec.Struct) -> None:
        """Send a request, whose answer `receive` returns in turn."""
        self._channel.send(0, request, timeout=_ANSWER_TIMEOUT)

    def receive(self, kind: type[Answer]) -> Answer:
        """The next answer."""
        end = time.monotonic() + _ANSWER_TIMEOUT
        while not self._channel.ready(RETRY_DELAY):
            _check_needed(self._is_over)
            if time.monotonic() > end:
                raise ChannelTimeoutError("it does not respond")
        _, answer = self._channel.receive(timeout=_ANSWER_TIMEOUT, limit=_LIMIT)
        if not isinstance(answer, kind):
            raise ChannelError(f"it sent {type(answer).__name__} instead of {kind.__name__}")
        return answer

    def layout(self) -> tuple[tuple[int, int], ...]:
        """As in wire.Layout."""
        self.send(wire.AskLayout())
        return self.receive(wire.Layout).files

    def sums(self, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """Each of these tensors with its SHA-256."""
        asked: deque[str] = deque()
        for name in names:
            self.send(wire.AskSum(name))
            asked.append(name)
            if len(asked) == AHEAD:
                yield asked.popleft(), self.receive(wire.TensorSum).sha256
        for name in asked:
            yield name, self.receive(wire.TensorSum).sha256


@dataclass(frozen=True)
class Storage:
    """Where a member looks for files, and what it keeps of those that it gets."""

    #: folders in which files are looked for; empty: where models usually lie
    folders: Sequence[Path] = ()
    #: most bytes of the disk for what it gets; 0 without a limit
    limit: int = 0
    #: how often tensors of own files are compared with the coordinator's
    verify: Verify = "once"

    def find(self, wanted: str, streams: bool) -> tuple[Path | None, str]:
        """The own file with a fingerprint, None without one; and why layers of it cannot be loaded, "" if they can."""
        path = find_model(wanted, self.folders)
        if path is not None or streams:
            return path, ""
        looked = ", ".join(map(str, self.folders)) or "where models usually lie"
        return None, f"no model file with fingerprint {wanted} (looked at: {looked}), and the server sends none"


def locate(
    path: Path | None,
    storage: Storage,
    connect: Connect,
    load: Load,
    on_progress: Callable[[float], None],
    is_over: Callable[[], bool],
) -> Path:
    """The file with the layers of a load: `path`, whose tensors are compared, or None, then one that gets them.

    A connection that is cut is made anew, and goes on behind what is there, unless `is_over` says that nobody needs it
    any more. Raises UnreachableError if that fails, other LuceErrors if this machine cannot have the weights: its disk
    is full, or a tensor differs.
    """
    if path is not None and storage.verify == "never":
        return path
    failed, there = 0, -1
    while True:
        fetch: _Fetch | None = None
        try:
            with contextlib.closing(connect()) as weights:
                if path is not None:
                    _compare_own(path, storage.verify, weights, load)
                    return path
                fetch = _Fetch(storage, weights, load, on_progress)
                with contextlib.closing(fetch):
                    return fetch.run()
        except (OSError, ValueError, ChannelError) as error:
            got = -1 if fetch is None else fetch.there
            failed, there = (0 if got > there else failed + 1), max(there, got)
            if failed > _ATTEMPTS:
                raise UnreachableError(f"the weights do not come from the server: {error}") from error
            time.sleep(RETRY_DELAY)
            _check_needed(is_over)
            _log.warning("the weights do not come from the server: %s; trying again", error)


def _check_needed(is_over: Callable[[], bool]) -> None:
    """Raises UnreachableError if the server waits for the weights no more."""
    if is_over():
        raise UnreachableError("the server does not wait for the weights any more")


def _layers(load: Load, file: GGUFFile) -> list[TensorInfo]:
    """The tensors of a load, in the order of the file. Raises DeviceError for a load of another file, and what reading
    the metadata raises."""
    if fingerprint(file) != load.fingerprint:
        raise DeviceError(f"{file.paths[0]}: is not the server's file: their contents differ")
    spec = read_spec(Source(str(file.paths[0]), file.metadata, file.tensors)).for_context(load.context)
    names: set[str] = set()
    for begin, end in load.layers:
        if not 0 <= begin < end <= len(spec.layers):
            raise DeviceError(f"layers {begin}..{end} of a model of {len(spec.layers)} layers")
        names |= shard_tensors(file, spec, range(begin, end))
    return sorted((file.tensors[name] for name in names), key=lambda info: (info.part, info.offset))


class _Compared(msgspec.Struct):
    """The tensors of a file as it was then that are equal to the coordinator's."""

    inode: int
    size: int
    mtime_ns: int
    tensors: set[str]


def _compare_own(path: Path, verify: Verify, weights: Weights, load: Load) -> None:
    """Compare the layers of an own file with the coordinator's. Raises DeviceError for a difference, ChannelError."""
    index = user_cache_directory() / "compared.json"
    known = read_cached(index, dict[str, _Compared]) or {}
    with open_gguf(path) as file:
        states = []
        for each in file.paths:
            facts, before = each.stat(), known.get(str(each))
            state = _Compared(facts.st_ino, facts.st_size, facts.st_mtime_ns, set())
            same = before is not None and msgspec.structs.replace(before, tensors=set()) == state
            states.append(before if same and before is not None else state)
        infos = {info.name: info for info in _layers(load, file)}
        names = [n for n, info in infos.items() if verify == "always" or n not in states[info.part].tensors]
        for name, theirs in weights.sums(names):
            check_sum(str(file.paths[infos[name].part]), name, tensor_sum(file, name), theirs)
            states[infos[name].part].tensors.add(name)
        if names:
            event(_log, "weights compared", tensors=len(names), model=str(path))
            write_cached(index, known | {str(p): state for p, state in zip(file.paths, states, strict=True)})


def check_sum(path: str, tensor: str, own: bytes, theirs: bytes) -> None:
    """Raises DeviceError if a tensor differs from the coordinator's."""
    if own != theirs:
        raise DeviceError(f"{path}: tensor {tensor} has SHA-256 {own.hex()}, in the server's file {theirs.hex()}")


class _Fetch:
    """One attempt to get the layers of a load into the files that hold parts of the model."""

    def __init__(self, storage: Storage, weights: Weights, load: Load, on_progress: Callable[[float], None]) -> None:
        self._root = user_cache_directory() / "parts"
        self._limit = storage.limit
        self._weights = weights
        self._load = load
        self._on_progress = on_progress
        self._layout = weights.layout()
        if not self._layout or len(self._layout) > _MOST_FILES or any(not 0 <= at <= size for size, at in self._layout):
            raise ChannelError("it sent a layout that no model has")
        self._parts = Parts(self._root, load.fingerprint, [size for size, _ in self._layout])
        #: tensors that are on the way, by name
        self._infos: dict[str, TensorInfo] = {}
        #: bytes that are there, and that are needed; 0 before that is known
        self.there = self._size = 0

    def close(self) -> None:
        """Keep what is there."""
        self._parts.close()

    def run(self) -> Path:
        """The first file, once all is there. Raises DeviceError and ChannelError."""
        parts = self._parts
        # What the fingerprint reads: with it, the file is known to be the server's as any other.
        heads = [(part, begin, end) for part, (size, at) in enumerate(self._layout) for begin, end in sampled(size, at)]
        self._make_room(sum(self._missing(*head) for head in heads))
        self._get(piece for head in heads for piece in self._pieces(*head))
        parts.sync()
        try:
            with open_gguf(parts.paths[0]) as file:
                infos = _layers(self._load, file)
        except LuceError:
            parts.forget()
            raise
        missing = sum(self._missing(*_range(info)) for info in infos)
        self._size = sum(info.nbytes for info in infos)
        self.there = self._size - missing
        self._weights.send(wire.Needs(self._size, self.there))
        self._make_room(missing)
        event(_log, "fetching", bytes=missing, there=self.there, folder=str(parts.paths[0].parent))
        self._infos = {info.name: info for info in infos if info.name not in parts.compared}
        self._get(self._requests())
        parts.sync()
        event(_log, "fetched", bytes=missing, folder=str(parts.paths[0].parent))
        return parts.paths[0]

    def _make_room(self, size: int) -> None:
        make_room(self._root, self._load.fingerprint, size, self._limit)

    def _missing(self, part: int, begin: int, end: int) -> int:
        return sum(stop - at for at, stop in self._parts.there[part].missing(begin, end))

    def _pieces(self, part: int, begin: int, end: int) -> Iterator[wire.AskBytes]:
        for at, stop in self._parts.there[part].missing(begin, end):
            for offset in range(at, stop, wire.LARGEST_PIECE):
                yield wire.AskBytes(part, offset, min(wire.LARGEST_PIECE, stop - offset))

    def _requests(self) -> Iterator[wire.AskBytes | wire.AskSum]:
        for info in self._infos.values():
            yield from self._pieces(*_range(info))
            yield wire.AskSum(info.name)

    def _get(self, requests: Iterable[wire.AskBytes | wire.AskSum]) -> None:
        """Get pieces, and compare tensors behind their pieces."""
        asked: deque[wire.AskBytes | wire.AskSum] = deque()
        for request in requests:
            self._weights.send(request)
            asked.append(request)
            if len(asked) == AHEAD:
                self._take(asked.popleft())
        while asked:
            self._take(asked.popleft())

    def _take(self, request: wire.AskBytes | wire.AskSum) -> None:
        """Receive the answer to a request."""
        if isinstance(request, wire.AskSum):
            info, theirs = self._infos[request.tensor], self._weights.receive(wire.TensorSum).sha256
            try:
                check_sum(str(self._parts.paths[info.part]), info.name, self._parts.sum(*_range(info)), theirs)
            except DeviceError:
                self._parts.forget()
                raise
            self._parts.note_compared(info.name)
            return
        data = self._weights.receive(wire.FileBytes).data
        if data.shape != (request.size,):
            raise ChannelError("it sent another piece than it was asked for")
        self._parts.write(request.part, request.offset, data)
        self.there += request.size
        if self._size:
            self._on_progress(self.there / self._size)


def _range(info: TensorInfo) -> tuple[int, int, int]:
    """File, begin and end of a tensor."""
    return info.part, info.offset, info.offset + info.nbytes
