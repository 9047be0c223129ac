"""What drafts brought servers, in the user's cache folder: a file for each model with its drafter."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from luce.profiles.cached_file import counts, read_cached, write_cached
from luce.profiles.profile_cache import profile_folder

_FORMAT = 1
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


class _Stored(msgspec.Struct):
    format: int
    #: seconds since 1970
    measured: float
    drafts: ObservedDrafts


def drafts_path(facts: Sequence[str | int], folder: Path | None = None) -> Path:
    """The file of a model with its drafter and its settings, which `facts` identify."""
    key = hashlib.sha256(json.dumps(["drafts", *facts]).encode()).hexdigest()
    return (folder or profile_folder()) / f"{key}.json"


def read_drafts(path: Path) -> ObservedDrafts | None:
    """What a file says; None if there is none, if it is too old, or if it cannot be, which the log says."""
    stored = read_cached(path, _Stored)
    if stored is None:
        return None
    flaw = stored.drafts.flaw if stored.format == _FORMAT else f"format is {stored.format}"
    return stored.drafts if counts(path, flaw, stored.measured) else None


def write_drafts(path: Path, drafts: ObservedDrafts) -> None:
    """Keep what was observed in a file. Where that cannot be written, the log says why."""
    write_cached(path, _Stored(_FORMAT, time.time(), drafts))
