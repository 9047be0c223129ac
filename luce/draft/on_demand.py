"""A drafter whose memory comes and goes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from luce.draft.drafter import Draftable, Drafter, PendingProposals
from luce.errors import OutOfMemoryError
from luce.runtime.step import Span

_log = logging.getLogger(__name__)


class OnDemandDrafter:
    """The drafter that `make` makes, now and whenever it is wanted after it was released.

    keep   whether it stays while no sequence runs
    block  of the drafter
    facts  what `describe` tells beside what the drafter does

    Where memory for it is missing at first, sequences run without it until there is some.
    """

    def __init__(
        self, make: Callable[[], Drafter], *, keep: bool, block: int, facts: dict[str, str | int] | None = None
    ) -> None:
        self.block = block
        self._make = make
        self._keep = keep
        self._facts = dict(facts or {})
        self._made: Drafter | None = None
        try:
            self._made = make()
        except OutOfMemoryError as error:
            _log.warning("the draft is not loaded: %s", error)
        self.idle()

    def load(self) -> None:
        """Let it be there. Raises OutOfMemoryError."""
        self._wanted()

    def observe(self, spans: Sequence[Span]) -> None:
        self._wanted().observe(spans)

    def propose(self, asked: Sequence[Draftable]) -> PendingProposals:
        return self._wanted().propose(asked)

    def forget(self, slot: int) -> None:
        if self._made is not None:
            self._made.forget(slot)

    def idle(self) -> None:
        if not self._keep and self._made is not None:
            self.close()
            _log.info("the draft's memory is free until a request comes")

    def describe(self) -> dict[str, str | int]:
        made = self._made
        return self._facts | ({} if made is None else made.describe()) | {"loaded": "no" if made is None else "yes"}

    def close(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            made.close()

    def _wanted(self) -> Drafter:
        if self._made is None:
            self._made = self._make()
        return self._made
