"""The drafter that settings name."""

from __future__ import annotations

from luce.config import Config
from luce.draft.drafter import Drafter
from luce.draft.ngram import NgramDrafter
from luce.errors import UsageError
from luce.ops.deltanet import RECURRENT_ROWS


def verified_rows(config: Config) -> int:
    """Most rows of a sequence that are verified at once, 0 if nothing is drafted."""
    return (config.verify_width or RECURRENT_ROWS) if config.draft else 0


def open_drafter(config: Config) -> Drafter | None:
    """None if nothing is to be drafted. Raises UsageError."""
    if not config.draft:
        return None
    if config.draft == "ngram":
        return NgramDrafter(block=verified_rows(config) - 1 or 1)
    raise UsageError(f"--draft {config.draft}: expected ngram", param="draft")
