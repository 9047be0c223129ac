"""Drafting for predictions: what a drafter computes, and how many tokens its drafts bring, as servers observe it."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from luce.backend.draft_load import DraftingDevice, DraftLoad
from luce.config.settings import Config
from luce.draft.open import DraftPlan, verified_rows
from luce.draft.spec import DrafterSpec
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import GGUFFile
from luce.models.spec import ModelSpec
from luce.profiles.cached_file import in_background
from luce.profiles.draft_cache import DRAFTS, ObservedDrafts

#: steps of sequences after which drafts are counted on, and as many whose means they are
STEPS = 1000


def draft_load(config: Config, file: GGUFFile, spec: ModelSpec, plan: DraftPlan | None) -> DraftLoad | None:
    """The drafting that the settings ask for; None without any. `plan`: of the drafter, None if it has no weights.

    Rows and tokens of a step are those that servers have measured. Until then rows are the most that are verified.
    """
    if not config.draft or (plan is None and config.draft != "ngram"):
        return None
    most = verified_rows(config, spec)
    if plan is not None:
        most = min(most, 1 + (config.ddtree_budget if config.ddtree else plan.spec.block))
    found = DRAFTS.read(observed_path(config, file, None if plan is None else plan.spec))
    rows, tokens = (most, None) if found is None else (max(1, round(found.rows)), found.tokens)
    if plan is None:
        return DraftLoad(rows, tokens)
    work, tensors = plan.spec.work(plan.device, max(1, rows - 1))
    return DraftLoad(rows, tokens, DraftingDevice(plan.device, sum(plan.sizes.values()), work, tensors))


def observed_path(config: Config, file: GGUFFile, spec: DrafterSpec | None) -> Path:
    """The file with what drafts of a model brought by a drafter (None: ngram) with these settings."""
    drafter = ("ngram", "") if spec is None else (spec.kind, spec.digest())
    trees = config.ddtree_budget if config.ddtree else 0
    return DRAFTS.path([fingerprint(file), *drafter, config.verify_width, trees, config.draft_swa])


class DraftObservation:
    """Counts what the drafts of sequences bring. For the engine's thread.

    `store` gets the means of the last 1000 steps after 1000 steps, and each time that their number has doubled since.
    """

    def __init__(self, store: Callable[[ObservedDrafts], None]) -> None:
        self._store = store
        self._seen: deque[tuple[int, int]] = deque(maxlen=STEPS)
        self._steps, self._next = 0, STEPS

    def add(self, drafted: int, accepted: int) -> None:
        """Count a step of a sequence that verified so many draft rows."""
        self._seen.append((1 + drafted, 1 + accepted))
        self._steps += 1
        if self._steps == self._next:
            self._next *= 2
            rows, tokens = (statistics.fmean(column) for column in zip(*self._seen, strict=True))
            self._store(ObservedDrafts(rows, tokens, self._steps))


def keeping(path: Path) -> DraftObservation:
    """An observation that is kept in a file."""
    return DraftObservation(lambda found: in_background(partial(DRAFTS.write, path, found)))
