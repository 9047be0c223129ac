"""What the groups of a shard's verbs become on the wire: saved states, ranked pages, token table and head."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from luce.ipc.channel import SMALL, GarbageError
from luce.ipc.messages import (
    Done,
    Embed,
    Embedded,
    Fill,
    Project,
    Rank,
    Ranked,
    Reply,
    Restore,
    Save,
    Seal,
    Unseal,
)
from luce.remote.rpc import PER_BYTE, PER_ROW, Request, Requests
from luce.remote.saved_state import RemoteSavedState
from luce.runtime.device import Array, Device
from luce.runtime.step import Int32, Output
from luce.shard.saved_state import Piece, SavedState, layer_of
from luce.shard.shard import Pending

#: seconds that ranking may take for each byte of scores
_RANK_SECONDS = 1e-4
#: most requests of `add` that are remembered until their errors are raised
_ADDED = 256


class RemoteState:
    """See luce.shard.shard.ShardState. `seconds` gives the time that copies of a sequence's state may take."""

    def __init__(
        self, requests: Requests, layers: range, mirrored: Sequence[int], seconds: Callable[[], float]
    ) -> None:
        self._requests = requests
        self._layers = layers
        self._mirrored = mirrored
        self._copy_seconds = seconds

    def save(self, slot: int | None, pages: Sequence[Sequence[int]], *, held: bool = False) -> RemoteSavedState:
        message = Save(slot, tuple(tuple(map(int, group)) for group in pages), held)
        return RemoteSavedState(self._requests, self._layers, message, seconds=self._copy_seconds())

    def restore(
        self, slot: int | None, pages: Sequence[Sequence[int]], saved: SavedState, first: int = 0
    ) -> Callable[[], None] | None:
        assert isinstance(saved, RemoteSavedState)
        saved.wait()
        message = Restore(saved.number, slot, tuple(tuple(map(int, group)) for group in pages), first)
        return self._requests.ask(message, seconds=self._copy_seconds(), limit=SMALL, take=check_done).wait

    def load(self, piece: Piece) -> None:
        own_layers = {*self._layers, *self._mirrored}
        if own_layers.isdisjoint(piece.layers):
            return
        own = {name: tensor for name, tensor in piece.tensors.items() if layer_of(name) in own_layers}
        pages = tuple(tuple(map(int, group)) for group in piece.pages)
        message = Fill(piece.slot, pages, (piece.layers.start, piece.layers.stop), own)
        seconds = PER_BYTE * sum(tensor.nbytes for tensor in own.values())
        self._requests.ask(message, seconds=seconds, limit=SMALL, take=check_done).wait()


class RemoteRanking:
    """See luce.shard.shard.ShardRanking. `layers`: number of layers that rank; `seconds` as in RemoteState."""

    def __init__(self, requests: Requests, layers: int, seconds: Callable[[], float]) -> None:
        self._requests = requests
        self._layers = layers
        self._copy_seconds = seconds
        #: requests of `add`, whose errors `rank` raises: waiting for their responses means waiting for steps
        self._adding: deque[Request] = deque(maxlen=_ADDED)

    def add(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        message = Seal(slot, tuple(map(int, entries)), tuple(map(int, pages)))
        self._adding.append(self._requests.ask(message, seconds=self._copy_seconds(), limit=SMALL, take=check_done))

    def drop(self, slot: int) -> None:
        self._requests.ask(Unseal(slot), seconds=0, limit=SMALL, take=check_done)

    def rank(self, slot: int, position: int, entries: Int32) -> NDArray[np.float64]:
        shape = (self._layers, len(entries))
        found: list[NDArray[np.float64]] = []

        def take(reply: Reply) -> None:
            if not isinstance(reply, Ranked) or reply.scores.shape != shape:
                raise GarbageError("it sent something else than scores of the pages")
            found.append(reply.scores)

        message = Rank(slot, position, np.asarray(entries, np.int32))
        size = 8 * self._layers * len(entries)
        asked = self._requests.ask(message, seconds=_RANK_SECONDS * size, limit=SMALL + size, take=take)
        adding = [*self._adding]
        self._adding.clear()
        try:
            asked.wait()
        finally:
            # Their responses have come by now.
            for request in adding:
                if request.error is not None:
                    raise request.error
        return found[0]


class RemoteEnds:
    """See luce.shard.shard.ShardEnds."""

    def __init__(self, requests: Requests, device: Device, hidden: int, vocab: int) -> None:
        self.device = device
        self._requests = requests
        self._hidden = hidden
        self._vocab = vocab

    def embed(self, tokens: Int32) -> Array:
        shape = (len(tokens), self._hidden)
        found: list[NDArray[np.float32]] = []

        def take(reply: Reply) -> None:
            if not isinstance(reply, Embedded) or reply.rows.shape != shape:
                raise GarbageError("it sent something else than the rows of the tokens")
            found.append(reply.rows)

        seconds, limit = PER_ROW * len(tokens), SMALL + 4 * len(tokens) * self._hidden
        self._requests.ask(Embed(np.asarray(tokens, np.int32)), seconds=seconds, limit=limit, take=take).wait()
        return found[0]

    def project(
        self, hidden: Array, *, top: int = 0, logits: bool = False, scale: float = 0.0, softcap: float = 0.0
    ) -> Pending:
        rows = len(hidden)

        def take(reply: Reply) -> None:
            check_done(reply)
            assert isinstance(reply, Done)
            if reply.output is None:
                raise GarbageError("it projected nothing")
            check_output(self._vocab, reply.output, rows, rows if logits else 0, (rows if top else 0, top))
            found = reply.output.candidates
            if scale and found is not None and (found.norms is None or found.norms.shape != (rows,)):
                raise GarbageError("it projected candidates without norms")

        seconds, limit = PER_ROW * rows, SMALL + 4 * rows * self._vocab
        message = Project(np.asarray(hidden, np.float32), top, logits, scale, softcap)
        return self._requests.ask(message, seconds=seconds, limit=limit, take=take).output


def check_output(vocab: int, output: Output, rows: int, full: int, asked: tuple[int, int]) -> None:
    """Raises GarbageError unless there are ids of `rows` rows, logits of `full`, and (rows, count) candidates."""
    ids, logits, top = output.ids, output.logits, output.candidates
    shape = asked[0], min(asked[1], vocab)
    if ids.shape != (rows,) or logits.shape != (full, vocab):
        raise GarbageError(f"it returned ids {ids.shape} and logits {logits.shape} for {rows} rows")
    if (top is None) != (not asked[0]) or (top is not None and not top.ids.shape == top.logits.shape == shape):
        raise GarbageError("it returned other candidates than were asked for")
    check_ids(vocab, output)


def check_ids(vocab: int, output: Output) -> None:
    """Raises GarbageError if there is no such token."""
    for ids in (output.ids, *([] if output.candidates is None else [output.candidates.ids])):
        # Negative ones are larger than all. NumPy takes 15 us to find the largest of one.
        values = ids.view(np.uint32).ravel()
        if (max(values.tolist(), default=0) if values.size <= 64 else values.max()) >= vocab:
            raise GarbageError(f"it returned ids outside 0..{vocab - 1}")


def check_done(reply: Reply) -> None:
    """Raises GarbageError unless the response is Done."""
    if not isinstance(reply, Done):
        raise GarbageError(f"it sent {type(reply).__name__} instead of Done")
