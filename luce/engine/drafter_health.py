"""Whether a drafter answers, and why not."""

from __future__ import annotations

import logging

from luce.draft.drafter import DrafterUnavailableError
from luce.errors import LuceError

_log = logging.getLogger(__name__)

# The drafter is disabled after this many failures in a row.
_MAX_FAILURES = 3


class DrafterHealth:
    """The failures of an engine's drafter. Any thread may read it."""

    def __init__(self) -> None:
        self._failures = 0
        #: why the drafter does not answer; empty while it does
        self._error = ""
        #: whether it has answered since it failed
        self._answered = False

    @property
    def disabled(self) -> bool:
        """Whether the drafter has failed too often to be asked again."""
        return self._failures >= _MAX_FAILURES

    def state(self) -> str:
        """ "on", or why sequences are not drafted for."""
        disabled, unavailable = self.disabled, not self._failures
        kind = "disabled" if disabled else "unavailable" if unavailable else "failed"
        return f"{kind}: {self._error}" if self._error else "on"

    def note_answer(self) -> None:
        """The drafter has proposed."""
        self._answered = True

    def note_step(self) -> None:
        """The drafter has taken a step's features: if it has answered as well, it works again."""
        if self._answered:
            self._failures, self._error = 0, ""

    def note_unavailable(self, error: DrafterUnavailableError) -> None:
        """Steps go on without drafts; the next one asks the drafter again."""
        if not self._error:
            _log.warning("replies go on without drafting: %s", error)
        self._error, self._answered = str(error), False

    def note_failure(self, error: Exception) -> None:
        """The sequences that run go on without drafts."""
        self._failures += 1
        self._answered = False
        self._error = str(error) if isinstance(error, LuceError) else f"{type(error).__name__}: {error}"
        consequence = "drafting is disabled" if self.disabled else "replies that run go on without drafting"
        _log.warning("the drafter failed: %s; %s", self._error, consequence, exc_info=not isinstance(error, LuceError))
