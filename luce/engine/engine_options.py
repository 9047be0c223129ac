"""EngineOptions: the settings of an engine; EngineStats and SlotStats: its numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from luce.config.settings import Config
from luce.engine.drafted import DraftStats, SequenceDrafts
from luce.engine.events import Timings
from luce.engine.masks import MaskStats
from luce.kvcache.paging import PagingStats
from luce.kvcache.prefix_cache import CacheStats


@dataclass(frozen=True)
class EngineOptions:
    """Settings of an engine."""

    #: ids that end a reply
    eos: frozenset[int]
    #: most sequences that wait beyond those that have a slot
    max_queue: int
    #: most rows of a prompt in a step
    chunk: int
    #: positions for which the model was trained, where prompts have position ids
    positions: int = 0
    #: most positions of a sequence that is not stretched (luce.engine.stretching); None: no sequence is
    original_context: int | None = None
    #: longest wait of a sequence; 0 without a limit
    max_queue_seconds: float = 0
    #: longest life of a sequence, in seconds; 0 without a limit
    timeout: float = 0
    #: host memory of the prefix cache; 0 for no cache
    cache_bytes: int = 0
    #: tokens between checkpoints of a long prompt, where the model needs checkpoints
    checkpoint_interval: int = 8192
    #: fewest tokens of a checkpoint that is written to the disk tier
    min_disk_tokens: int = 512
    #: most seconds that closing the engine waits for the disk tier
    flush_seconds: float = 30
    #: rows of a sequence that are verified at once; 0 for as many as pay
    verify_width: int = 0
    #: most tokens of the draft trees that the drafter is asked for; None: it is asked for chains
    tree_tokens: int | None = None
    #: whether texts that repeat are verified beside the drafter's proposals
    lookup: bool = False
    #: threads that make masks of constrained replies; 0 for as many as the machine's cores allow
    grammar_threads: int = 0
    #: seconds that the mask of a row may take
    grammar_mask_seconds: float = 0.05
    #: seconds that replies wait for a lost shard, to go on then; 0: they fail
    resume_seconds: float = 0
    #: why there is no drafter although one is wanted; empty otherwise
    no_drafter_reason: str = ""

    @classmethod
    def of(
        cls,
        config: Config,
        *,
        eos: frozenset[int],
        chunk: int,
        positions: int,
        original_context: int | None = None,
        no_drafter_reason: str = "",
    ) -> EngineOptions:
        """The options that a Config asks for."""
        return cls(
            eos=eos,
            max_queue=config.max_queue,
            chunk=chunk,
            positions=positions,
            original_context=original_context,
            max_queue_seconds=config.max_queue_seconds,
            timeout=config.timeout,
            cache_bytes=config.cache_ram << 20,
            checkpoint_interval=config.cache_interval,
            min_disk_tokens=config.kv_cache_min_tokens,
            flush_seconds=config.kv_cache_flush_timeout,
            verify_width=config.verify_width,
            tree_tokens=config.ddtree_budget if config.ddtree else None,
            # The drafter of `ngram` looks up nothing else.
            lookup=config.draft not in ("", "ngram"),
            grammar_threads=config.grammar_threads,
            grammar_mask_seconds=config.grammar_mask_ms / 1000,
            resume_seconds=config.cluster_resume if config.cluster else 0,
            no_drafter_reason=no_drafter_reason,
        )


@dataclass(frozen=True)
class EngineStats:
    """Numbers at one moment. Pages are of all page groups together; counters are since the start."""

    waiting: int
    running: int
    slots: int
    pages_used: int
    pages_total: int
    prompt_tokens: int
    predicted_tokens: int
    cancelled: int
    steps: int
    #: seconds since the last step ended, or since there is work again; 0 while no sequence is unfinished. It goes on
    #: growing if a defect ended the engine's thread
    stalled: float
    cache: CacheStats
    draft: DraftStats | None = None
    paging: PagingStats | None = None
    #: how often replies went on behind the loss of a shard
    resumed: int = 0
    #: the masks of constrained replies
    masks: MaskStats | None = None
    #: draft rows that grammars forced, and how many of them were accepted
    forced: tuple[int, int] = (0, 0)
    #: seconds and tokens of the sequences that finished, together
    finished: Timings = field(default_factory=Timings)


@dataclass(frozen=True)
class SlotStats:
    """What one slot does at one moment."""

    slot: int
    #: number of its sequence in order of arrival
    number: int
    prompt_tokens: int
    #: prompt tokens that are computed, or restored from the prefix cache
    prompt_done: int
    #: tokens of the reply so far, and how many more it may have
    predicted_tokens: int
    remaining_tokens: int
    #: None without a drafter
    drafts: SequenceDrafts | None = None
