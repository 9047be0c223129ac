"""What an engine is made of: the objects that work on its thread, and how they are wired."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from luce.backend.backend import Backend
from luce.draft.drafter import Drafter
from luce.draft.feature_tail import FeatureTails
from luce.draft.no_drafter import NoDrafter
from luce.draft.prompt_lookup import Lookup
from luce.engine.admission import Admission
from luce.engine.checkpoints import Checkpoints
from luce.engine.drafted import DraftLimits
from luce.engine.engine_options import EngineOptions
from luce.engine.masks import Masker
from luce.engine.scheduler import Scheduler
from luce.engine.sequence import Draft, Sequence
from luce.engine.sequence_paging import SequencePaging
from luce.engine.speculate import Speculator
from luce.kvcache.disk.tier import DiskTier
from luce.kvcache.page_table import PageTables
from luce.kvcache.paging import KVFlash, Pager
from luce.kvcache.prefix_cache import PrefixCache
from luce.runtime.step import MAX_TREE_ROWS

# Most bytes of logits that prompt scoring takes in one step.
_SCORED_BYTES = 64 << 20


@dataclass(frozen=True)
class EngineParts:
    """The collaborators of an engine's thread."""

    backend: Backend
    admission: Admission
    pages: PageTables
    scheduler: Scheduler
    #: None where every sequence fits into its pages on the devices
    pager: Pager | None
    paging: SequencePaging | None
    cache: PrefixCache | None
    checkpoints: Checkpoints | None
    speculator: Speculator | None
    masker: Masker

    def restart(self, sequence: Sequence) -> None:
        """Let a running sequence be read again from its first token: its state is lost, or means nothing any more."""
        if self.checkpoints is not None:
            self.checkpoints.sequence_ended(sequence)
        if self.speculator is not None:
            self.speculator.forget(sequence)
        # What was reported of the prompt's scores stands.
        sequence.draft, sequence.scores_prompt = Draft(), False
        self.scheduler.restart(sequence)

    @classmethod
    def build(
        cls,
        backend: Backend,
        options: EngineOptions,
        *,
        disk: DiskTier | None,
        kvflash: KVFlash | None,
        drafter: Drafter | None,
        feature_tails: FeatureTails | None,
        on_verified: Callable[[int, int], None] | None = None,
    ) -> EngineParts:
        """The parts of an engine on a backend; parameters as those of Engine."""
        pages = PageTables.over(backend, options.chunk)
        pager = None if kvflash is None else Pager.over(backend, pages, kvflash, options.chunk)
        cache = None
        if options.cache_bytes:
            cache = PrefixCache(backend, pages, options.cache_bytes, disk, options.min_disk_tokens, pager)
        speculator = None
        if drafter is not None or backend.capacity.verify_rows > 1:
            speculator = Speculator(
                drafter or NoDrafter(),
                DraftLimits(
                    vocab=backend.capacity.vocab,
                    step_rows=backend.capacity.invariant_rows,
                    verify_rows=min(backend.capacity.verify_rows, options.chunk),
                    width=options.verify_width,
                    tree_tokens=options.tree_tokens,
                    tree_rows=max(MAX_TREE_ROWS - 1, backend.capacity.branch_pages // 2),
                ),
                feature_tails=feature_tails,
                on_verified=on_verified,
                lookup=Lookup() if options.lookup else None,
            )
        checkpoints = None
        if cache is not None:
            checkpoints = Checkpoints(cache, backend, speculator, options.checkpoint_interval)
        admission = Admission(slots=backend.capacity.slots, max_queue=options.max_queue)
        if disk is not None:
            disk.wake = admission.wake
        scored = max(1, _SCORED_BYTES // (4 * backend.capacity.vocab))
        return cls(
            backend=backend,
            admission=admission,
            pages=pages,
            scheduler=Scheduler(
                pages,
                slots=backend.capacity.slots,
                chunk=options.chunk,
                max_scored_rows=scored,
                shares_prompts=backend.capacity.shares_prompts,
            ),
            pager=pager,
            paging=None if pager is None else SequencePaging(pager),
            cache=cache,
            checkpoints=checkpoints,
            speculator=speculator,
            masker=Masker(backend.capacity.vocab, threads=options.grammar_threads, limit=options.grammar_mask_seconds),
        )
