"""A drafter whose memory is allocated when it is needed, and freed while no sequence runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from luce.draft.drafter import Draftable, Drafter, PendingProposals
from luce.errors import OutOfMemoryError
from luce.runtime.step import Span

_log = logging.getLogger(__name__)


class OnDemandDrafter:
    """The drafter that `make` returns, made at once and again after each release.

    `keep`: it stays loaded while no sequence runs. `block`: that of the drafter. `facts`: facts that `describe` adds to
    the drafter's own. Without enough memory at first, sequences run without drafts until there is enough.
    """

    def __init__(
        self, make: Callable[[], Drafter], *, keep: bool, block: int, facts: dict[str, str | int] | None = None
    ) -> None:
        self.block = block
        #: the drafter, None while it is not loaded
        self.loaded: Drafter | None = None
        self._make = make
        self._keep = keep
        self._facts = dict(facts or {})
        try:
            self.loaded = make()
        except OutOfMemoryError as error:
            _log.warning("the draft is not loaded: %s", error)
        self.idle()

    def load(self) -> Drafter:
        """The drafter, made now if it is not loaded. Raises OutOfMemoryError."""
        if self.loaded is None:
            self.loaded = self._make()
        return self.loaded

    def observe(self, spans: Sequence[Span]) -> None:
        self.load().observe(spans)

    def propose(self, asked: Sequence[Draftable]) -> PendingProposals:
        return self.load().propose(asked)

    def forget(self, slot: int) -> None:
        if self.loaded is not None:
            self.loaded.forget(slot)

    def idle(self) -> None:
        if not self._keep and self.loaded is not None:
            self.close()
            _log.info("the draft's memory is free until the next request")

    def describe(self) -> dict[str, str | int]:
        made = self.loaded
        return self._facts | ({} if made is None else made.describe()) | {"loaded": "no" if made is None else "yes"}

    def close(self) -> None:
        made, self.loaded = self.loaded, None
        if made is not None:
            made.close()
