"""Queues a step before the tokens of the step ahead of it are known, so that the devices do not wait for the host.

The tokens of such a step are those that the devices choose; the host need not see them before (Backend.follow). That
works where nothing but these tokens is missing: each sequence has one row, a device takes its likeliest token or draws
one, nothing is drafted, and nobody asks for anything between the two steps. Masks of the step depend on these tokens:
threads make them when the tokens are known, while the devices work on the step's layers, and the engine queues the
step's output with them.

A reply that ends with its newest token has then one row more than it needs, which holds that token: its sequence has as
many computed rows as tokens. No other row is lost, and no other sequence sees it.
"""

from __future__ import annotations

from dataclasses import replace

from luce.backend.backend import Backend
from luce.engine.delivery import Delivery
from luce.engine.masks import StepMasks
from luce.engine.parts import EngineParts
from luce.engine.recovery import Recovery
from luce.engine.relocation import Relocation
from luce.engine.scheduler import ScheduledStep


class Overlap:
    """The step that is queued behind the newest one, if there is one. On the engine's thread."""

    def __init__(
        self, backend: Backend, parts: EngineParts, delivery: Delivery, relocation: Relocation, recovery: Recovery
    ) -> None:
        self._backend = backend
        self._parts = parts
        self._delivery = delivery
        self._relocation = relocation
        self._recovery = recovery
        self._queued: ScheduledStep | None = None

    def queue(self, now: float, masks: StepMasks | None) -> None:
        """Queue the next step, while the output of the newest one is not there, if it can run so. `masks`: those of the
        newest one. Raises as Backend.follow."""
        parts = self._parts
        if not self._backend.asynchronous or parts.paging is not None:
            return
        # Other threads may still make masks of the newest step, and use its constraints.
        if masks is not None and not masks.made:
            return
        # These wait for the end of a step.
        if parts.admission.commands or parts.admission.closing or self._relocation.holds or self._recovery.waiting:
            return
        if parts.speculator is not None and not parts.speculator.drafts_nothing:
            return
        scheduled = parts.scheduler.follow(now, verifies=parts.speculator is not None)
        if scheduled is not None and self._backend.follow(scheduled.step):
            self._queued = scheduled
            if parts.speculator is not None:
                parts.speculator.observe(scheduled)

    def advance(self) -> None:
        """The newest step ran: note the rows of the one behind it, which the devices compute in any case."""
        if self._queued is not None:
            self._parts.scheduler.advance(self._queued)

    def take(self) -> ScheduledStep | None:
        """The step that is queued, with the sequences that have not ended since."""
        scheduled, self._queued = self._queued, None
        if scheduled is None:
            return None
        return replace(scheduled, sequences=tuple(one for one in scheduled.sequences if one.sequence in self._delivery))

    def drop(self) -> None:
        """The newest step failed, and the one behind it with it."""
        self._queued = None
