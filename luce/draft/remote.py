"""A drafter in a daemon, as the server sees it: how texts went on goes there, guesses come back.

What the target's layers gave stays here as well, in a ring on the host. So a daemon that has died, or has let its
memory go, is told all that it needs and drafts on. While there is none, sequences go on without.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from luce.draft.drafter import Draftable, DrafterUnavailableError, PendingProposals, Proposal
from luce.draft.feature_window import FeatureWindow, SlotPositions, batches
from luce.draft.spec import DrafterSpec, Target
from luce.errors import BackendError, ShardLostError
from luce.gguf.fingerprint import fingerprint
from luce.ipc.channel import SMALL, ChannelError, GarbageError
from luce.ipc.device import RemoteDevice
from luce.ipc.messages import Done, DraftLoaded, Failed, LoadDraft, Propose, Proposed, Reply, Rest, Told
from luce.ipc.supervisor import failure
from luce.layers.features import FeatureRing
from luce.runtime.step import Int32, Span

#: bytes of features that go in one message
_PIECE = 16 << 20
#: seconds that a request may take for each row or token that it brings, beside the limit of all requests
_PER_ROW = 0.1


@dataclass
class _Heard:
    """What the daemon knows of a slot: tokens [0, tokens) and features of positions before `features`."""

    tokens: int = 0
    features: int = 0


class RemoteDrafter:
    """The drafter of a spec on a device of a daemon, which begins to load it. `wait_loaded` before anything else.

    `ring` is on the host, None if the spec reads only tokens; `window` as --draft-swa; `keep`: whether it stays
    loaded while no sequence runs; `facts` as for OnDemandDrafter.
    """

    def __init__(
        self,
        device: RemoteDevice,
        target: Target,
        spec: DrafterSpec,
        ring: FeatureRing | None,
        *,
        window: int,
        keep: bool,
        facts: dict[str, str | int],
    ) -> None:
        self.block = spec.block
        self._device = device
        self._daemon = device.daemon
        self._spec = spec
        self._facts = facts
        self._vocab = target.spec.vocab
        self._ring = ring
        self._window = None if ring is None else FeatureWindow(ring)
        self._keep = keep
        self._heard: dict[int, _Heard] = {}
        #: the daemon's life that has heard it
        self._generation = 0
        self._numbers = 0
        self._daemon.begin_draft(
            LoadDraft(
                path=str(target.file.paths[0].resolve()),
                fingerprint=fingerprint(target.file),
                draft=str(Path(spec.path).expanduser().resolve()) if spec.path else spec.kind,
                draft_fingerprint=spec.digest(),
                slots=target.slots,
                context=target.context,
                window=window,
                keep=keep,
            )
        )

    @property
    def device(self) -> RemoteDevice:
        """Where it is."""
        return self._device

    def wait_loaded(self) -> None:
        """Raises LuceError if the daemon cannot load it."""
        loaded, spec = self._daemon.draft_loaded(), self._spec
        if loaded != DraftLoaded(spec.kind, spec.block, spec.layers):
            raise BackendError(f"{self._daemon.name}: the daemon sees another drafter than this process")

    def observe(self, spans: Sequence[Span]) -> None:
        for span in spans:
            if self._window is not None:
                self._window.observe(span)
            if span.slot in self._heard:
                heard = self._heard[span.slot]
                heard.features = min(heard.features, span.position)

    def propose(self, asked: Sequence[Draftable]) -> PendingProposals:
        if self._generation != self._daemon.generation:
            self._generation = self._daemon.generation
            self._heard.clear()
        with self._believed():
            *first, last = self._batches(asked)
            for parts in first:
                self._tell(asked, parts, ())()
            answer = self._tell(asked, last, asked)

        def wait() -> list[Proposal]:
            with self._believed():
                reply = answer()
            assert isinstance(reply, Proposed)
            found = zip(reply.tokens, reply.chances, reply.parents, strict=True)
            return [Proposal(*(part.tolist() for part in parts)) for parts in found]

        return wait

    def forget(self, slot: int) -> None:
        if self._window is not None:
            self._window.forget(slot)
        self._heard.pop(slot, None)

    def idle(self) -> None:
        if self._keep or not self._heard:
            return
        self._heard.clear()
        self._ask(Rest(), 0, Done)()

    def describe(self) -> dict[str, str | int]:
        try:
            self._daemon.channel_now()
            state = "ready"
        except ShardLostError as error:
            state = str(error)
        return self._facts | {"block": self.block, "device": str(self._device.name), "daemon": state}

    def close(self) -> None:
        self._daemon.close()

    def _batches(self, asked: Sequence[Draftable]) -> list[list[SlotPositions]]:
        """The features that the daemon has yet to get, a message's at a time, the last one's perhaps none."""
        if self._window is None or self._ring is None:
            return [[]]
        owed = []
        for one in asked:
            known, heard = self._window.positions(one.slot), self._heard.get(one.slot, _Heard())
            owed.append((one.slot, range(max(known.start, heard.features), min(known.stop, len(one.tokens) - 1))))
        return list(batches(owed, max(1, _PIECE // (2 * self._ring.rows.shape[1])))) or [[]]

    @contextlib.contextmanager
    def _believed(self) -> Iterator[None]:
        """What fails inside leaves unknown what the daemon has made of it."""
        try:
            yield
        except BaseException:
            self._heard.clear()
            raise

    def _tell(
        self, asked: Sequence[Draftable], parts: Sequence[SlotPositions], wanted: Sequence[Draftable]
    ) -> Callable[[], Reply]:
        """Tell of parts, and of the texts of all that are wanted: what is returned waits for the proposals."""
        texts = {one.slot: one.tokens for one in asked}
        places = {part.slot: part.positions for part in parts}
        none = np.empty(0, np.int32)
        told = [
            self._told(slot, texts[slot], places.get(slot, none))
            for slot in dict.fromkeys([*places, *(one.slot for one in wanted)])
        ]
        width = 0 if self._ring is None else self._ring.rows.shape[1]
        features = np.empty((0, width), np.uint16)
        if parts and self._ring is not None and self._window is not None:
            features = self._ring.rows[self._window.ring_rows(parts)]
        message = Propose(tuple(told), features, tuple((one.slot, one.max_tokens, one.max_depth) for one in wanted))
        rows = len(features) + sum(len(part.tokens) for part in told)
        return self._ask(message, rows, Proposed, wanted)

    def _told(self, slot: int, text: Int32, positions: Int32) -> Told:
        fresh = slot not in self._heard
        heard = self._heard.setdefault(slot, _Heard())
        at, heard.tokens = heard.tokens, len(text)
        begin = int(positions[0]) if len(positions) else 0
        if len(positions):
            heard.features = begin + len(positions)
        return Told(slot, fresh, at, text[at:], begin, len(positions))

    def _ask(
        self, message: msgspec.Struct, rows: int, kind: type[Reply], wanted: Sequence[Draftable] = ()
    ) -> Callable[[], Reply]:
        """Send a message: what is returned waits for the answer, and checks it. Both raise DrafterUnavailableError if
        there is no daemon, the second one what the daemon could not do."""
        try:
            channel = self._daemon.channel_now()
        except ShardLostError as error:
            raise DrafterUnavailableError(str(error)) from None
        self._numbers += 1
        limit = self._daemon.limits.request

        @contextlib.contextmanager
        def talking() -> Iterator[None]:
            try:
                yield
            except ChannelError as error:
                raise DrafterUnavailableError(str(self._daemon.lost(channel, error))) from None

        def wait() -> Reply:
            with talking():
                number, reply = channel.receive(timeout=limit + _PER_ROW * rows, limit=SMALL)
                if number != self._numbers:
                    raise GarbageError(f"it answered request {number} instead of {self._numbers}")
                if isinstance(reply, Proposed):
                    check(reply, wanted, self._vocab)
                if not isinstance(reply, (kind, Failed)):
                    raise GarbageError(f"it sent {type(reply).__name__} instead of {kind.__name__}")
            if isinstance(reply, Failed):
                raise failure(self._daemon.name, reply)
            return reply

        with talking():
            channel.send(self._numbers, message, timeout=limit)
        return wait


def check(reply: Proposed, wanted: Sequence[Draftable], vocab: int) -> None:
    """Raises GarbageError unless these are proposals for what is wanted."""
    if not len(reply.tokens) == len(reply.chances) == len(reply.parents) == len(wanted):
        raise GarbageError(f"it sent {len(reply.tokens)} proposals for {len(wanted)} texts")
    for one, tokens, chances, parents in zip(wanted, reply.tokens, reply.chances, reply.parents, strict=True):
        # The engine looks at whether parents make a tree.
        if parents.shape not in ((tokens.shape, (0,)) if one.max_depth else ((0,),)):
            raise GarbageError(f"it proposed {tokens.shape} tokens with {parents.shape} parents")
        if tokens.ndim != 1 or len(tokens) > one.max_tokens or chances.shape not in (tokens.shape, (0,)):
            raise GarbageError(
                f"it proposed {tokens.shape} tokens with {chances.shape} chances, {one.max_tokens} were asked"
            )
        if not _inside(tokens, vocab - 1) or not _inside(chances, 1):
            raise GarbageError("it proposed what is no token, or with a chance that is none")


def _inside(values: NDArray[np.int32] | NDArray[np.float64], most: float) -> bool:
    """Whether all are numbers of 0 to `most`."""
    return bool(((values >= 0) & (values <= most)).all())
