"""The backend moves to other devices behind running replies. On the engine's thread.

What the replies have computed is kept on the host meanwhile, by layer, and comes back to the same slots and pages: it
does not matter which device holds a layer. So a reply goes on with the row that would have come next, and nothing is
computed twice. The prefix cache in memory is empty behind it; the one on the disk is not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np

from luce import log
from luce.backend.backend import Backend
from luce.engine.admission import Admission, shutting_down_error
from luce.engine.delivery import Delivery
from luce.engine.parts import EngineParts
from luce.engine.recovery import POLL_INTERVAL, Recovery
from luce.engine.reply import Reply
from luce.engine.sequence import Sequence
from luce.errors import LuceError
from luce.kvcache.disk.reader import by_layers
from luce.kvcache.memory_tier import BATCH
from luce.runtime.host import host_memory
from luce.shard.saved_state import StatePiece

_log = logging.getLogger(__name__)


class Relocation:
    """`on_loss`: what the engine does when the backend has lost the states of all sequences, for this reason."""

    def __init__(
        self,
        backend: Backend,
        parts: EngineParts,
        delivery: Delivery,
        recovery: Recovery,
        on_loss: Callable[[str], None],
    ) -> None:
        self._backend = backend
        self._parts = parts
        self._delivery = delivery
        self._recovery = recovery
        self._on_loss = on_loss
        #: whether no reply may begin, as running ones have time to end
        self.holds = False

    def move(self, admission: Admission, replace: Callable[[], None], drain: float) -> None:
        """As Engine.relocate. On another thread than the engine's."""

        def command() -> bool:
            self.holds = False
            if admission.closing:
                raise shutting_down_error()
            with admission.paused():
                self.run(replace)
            return True

        if drain:
            self._let_end(admission, drain)
        if not admission.call(command, False):
            raise shutting_down_error()

    def _let_end(self, admission: Admission, seconds: float) -> None:
        """Wait until no reply runs that can end, for so many seconds at most; none begins until the move is over."""

        def running() -> bool:
            self.holds = True
            # What waits for a shard that was lost may need the move.
            return bool(self._parts.scheduler.running) and not self._recovery.waiting

        end = time.monotonic() + seconds
        while admission.call(running, False) and time.monotonic() < end:
            time.sleep(POLL_INTERVAL)

    def run(self, replace: Callable[[], None]) -> None:
        """Let `replace` load the backend on other devices.

        Raises what `replace` raises; then the states of all sequences are lost.
        """
        self._delivery.flush()
        aside = self._put_aside()
        if self._parts.cache is not None:
            self._parts.cache.memory.clear()
        try:
            replace()
        except Exception as error:
            self._on_loss(str(error))
            raise
        self._parts.scheduler.turns.shares_prompts = self._backend.capacity.shares_prompts
        if self._parts.speculator is not None:
            self._parts.speculator.limit_rows(self._backend.capacity.invariant_rows)
        self._bring_back(aside)

    def _put_aside(self) -> list[tuple[Reply, list[StatePiece]]]:
        """What the running replies have computed, in host memory. Those for which there is none are read again."""
        aside = []
        budget = host_memory().free // 2
        for reply in self._delivery.of(s for s in self._parts.scheduler.running if s.computed):
            try:
                pieces = self._save(reply.sequence, budget)
            except LuceError as error:
                if loss := self._backend.lost():
                    self._on_loss(loss)
                    return []
                self._recovery.lose_one(reply, f"its state could not be put aside: {error}")
                continue
            budget -= sum(tensor.nbytes for piece in pieces for tensor in piece.tensors.values())
            aside.append((reply, pieces))
        return aside

    def _save(self, sequence: Sequence, budget: int) -> list[StatePiece]:
        """The pages and the recurrent states of a sequence. Raises LuceError, also if they need more than `budget`
        bytes."""
        slot, state, capacity = sequence.slot, sequence.schedule, self._backend.capacity
        assert slot is not None
        if state.accepted and capacity.recurrent:
            self._backend.accept(slot, state.path or range(state.accepted))
            state.accept_applied()
        held = [table.held(slot) for table in self._parts.pages.groups]
        pieces: list[StatePiece] = []
        for first in range(0, max(1, *map(len, held)), BATCH):
            pages = [group[first : first + BATCH] for group in held]
            place = slot if capacity.recurrent and not first else None
            saved = self._backend.state.save(place, pages)
            budget -= saved.nbytes
            if budget < 0:
                raise LuceError("the host has no memory for it")
            # Copies: the memory in which devices save may end with them.
            tensors = {name: np.array(values) for part in saved.windows() for name, values in part.items()}
            pieces += [StatePiece(place, pages, layers, own) for layers, own in by_layers(tensors, capacity.layers)]
        return pieces

    def _bring_back(self, aside: list[tuple[Reply, list[StatePiece]]]) -> None:
        """Copy what was put aside to the devices."""
        for reply, pieces in aside:
            try:
                self._backend.state.load(pieces)
            except LuceError as error:
                if loss := self._backend.lost():
                    self._on_loss(loss)
                    return
                self._recovery.lose_one(reply, f"its state could not be brought back: {error}")
        if aside:
            log.event(_log, "replies go on", count=len(aside), reason="the model has moved")
