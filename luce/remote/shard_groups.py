"""The groups of a shard's verbs as requests to a daemon: saved states, page ranking, token table and head."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from luce.ipc.channel import SMALL_FRAME, ProtocolError
from luce.remote.messages import (
    Done,
    Embed,
    LoadState,
    Project,
    RankPages,
    Response,
    Restore,
    Save,
    Tensors,
    UpdateRanking,
)
from luce.remote.rpc import PER_BYTE, PER_ROW, Expected, Request, Requests
from luce.remote.saved_state import RemoteSavedState
from luce.runtime.device import Array, Device
from luce.runtime.draws import RowDraws
from luce.runtime.step import Int32, Output
from luce.shard.saved_state import SavedState, StatePiece, layer_of
from luce.shard.shard import Pending

#: seconds that ranking may take for each byte of scores
_RANK_SECONDS = 1e-4
#: most requests of `add` whose errors are remembered for `rank`
_MAX_ADDED = 256


class RemoteState:
    """Saves and restores states in the daemon. See luce.shard.shard.

    `layers`: those of the shard, and layers of other shards whose keys and values it mirrors. `copy_seconds` returns
    the seconds that copying a sequence's state may take.
    """

    def __init__(
        self, requests: Requests, layers: range, mirrored: Collection[int], copy_seconds: Callable[[], float]
    ) -> None:
        self._requests = requests
        self._layers = layers
        self._mirrored = mirrored
        self._copy_seconds = copy_seconds

    def save(self, slot: int | None, pages: Sequence[Sequence[int]], *, held: bool = False) -> RemoteSavedState:
        message = Save(next(self._requests.saved_numbers), slot, _groups(pages), held)
        return RemoteSavedState(self._requests, self._layers, message, seconds=self._copy_seconds())

    def restore(
        self, slot: int | None, pages: Sequence[Sequence[int]], saved: SavedState, first: int = 0
    ) -> Callable[[], None] | None:
        assert isinstance(saved, RemoteSavedState)
        saved.wait()
        message = Restore(saved.number, slot, _groups(pages), first)
        return self._requests.ask(message, Expected(seconds=self._copy_seconds())).wait

    def load(self, piece: StatePiece) -> None:
        own = {*self._layers, *self._mirrored}
        if own.isdisjoint(piece.layers):
            return
        tensors = {name: tensor for name, tensor in piece.tensors.items() if layer_of(name) in own}
        layers = piece.layers.start, piece.layers.stop
        seconds = PER_BYTE * sum(tensor.nbytes for tensor in tensors.values())
        self._requests.ask(
            LoadState(piece.slot, _groups(piece.pages), layers, tensors), Expected(seconds=seconds)
        ).wait()


class RemoteRanking:
    """Ranks pages in the daemon. See luce.shard.shard. `layers`: number of layers that rank pages."""

    def __init__(self, requests: Requests, layers: int, copy_seconds: Callable[[], float]) -> None:
        self._requests = requests
        self._layers = layers
        self._copy_seconds = copy_seconds
        #: Requests of `add`, whose errors `rank` raises: `add` does not wait for its response, since that comes after
        #: the steps that are queued.
        self._adding: deque[Request] = deque(maxlen=_MAX_ADDED)

    def add(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        if not len(pages):
            return
        message = UpdateRanking(slot, tuple(map(int, entries)), tuple(map(int, pages)))
        self._adding.append(self._requests.ask(message, Expected(seconds=self._copy_seconds())))

    def drop(self, slot: int) -> None:
        self._requests.ask(UpdateRanking(slot, (), ()))

    def rank(self, slot: int, position: int, entries: Int32) -> NDArray[np.float64]:
        size = 8 * self._layers * len(entries)
        message = RankPages(slot, position, np.asarray(entries, np.int32))
        seconds = _RANK_SECONDS * size
        tensor = _ExpectedTensor("scores", (self._layers, len(entries)), np.float64)
        asked = self._requests.ask(message, Expected(tensor.take, seconds, SMALL_FRAME + size))
        adding = [*self._adding]
        self._adding.clear()
        try:
            asked.wait()
        finally:
            # Their responses have arrived by now.
            for request in adding:
                if request.error is not None:
                    raise request.error
        scores: NDArray[np.float64] = tensor.value()
        return scores


class RemoteEnds:
    """Token table and head in the daemon. See luce.shard.shard."""

    embedding = None

    def __init__(self, requests: Requests, device: Device, hidden: int, vocab: int) -> None:
        self.device = device
        self._requests = requests
        self._hidden = hidden
        self._vocab = vocab

    def embed(self, tokens: Int32) -> Array:
        tensor = _ExpectedTensor("rows", (len(tokens), self._hidden), np.float32)
        expected = Expected(tensor.take, PER_ROW * len(tokens), SMALL_FRAME + 4 * len(tokens) * self._hidden)
        self._requests.ask(Embed(np.asarray(tokens, np.int32)), expected).wait()
        return tensor.value()

    def project(
        self, hidden: Array, *, top: int = 0, logits: bool = False, scale: float = 0.0, softcap: float = 0.0
    ) -> Pending:
        rows = len(hidden)

        def take(response: Response) -> None:
            output = response.output if isinstance(response, Done) else None
            if output is None:
                raise ProtocolError("it sent no output of the head")
            check_output(output, self._vocab, rows, rows if logits else 0, (rows if top else 0, top))
            found = output.candidates
            if scale and found is not None and (found.norms is None or found.norms.shape != (rows,)):
                raise ProtocolError("it sent candidates without norms")

        expected = Expected(take, PER_ROW * rows, SMALL_FRAME + 4 * rows * self._vocab)
        message = Project(np.asarray(hidden, np.float32), top, logits, scale, softcap)
        return self._requests.ask(message, expected).output


class _ExpectedTensor:
    """A response of one tensor, of which name, shape and dtype are known."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
        self._name = name
        self._shape = shape
        self._dtype = np.dtype(dtype)
        self._tensor: NDArray[np.generic] | None = None

    def take(self, response: Response) -> None:
        """Raises ProtocolError if it is another tensor."""
        tensors = response.tensors if isinstance(response, Tensors) else {}
        tensor = tensors.get(self._name)
        if len(tensors) != 1 or tensor is None or tensor.shape != self._shape or tensor.dtype != self._dtype:
            raise ProtocolError(f"it sent other {self._name} than it was asked for")
        self._tensor = tensor

    def value(self) -> Array:
        """The tensor."""
        assert self._tensor is not None
        return self._tensor


def check_output(
    output: Output, vocab: int, rows: int, full: int, candidates: tuple[int, int], draws: RowDraws | None = None
) -> None:
    """Raises ProtocolError unless an output has ids of `rows` rows, which are drawn so, logits of `full` rows, and
    (rows, n) candidates."""
    ids, logits, found = output.ids, output.logits, output.candidates
    shape = candidates[0], min(candidates[1], vocab)
    if ids.shape != (rows,) or logits.shape != (full, vocab):
        raise ProtocolError(f"it returned ids {ids.shape} and logits {logits.shape} for {rows} rows")
    if (found is None) != (not candidates[0]) or (
        found is not None and not found.ids.shape == found.logits.shape == shape
    ):
        raise ProtocolError("it returned other candidates than it was asked for")
    check_ids(output, vocab, draws)


def check_ids(output: Output, vocab: int, draws: RowDraws | None = None) -> None:
    """Raises ProtocolError if an id of an output is outside the vocabulary. Rows that are drawn may have none."""
    chosen = output.ids if draws is None else output.ids[(output.ids != -1) | ~draws.drawn]
    for ids in (chosen, *([] if output.candidates is None else [output.candidates.ids])):
        # As uint32, negative ids are the largest. NumPy takes 15 us to find the maximum of one value.
        values = ids.view(np.uint32).ravel()
        if (max(values.tolist(), default=0) if values.size <= 64 else values.max()) >= vocab:
            raise ProtocolError(f"it returned ids outside 0..{vocab - 1}")


def _groups(pages: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, group)) for group in pages)
