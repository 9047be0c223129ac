"""A drafter in a daemon, as the server sees it: texts and features go to the daemon, proposals come back.

The features of the target stay in a ring on the host as well. So the server can send everything again to a daemon that
was restarted, or that has released its memory. While there is no daemon, sequences go on without a drafter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from luce.draft.drafter import Draftable, DrafterUnavailableError, PendingProposals, Proposal
from luce.draft.feature_window import FeatureWindow, SlotPositions, batches
from luce.draft.messages import DraftLoaded, Idle, LoadDraft, Propose, Proposed, TextUpdate
from luce.draft.spec import DrafterSpec, Target
from luce.errors import BackendError, ShardLostError
from luce.gguf.fingerprint import fingerprint
from luce.ipc.channel import SMALL_FRAME, ChannelError, ProtocolError
from luce.ipc.lifecycle import Failed, error_of
from luce.layers.features import FeatureRing
from luce.remote.device import RemoteDevice
from luce.remote.messages import Done
from luce.runtime.step import Int32, Span

#: bytes of features in one message
_FEATURE_BYTES = 16 << 20
#: seconds that a request may take for each row or token in it, beside the timeout of all requests
_PER_ROW = 0.1

_Answer = TypeVar("_Answer", bound=msgspec.Struct)


@dataclass
class _Sent:
    """What has been sent about the text of a slot."""

    #: its first tokens
    tokens: int = 0
    #: the end of the positions whose features have been sent
    features: int = 0


class RemoteDrafter:
    """The drafter of a spec on a device of a daemon, which begins to load it. Call `wait_loaded` first.

    `ring` is on the host, None for a drafter that reads only tokens; `window` as --draft-swa; `keep`: whether it stays
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
        self.device = device
        self._daemon = device.daemon
        self._spec = spec
        self._facts = facts
        self._vocab = target.spec.vocab
        self._ring = ring
        self._window = None if ring is None else FeatureWindow(ring)
        self._keep = keep
        #: by slot
        self._sent: dict[int, _Sent] = {}
        #: the daemon's life that it was sent to
        self._generation = 0
        self._requests = 0
        load = LoadDraft(
            path=str(target.file.paths[0].resolve()),
            fingerprint=fingerprint(target.file),
            draft=str(Path(spec.path).expanduser().resolve()) if spec.path else spec.kind,
            draft_fingerprint=spec.digest(),
            slots=target.slots,
            context=target.context,
            window=window,
            keep=keep,
        )
        self._daemon.begin_load(load, DraftLoaded)

    def wait_loaded(self) -> None:
        """Raises LuceError if the daemon cannot load it."""
        loaded, spec = self._daemon.wait_loaded(DraftLoaded), self._spec
        if loaded != DraftLoaded(spec.kind, spec.block, spec.layers):
            raise BackendError(f"{self._daemon.name}: the daemon sees another drafter than this process")

    def observe(self, spans: Sequence[Span]) -> None:
        for span in spans:
            if self._window is not None:
                self._window.observe(span)
            if span.slot in self._sent:
                sent = self._sent[span.slot]
                sent.features = min(sent.features, span.position)

    def propose(self, asked: Sequence[Draftable]) -> PendingProposals:
        if self._generation != self._daemon.generation:
            self._generation = self._daemon.generation
            self._sent.clear()
        with self._forget_on_error():
            *first, last = self._batches(asked)
            for parts in first:
                self._send(asked, parts, ())()
            answer = self._send(asked, last, asked)

        def wait() -> list[Proposal]:
            with self._forget_on_error():
                proposed = answer()
            found = zip(proposed.tokens, proposed.probabilities, proposed.parents, strict=True)
            return [Proposal(*(part.tolist() for part in parts)) for parts in found]

        return wait

    def forget(self, slot: int) -> None:
        if self._window is not None:
            self._window.forget(slot)
        self._sent.pop(slot, None)

    def idle(self) -> None:
        if self._keep or not self._sent:
            return
        self._sent.clear()
        self._ask(Idle(), 0, Done, lambda response: None)()

    def describe(self) -> dict[str, str | int]:
        try:
            self._daemon.ready_channel()
            state = "ready"
        except ShardLostError as error:
            state = str(error)
        return self._facts | {"block": self.block, "device": str(self.device.name), "daemon": state}

    def close(self) -> None:
        self._daemon.close()

    def _batches(self, asked: Sequence[Draftable]) -> list[list[SlotPositions]]:
        """The features that have not been sent, in batches of one message each; the last batch may be empty."""
        if self._window is None or self._ring is None:
            return [[]]
        unsent = []
        for one in asked:
            known, sent = self._window.positions(one.slot), self._sent.get(one.slot, _Sent())
            unsent.append((one.slot, range(max(known.start, sent.features), min(known.stop, len(one.tokens) - 1))))
        return list(batches(unsent, max(1, _FEATURE_BYTES // (2 * self._ring.rows.shape[1])))) or [[]]

    @contextlib.contextmanager
    def _forget_on_error(self) -> Iterator[None]:
        """After an error it is unknown what the daemon has processed: everything will be sent again."""
        try:
            yield
        except BaseException:
            self._sent.clear()
            raise

    def _send(
        self, asked: Sequence[Draftable], parts: Sequence[SlotPositions], wanted: Sequence[Draftable]
    ) -> Callable[[], Proposed]:
        """Send features, and the texts that are wanted. The result waits for the proposals of these."""
        texts = {one.slot: one.tokens for one in asked}
        positions = {part.slot: part.positions for part in parts}
        none = np.empty(0, np.int32)
        updates = [
            self._update(slot, texts[slot], positions.get(slot, none))
            for slot in dict.fromkeys([*positions, *(one.slot for one in wanted)])
        ]
        width = 0 if self._ring is None else self._ring.rows.shape[1]
        features = np.empty((0, width), np.uint16)
        if parts and self._ring is not None and self._window is not None:
            features = self._ring.rows[self._window.ring_rows(parts)]
        limits = tuple((one.slot, one.max_tokens, one.max_depth) for one in wanted)
        rows = len(features) + sum(len(update.tokens) for update in updates)

        def check(response: Proposed) -> None:
            check_proposals(response, wanted, self._vocab)

        draws = tuple(one.draw for one in wanted)
        return self._ask(Propose(tuple(updates), features, limits, draws), rows, Proposed, check)

    def _update(self, slot: int, text: Int32, positions: Int32) -> TextUpdate:
        fresh = slot not in self._sent
        sent = self._sent.setdefault(slot, _Sent())
        at, sent.tokens = sent.tokens, len(text)
        begin = int(positions[0]) if len(positions) else 0
        if len(positions):
            sent.features = begin + len(positions)
        return TextUpdate(slot, fresh, at, text[at:], begin, len(positions))

    def _ask(
        self, message: msgspec.Struct, rows: int, kind: type[_Answer], check: Callable[[_Answer], None]
    ) -> Callable[[], _Answer]:
        """Send a request. The result waits for the response, which has to pass the check.

        Both raise DrafterUnavailableError if there is no daemon; the result raises the error that the daemon reports.
        """
        try:
            channel = self._daemon.ready_channel()
        except ShardLostError as error:
            raise DrafterUnavailableError(str(error)) from None
        self._requests += 1
        timeout = self._daemon.timeouts.request

        @contextlib.contextmanager
        def talking() -> Iterator[None]:
            try:
                yield
            except ChannelError as error:
                raise DrafterUnavailableError(str(self._daemon.lost(channel, error))) from None

        def wait() -> _Answer:
            with talking():
                number, response = channel.receive(timeout=timeout + _PER_ROW * rows, limit=SMALL_FRAME)
                if number != self._requests:
                    raise ProtocolError(f"it responded to request {number} instead of {self._requests}")
                if isinstance(response, kind):
                    check(response)
                    return response
                if not isinstance(response, Failed):
                    raise ProtocolError(f"it sent {type(response).__name__} instead of {kind.__name__}")
            raise error_of(response, self._daemon.name)

        with talking():
            channel.send(self._requests, message, timeout=timeout)
        return wait


def check_proposals(response: Proposed, wanted: Sequence[Draftable], vocab: int) -> None:
    """Raises ProtocolError unless the response has valid proposals for the texts that are wanted."""
    if not len(response.tokens) == len(response.probabilities) == len(response.parents) == len(wanted):
        raise ProtocolError(f"it sent {len(response.tokens)} proposals for {len(wanted)} texts")
    proposals = zip(wanted, response.tokens, response.probabilities, response.parents, strict=True)
    for one, tokens, probabilities, parents in proposals:
        # The engine checks whether the parents form a tree.
        if parents.shape not in ((tokens.shape, (0,)) if one.max_depth else ((0,),)):
            raise ProtocolError(f"it proposed {tokens.shape} tokens with {parents.shape} parents")
        if tokens.ndim != 1 or len(tokens) > one.max_tokens or probabilities.shape not in (tokens.shape, (0,)):
            shapes = f"{tokens.shape} tokens with {probabilities.shape} probabilities"
            raise ProtocolError(f"it proposed {shapes}, at most {one.max_tokens} are wanted")
        if not _inside(tokens, vocab - 1) or not _inside(probabilities, 1):
            raise ProtocolError("it proposed an id outside the vocabulary, or a probability outside 0..1")


def _inside(values: NDArray[np.int32] | NDArray[np.float64], most: float) -> bool:
    """Whether all values are numbers in 0..most."""
    return bool(((values >= 0) & (values <= most)).all())
