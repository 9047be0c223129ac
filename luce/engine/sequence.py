"""Sequence: one prompt and its reply, with the state that each part of the engine writes.

Each state has one writer: the scheduler, the speculator, the paging of long sequences, the prefix cache. Everybody may
read them.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from luce.engine.reasoning_limit import ReasoningLimit
from luce.kvcache.prefix_ids import PrefixIds, prefix_ids
from luce.ops.matmul import FEW_ROWS
from luce.runtime.draws import Draw
from luce.runtime.step import STRETCHED, Int32


@dataclass
class ScheduleState:
    """How far a sequence is. Written by the scheduler."""

    #: the sequence's place in every shard; None while it waits
    slot: int | None = None
    #: positions whose keys, values and recurrent states are computed
    computed: int = 0
    #: the last of these positions that are rows of a speculative span whose inputs the recurrent states lack
    accepted: int = 0
    #: the rows of that span that were accepted, if they are not its first ones
    path: tuple[int, ...] = ()
    #: first tokens of the reply that are read as the prompt is, because the sequence is read again
    reread: int = 0
    #: most positions that were computed before the sequence was read again
    computed_before: int = 0
    #: first positions that are read in chunks, as a prompt is, where the reply begins before them
    chunked: int = 0
    #: number of the sequence in order of arrival
    number: int = -1
    #: sequences that came later and got a slot before it
    overtaken: int = 0
    #: number of the last turn in which a step took rows of the prompt
    last_turn: int = -1
    #: number of the first turn since then in which the step had no rows to spare for the prompt
    skipped_turn: float = inf

    def accept_applied(self) -> None:
        """Note that the backend has taken the recurrent states through the accepted rows."""
        self.accepted, self.path = 0, ()


@dataclass(frozen=True)
class Draft:
    """Tokens that may follow the reply's last token; the next step verifies them."""

    tokens: tuple[int, ...] = ()
    #: of a draft tree the row of each token's parent, where row 0 is the reply's last token and rows are in depth-first
    #: order; empty if each token follows the one before it
    parents: tuple[int, ...] = ()
    #: how many of the first tokens are forced
    forced: int = 0
    #: whether these end the reasoning; otherwise the grammar of the reply forces them
    ends_reasoning: bool = False


class DraftState(Enum):
    """Whether the drafter is asked for a sequence, or why not."""

    #: its prompt is read, or no step with rows for drafts has come yet
    PROMPT = "prompt"
    #: it is asked
    DRAFTING = "drafting"
    #: drafting costs a step more than it gains this sequence: it is tried again after some steps
    RESTING = "resting"
    #: steps of as many sequences have no rows for drafts
    FULL = "full"
    #: steps without drafts are measured first
    MEASURING = "measuring"
    #: the drafter has failed
    FAILED = "failed"


@dataclass(frozen=True)
class PagingLimits:
    """What the paging of a long sequence demands of its steps. Written by luce.engine.sequence_paging."""

    #: most draft tokens of the next step; None without a limit
    max_draft: int | None = None
    #: no step crosses a multiple of so many positions while the prompt is read; 0 without a limit
    prompt_multiple: int = 0
    #: no step crosses this position; every row before it sees all of its text; 0 without one
    prompt_bound: int = 0
    #: the prompt's last rows, which no step reads together with those before them
    query_rows: int = 0


@dataclass
class CacheState:
    """What the prefix cache does for a sequence. Written by luce.engine.checkpoints."""

    #: how many of the prompt's first tokens the cache may restore and save; None: all of them, and the reply
    max_tokens: int | None = None
    #: lengths, ascending, at which a step ends while the prompt is read, so that a checkpoint can be taken there
    lengths: tuple[int, ...] = ()
    #: whether the cache saves the logits of the prompt's last row
    saves_logits: bool = False
    #: whether prompts often diverge somewhere inside the prompt, so that a checkpoint is taken there
    has_boundary: bool = False


class RowKind(Enum):
    """What a constraint says of the token behind a row."""

    #: any token may come: there is no mask
    OPEN = "open"
    #: the mask is one of a few constant ones: all tokens but those that end the reply, or those of any text
    FREE = "free"
    #: the mask was made for this row
    MADE = "made"
    #: nothing is known: no token is chosen from this row
    LEFT = "left"


class Constraint(Protocol):
    """Which tokens may come next in one reply. One thread uses it at a time.

    Masks are uint32 [words]: bit t % 32 of word t / 32 is set if token t may come. `ends` are the ids that end the
    reply beside those of the model; they may come where the text may end, and nowhere else. Drafts are tokens with
    parents as in luce.draft.drafter.Proposal; no call but `push` changes the state.
    """

    @property
    def open(self) -> bool:
        """Whether any token may come next, so that no mask is asked for."""

    @property
    def over(self) -> bool:
        """Whether nothing but the end may come."""

    def allows(self, token: int) -> bool:
        """Whether a token may come next. Quicker than a mask."""

    def mask(self, ends: frozenset[int]) -> NDArray[np.uint32]:
        """Which tokens may come next: uint32 [words of the model's vocabulary].

        Raises RequestError if the grammar is too large for it.
        """

    def fill(
        self, tokens: Many[int], parents: Many[int], ends: frozenset[int], out: NDArray[np.uint32]
    ) -> list[RowKind]:
        """Write the masks of the next token and of the tokens behind each draft token: uint32 [1 + tokens, words].

        Rows of the kinds OPEN and LEFT are not written. Raises RequestError as `mask`; a draft token whose mask cannot
        be made is LEFT.
        """

    def valid(self, tokens: Many[int], parents: Many[int], ends: frozenset[int]) -> list[bool]:
        """Of each draft token whether it may come behind its parent. Nothing may come behind an end."""

    def forced(self, most: int, ends: frozenset[int]) -> Many[int]:
        """Up to `most` tokens which must come next, as the tokenizer would write them; no end is among them."""

    def push(self, token: int) -> None:
        """Append a token to the reply: one that may come next, none of the reply's own ends.

        Raises BackendError for another token, RequestError if the grammar grows too large.
        """

    def copy(self) -> Constraint:
        """The constraint of another reply, in the same state."""


@dataclass(eq=False)
class Sequence:
    """One prompt and its reply."""

    #: int32 [n], n > 0
    prompt: Int32
    #: most tokens of the reply; 0 if only the prompt is read
    max_new_tokens: int
    #: int32 [n]: the positions of the prompt's tokens in the longer text that it is a part of, ascending: rotary
    #: embeddings take these. None: 0 .. n - 1
    position_ids: Int32 | None = None
    #: most rows that it has without being stretched; None: it never is. Written by luce.engine.stretching
    original_rows: int | None = None
    #: whether its rows are rotated as those of a stretched sequence. Written by luce.engine.stretching
    stretched: bool = False
    #: sessions share slots and chunks of prompts
    session: str = ""
    #: whether choosing a token needs the whole row of logits
    needs_logits: bool = False
    #: whether the device draws its tokens, as `draw` says
    device_draws: bool = False
    #: which tokens the reply may hold; None: all
    constraint: Constraint | None = None
    #: how long its reasoning may be; None: the reply has no part that is reasoning
    reasoning: ReasoningLimit | None = None
    #: the tokens that come next to end its reasoning, whatever the model would choose. Written by luce.engine.reply
    ending: tuple[int, ...] = ()
    #: ids that end the reply
    ends: frozenset[int] = frozenset()
    #: how its tokens are drawn; None: the likeliest ones are taken. Written by luce.engine.reply
    draw: Draw | None = None
    #: steps in which the masks took too long. Written by luce.engine.masks
    slow_masks: int = 0
    #: whether every prompt position needs its whole logits
    scores_prompt: bool = False
    #: the caller's time at which the sequence ends
    deadline: float = inf
    #: the caller's time at which the sequence ends if it still waits for a slot
    queue_deadline: float = inf
    #: the reply's tokens. Written by luce.engine.reply
    reply: list[int] = field(default_factory=list)
    schedule: ScheduleState = field(default_factory=ScheduleState)
    #: written by the speculator
    draft: Draft = Draft()
    #: None without a drafter. Written by the speculator
    draft_state: DraftState | None = None
    paging: PagingLimits = PagingLimits()
    cache: CacheState = field(default_factory=CacheState)

    @property
    def slot(self) -> int | None:
        """The sequence's place in every shard; None while it waits."""
        return self.schedule.slot

    @property
    def computed(self) -> int:
        """Positions whose keys, values and recurrent states are computed."""
        return self.schedule.computed

    @property
    def most_computed(self) -> int:
        """Most positions that have been computed so far, also while they are read again."""
        return max(self.schedule.computed_before, self.schedule.computed)

    @property
    def tokens(self) -> Int32:
        """Prompt and reply: int32 [n]."""
        return np.concatenate([self.prompt, np.array(self.reply, np.int32)])

    @property
    def prefix_ids(self) -> PrefixIds:
        """What the prefix cache knows its tokens by: [n]."""
        tokens = self.tokens
        return prefix_ids(tokens, self.position_ids_at(np.arange(len(tokens), dtype=np.int32)))

    def position_ids_at(self, positions: Int32) -> Int32:
        """What rotary embeddings take for rows at these positions: int32 [n] -> int32 [n]. A reply goes on behind its
        prompt's last token."""
        found = positions
        if self.position_ids is not None:
            inside = np.minimum(positions, np.int32(len(self.position_ids) - 1))
            found = self.position_ids[inside] + (positions - inside)
        return found + np.int32(STRETCHED) if self.stretched else found

    @property
    def rows_before_stretching(self) -> int | None:
        """Rows that may be computed before it has to be stretched; None: as many as there are."""
        return None if self.stretched or self.original_rows is None else self.original_rows - self.computed

    @property
    def prompt_remaining(self) -> int:
        """Prompt rows that are not computed yet."""
        return max(0, len(self.prompt) - self.schedule.computed)

    @property
    def read_end(self) -> int:
        """Positions that are read before a step chooses from the reply's last token: the prompt, and behind a loss the
        reply without its last token."""
        return len(self.prompt) + self.schedule.reread

    @property
    def unread(self) -> int:
        """Rows that are read before that and are not computed yet."""
        return max(0, self.read_end - self.schedule.computed)

    @property
    def rows_to_read(self) -> int:
        """Rows that are read up to the next position at which a step has to end."""
        if not self.prompt_remaining:
            # As few as share the products of replies, so that they have the bits that they had.
            return max(min(FEW_ROWS, self.unread), self.schedule.chunked - self.computed)
        return rows_to_boundary(self.computed, len(self.prompt), self.paging, self.cache.lengths)


def rows_to_boundary(position: int, end: int, paging: PagingLimits, lengths: Many[int] = ()) -> int:
    """Rows from `position` to the next place where a step that reads a prompt of `end` tokens has to end.

    Those places are the checkpoints' `lengths`, ascending, the bounds of `paging`, and the prompt's end.
    """
    rows = end - position
    bounds = [rows, next((length - position for length in lengths if length > position), rows)]
    if rows > paging.query_rows:
        bounds.append(rows - paging.query_rows)
    if paging.prompt_multiple:
        bounds.append(paging.prompt_multiple - position % paging.prompt_multiple)
    if position < paging.prompt_bound:
        bounds.append(paging.prompt_bound - position)
    return min(bounds)
