"""What drafts brought servers, in the user's cache folder: a file for each model with its drafter and its settings."""

from __future__ import annotations

from dataclasses import dataclass

from luce.profiles.figure_files import FigureFiles

# No step of a sequence has more rows.
_MOST_ROWS = 4096


@dataclass(frozen=True)
class ObservedDrafts:
    """Means over the newest steps of sequences with drafts."""

    #: that were verified, with the one that needs no draft
    rows: float
    #: that became part of a reply
    tokens: float
    #: all that were counted
    steps: int

    @property
    def flaw(self) -> str:
        """What cannot be; empty if all can."""
        if not 1 <= self.tokens <= self.rows <= _MOST_ROWS:
            return f"{self.tokens} tokens of {self.rows} rows"
        return ""


DRAFTS: FigureFiles[ObservedDrafts] = FigureFiles("drafts", 2, ObservedDrafts)
