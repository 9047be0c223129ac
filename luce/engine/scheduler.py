"""Which rows run next. Pure: sequences and step results in, steps out; no clock, no I/O, no threads.

Every step holds the next row of each sequence that decodes, with the rows of its draft tokens. Behind these it holds
rows of prompts (luce.engine.prompt_turns).

A free slot goes to the waiting session that has the fewest slots, and among equal ones to the one whose last slot is
the longest ago; a sequence waits first in, first out within its session. The next sequence in turn waits until a slot
and its pages are free, and all others wait behind it, so that a large sequence gets its turn too; the first sequence of
a session is overtaken MAX_OVERTAKEN times at most.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from luce.engine.draft_tree import BranchPages, branches, is_moved, tree_depth, tree_spans, with_branch_pages
from luce.engine.failures import Failures
from luce.engine.prompt_turns import PromptTurns, SessionTurns
from luce.engine.sequence import Draft, Sequence
from luce.kvcache.page_table import PageTables
from luce.runtime.draws import Draw, RowDraws
from luce.runtime.step import Int32, PageView, Span, Step

#: how often sequences that came later may get a slot before the first one of a session
MAX_OVERTAKEN = 8

_NO_DRAFT = Draft()


@dataclass(frozen=True)
class ScheduledSequence:
    """The rows of one sequence in a step.

    Behind the row of the reply's last token come the rows of `draft`. They count as far as Scheduler.accept says.
    """

    sequence: Sequence
    #: position of the first row
    position: int
    rows: int
    #: the sequence's rows of Output.ids and Output.logits
    ids: slice
    logits: slice
    draft: Draft = _NO_DRAFT
    #: of each page group the pages that branches of a draft tree have for themselves, by the branch's first row
    branch_pages: tuple[BranchPages, ...] = ()

    def child(self, row: int, token: int) -> int | None:
        """The row of a draft token that follows a row; None if the draft has no such token."""
        tokens, parents = self.draft.tokens, self.draft.parents
        if not parents:
            return row + 1 if row < len(tokens) and tokens[row] == token else None
        children = (child for child, parent in enumerate(parents, 1) if parent == row)
        return next((child for child in children if tokens[child - 1] == token), None)


@dataclass(frozen=True)
class ScheduledStep:
    """A step and the sequences whose rows it holds."""

    step: Step
    sequences: tuple[ScheduledSequence, ...]
    #: sequences whose rows the step lacks: no pages were free for them, or their bookkeeping failed
    failures: Failures = field(default_factory=Failures)


@dataclass(frozen=True)
class _Share:
    """Rows that a sequence gets in the next step."""

    sequence: Sequence
    rows: int
    draft: Draft = _NO_DRAFT


@dataclass
class _Session:
    """A session that waits or runs."""

    waiting: deque[Sequence] = field(default_factory=deque)
    #: sequences that run
    running: int = 0
    #: number of the last slot that it got
    last_slot: int = -1
    turns: SessionTurns = field(default_factory=SessionTurns)


class Scheduler:
    """Waiting and running sequences.

    `chunk`: most rows of a prompt in a step. `max_scored_rows`: most prompt rows of a step that need whole logits; it
    bounds the memory that prompt scoring takes. `shares_prompts`: Capacity.shares_prompts.
    """

    def __init__(
        self, pages: PageTables, *, slots: int, chunk: int, max_scored_rows: int, shares_prompts: bool = False
    ) -> None:
        self._pages = pages
        #: which prompts a step reads
        self.turns = PromptTurns(chunk=chunk, max_scored_rows=max_scored_rows, shares_prompts=shares_prompts)
        self._free_slots = set(range(slots))
        #: in order of arrival
        self._sessions: dict[str, _Session] = {}
        self._running: dict[Sequence, None] = {}
        #: slots and sequences so far
        self._slots_given = self._added = 0
        # The step behind the newest one, without tokens and pages.
        self._next: ScheduledStep | None = None
        # Never later than the first deadline of any sequence, so that most checks of the time are one comparison.
        self._next_deadline = inf

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that have a slot, in order of admission."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences that wait for a slot, session by session."""
        return tuple(sequence for session in self._sessions.values() for sequence in session.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Its prompt and max_new_tokens together fit into `PageTables.longest`."""
        self._sessions.setdefault(sequence.session, _Session()).waiting.append(sequence)
        sequence.schedule.number = self._added
        self._added += 1
        self._next_deadline = min(self._next_deadline, sequence.deadline, sequence.queue_deadline)

    def remove(self, sequence: Sequence) -> None:
        """End a sequence, for any reason, between two steps: its slot and pages are free at once."""
        # It may have failed before it was queued.
        session = self._sessions.get(sequence.session, _Session())
        if sequence.slot is None:
            with contextlib.suppress(ValueError):
                session.waiting.remove(sequence)
        else:
            self._next = None
            del self._running[sequence]
            self._pages.release(sequence.slot)
            self._free_slots.add(sequence.slot)
            session.running -= 1
        if not session.waiting and not session.running:
            self._sessions.pop(sequence.session, None)

    def expired(self, now: float) -> tuple[list[Sequence], list[Sequence]]:
        """Sequences past their deadline, and waiting sequences that are past their queue deadline only."""
        if now < self._next_deadline:
            return [], []
        everyone = [*self._running, *self.waiting]
        expired = [s for s in everyone if s.deadline <= now]
        overdue = [s for s in everyone if s.slot is None and s.queue_deadline <= now < s.deadline]
        self._next_deadline = min(
            (min(s.deadline, inf if s.slot is not None else s.queue_deadline) for s in everyone), default=inf
        )
        return expired, overdue

    def admit(self) -> Iterator[Sequence]:
        """Give slots to waiting sequences, in turn, and yield these sequences."""
        while self._free_slots and (session := self._next_session()) is not None:
            sequence, slot = session.waiting[0], min(self._free_slots)
            if not self._pages.reserve(slot, len(sequence.prompt) + sequence.max_new_tokens):
                return
            session.waiting.popleft()
            session.running += 1
            session.last_slot = self._slots_given
            self._slots_given += 1
            for other in self._sessions.values():
                if other.waiting and other.waiting[0].schedule.number < sequence.schedule.number:
                    other.waiting[0].schedule.overtaken += 1
            self._free_slots.remove(slot)
            sequence.schedule.slot = slot
            self._running[sequence] = None
            yield sequence

    def _next_session(self) -> _Session | None:
        """The session whose first sequence is the next to get a slot."""
        found: tuple[tuple[int, int, int], _Session] | None = None
        for session in self._sessions.values():
            if not session.waiting:
                continue
            first = session.waiting[0].schedule
            overdue = first.overtaken >= MAX_OVERTAKEN
            # Those that were overtaken too often go by their arrival.
            key = (0, first.number, 0) if overdue else (1, session.running, session.last_slot)
            if found is None or key < found[0]:
                found = key, session
        return None if found is None else found[1]

    def resume(self, sequence: Sequence, length: int) -> None:
        """Note that the first `length` positions of an admitted sequence were restored from the prefix cache."""
        sequence.schedule.computed = length

    def restart(self, sequence: Sequence) -> None:
        """Let a running sequence be read again from its first token."""
        state = sequence.schedule
        assert state.slot is not None
        # Its positions may be stretched from here on, though as many are computed.
        self._next = None
        state.accept_applied()
        state.computed_before = max(state.computed_before, state.computed)
        state.computed, state.reread = 0, max(0, len(sequence.reply) - 1)
        self._pages.clear(state.slot)

    def schedule(self) -> ScheduledStep | None:
        """The next step, None if nothing runs. If the step runs, `advance` is called before the next `schedule`.

        A sequence whose prompt is read needs a token of its reply that is not computed yet.
        """
        if not self._running:
            return None
        if (prepared := self._prepared()) is not None:
            return prepared
        chains_only = self._lacks_branch_pages()
        shares, prompts = [], []
        for sequence in self._running:
            if sequence.unread:
                prompts.append(sequence)
            else:
                draft = _first_chain(sequence.draft) if chains_only else sequence.draft
                shares.append(_Share(sequence, 1 + len(draft.tokens), draft))
        failures = Failures()
        if prompts:
            sessions = {name: session.turns for name, session in self._sessions.items()}
            waiting = {name for name, session in self._sessions.items() if session.waiting}
            shares += [_Share(*one) for one in self.turns.choose(prompts, sessions, waiting, failures)]
        return self._build(shares, failures)

    def prepare(self, scheduled: ScheduledStep) -> None:
        """Prepare the step behind this one while the devices work, in which the same sequences have their next rows."""
        step, self._next = scheduled.step, None
        if step.rows != len(self._running) or any(one.position < one.sequence.read_end for one in scheduled.sequences):
            return
        found = [
            ScheduledSequence(one.sequence, one.position + 1, 1, one.ids, one.logits) for one in scheduled.sequences
        ]
        following = replace(
            step,
            positions=step.positions + np.int32(1),
            spans=tuple(Span(span.slot, span.start, 1, span.position + 1) for span in step.spans),
            views=(),
            position_ids=None if step.position_ids is None else step.position_ids + np.int32(1),
            masks_deferred=False,
        )
        self._next = ScheduledStep(following, tuple(found))

    def _prepared(self) -> ScheduledStep | None:
        """The step that was prepared; None if others have begun to run, or its sequences do not go on as expected."""
        scheduled, self._next = self._next, None
        if scheduled is None or len(scheduled.sequences) != len(self._running):
            return None
        failures, slots, tokens = Failures(), [], []
        for one in scheduled.sequences:
            sequence, state = one.sequence, one.sequence.schedule
            if one.position != state.computed or sequence.draft.tokens:
                return None
            with failures.of(sequence):
                assert state.slot is not None
                self._pages.extend(state.slot, state.computed, 1)
                slots.append(state.slot)
                tokens.append(sequence.reply[-1])
        if failures:
            # They are found again, and the step is made without them.
            return None
        own: Int32 = np.array(slots, np.int32)
        views = self._pages.views(own, own, scheduled.step.positions)
        return replace(scheduled, step=replace(scheduled.step, tokens=np.array(tokens, np.int32), views=views))

    def follow(self, now: float, *, verifies: bool) -> ScheduledStep | None:
        """The step that was prepared, before the tokens of the newest one are known: its own tokens and masks mean
        nothing. None if it cannot run so, or if a sequence may end meanwhile for another reason than its next token.
        `verifies`: whether tokens that grammars force are verified at once.

        If it is queued, `advance` is called for both steps before what the newest one gave is committed.
        """
        scheduled = self._next
        if scheduled is None or now >= self._next_deadline:
            return None
        try:
            if not all(_goes_on(one, verifies=verifies) for one in scheduled.sequences):
                return None
            slots: Int32 = np.array([span.slot for span in scheduled.step.spans], np.int32)
            for slot, one in zip(slots.tolist(), scheduled.sequences, strict=True):
                self._pages.extend(slot, one.position, 1)
        except Exception:
            # The sequence fails again between the steps, and no other one with it.
            return None
        views = self._pages.views(slots, slots, scheduled.step.positions)
        masks_deferred = any(one.sequence.constraint is not None for one in scheduled.sequences)
        return replace(scheduled, step=replace(scheduled.step, views=views, masks_deferred=masks_deferred))

    def with_drafts(self, scheduled: ScheduledStep) -> ScheduledStep | None:
        """The newest step with the tokens that its sequences' drafts have by now.

        None if a draft has more or fewer tokens than when the step was scheduled, or is a tree.
        """
        sequences, row = [], 0
        for one in scheduled.sequences:
            draft = one.sequence.draft
            if len(draft.tokens) != len(one.draft.tokens) or draft.parents:
                return None
            scheduled.step.tokens[row + 1 : row + 1 + len(draft.tokens)] = draft.tokens
            sequences.append(replace(one, draft=draft))
            row += one.rows
        return replace(scheduled, sequences=tuple(sequences))

    def advance(self, scheduled: ScheduledStep) -> None:
        """Note that a step ran: its rows are computed. Rows of drafts count when they are accepted."""
        for one in scheduled.sequences:
            state = one.sequence.schedule
            state.accept_applied()
            state.computed += 0 if one.draft.tokens else one.rows

    def accept(self, scheduled: ScheduledSequence, path: Many[int]) -> None:
        """Accept these rows of a sequence with a draft: the first row, and then each a child of the one before it."""
        sequence = scheduled.sequence
        state = sequence.schedule
        state.computed += len(path)
        state.accepted = len(path)
        state.path = tuple(path) if is_moved(path) else ()
        pages = scheduled.branch_pages
        branch = max((row for row in pages[0] if row <= path[-1]), default=0) if pages else 0
        if branch:
            assert sequence.slot is not None
            for group, own in zip(self._pages.groups, pages, strict=True):
                for entry, page in own[branch].items():
                    group.exchange(sequence.slot, entry, page)

    def _lacks_branch_pages(self) -> bool:
        """Whether the branches of the draft trees need more pages of their own than there are."""
        if not any(s.draft.parents for s in self._running):
            return False
        # A branch begins and ends in two pages at most.
        return 2 * sum(len(s.draft.tokens) for s in self._running) > self._pages.refill()

    def _build(self, shares: list[_Share], failures: Failures) -> ScheduledStep:
        tokens: list[int] = []
        spans: list[Span] = []
        scheduled: list[ScheduledSequence] = []
        output_rows: list[int] = []
        needs_logits: list[bool] = []
        draws: list[Draw | None] = []
        logits = 0
        for share in shares:
            sequence, rows, draft, state = share.sequence, share.rows, share.draft, share.sequence.schedule
            with failures.of(sequence):
                # The step gets nothing of a sequence that fails here.
                assert state.slot is not None
                depth = tree_depth(draft.parents) if draft.parents else rows
                self._pages.extend(state.slot, state.computed, depth)
                span = Span(
                    state.slot, len(tokens), rows, state.computed, state.accepted, bool(draft.tokens), state.path
                )
                own_spans = tree_spans(draft.parents, span) if draft.parents else [span]
                unread = sequence.unread
                own_tokens, (count, whole) = _tokens(share, unread), _outputs(share, unread)
                tokens += own_tokens
                spans += own_spans
                ids = slice(len(output_rows), len(output_rows) + count)
                output_rows += range(len(tokens) - count, len(tokens))
                needs_logits += [whole] * count
                # The host draws from whole logits.
                draws += [sequence.draw if sequence.device_draws and not whole else None] * count
                values = slice(logits, logits + count * whole)
                scheduled.append(ScheduledSequence(sequence, state.computed, rows, ids, values, draft))
                logits = values.stop
        step = Step.of_spans(spans, tokens, self._pages.views, output_rows, needs_logits=needs_logits)
        if any(draw is not None for draw in draws):
            step = replace(step, draws=RowDraws.of(draws))
        if (position_ids := _position_ids(step, scheduled)) is not None:
            step = replace(step, position_ids=position_ids)
        if len(spans) > len(scheduled):
            views, scheduled = self._separate_branches(step, scheduled)
            step = replace(step, views=views)
        return ScheduledStep(step, tuple(scheduled), failures)

    def _separate_branches(
        self, step: Step, scheduled: list[ScheduledSequence]
    ) -> tuple[tuple[PageView, ...], list[ScheduledSequence]]:
        """The views and sequences of a step in which branches of draft trees have pages of their own."""
        groups = zip(step.views, self._pages.groups, strict=True)
        made = [with_branch_pages(view, group, step.spans) for view, group in groups]
        found, start = [], 0
        for one in scheduled:
            rows = range(start, start + one.rows)
            pages = tuple({row - start: own for row, own in group.items() if row in rows} for _, group in made)
            found.append(replace(one, branch_pages=pages if pages[0] else ()) if one.draft.parents else one)
            start += one.rows
        return tuple(view for view, _ in made), found


def _goes_on(one: ScheduledSequence, *, verifies: bool) -> bool:
    """Whether a sequence has the row of a step behind the newest one, whose token the device chooses by itself."""
    sequence, constraint = one.sequence, one.sequence.constraint
    # Of two forced tokens the newest step chooses the first; the next step may verify the second.
    if verifies and constraint is not None and len(constraint.forced(2, sequence.ends)) == 2:
        return False
    original = None if sequence.stretched else sequence.original_rows
    inside = original is None or one.position < original
    # No logits on the host, nothing that ends its reasoning, and room for a token behind the next one.
    free = not sequence.needs_logits and not sequence.ending
    return inside and free and len(sequence.reply) + 1 < sequence.max_new_tokens


def _first_chain(draft: Draft) -> Draft:
    """A tree's first branch; a draft that is no tree as it is."""
    # Forced tokens come before the first fork.
    return (
        replace(draft, tokens=draft.tokens[: branches(draft.parents)[0].last], parents=()) if draft.parents else draft
    )


def _position_ids(step: Step, scheduled: Many[ScheduledSequence]) -> Int32 | None:
    """Step.position_ids: None where they are the positions."""
    if not any(one.sequence.stretched or one.sequence.position_ids is not None for one in scheduled):
        return None
    ids, row = step.positions.copy(), 0
    for one in scheduled:
        own = slice(row, row + one.rows)
        ids[own] = one.sequence.position_ids_at(ids[own])
        row += one.rows
    return ids


def _tokens(share: _Share, unread: int) -> list[int]:
    """The tokens of a share's rows. `unread`: of its sequence."""
    sequence, position = share.sequence, share.sequence.computed
    if not unread:
        return [sequence.reply[-1], *share.draft.tokens]
    read = sequence.prompt if sequence.prompt_remaining else sequence.tokens
    tokens: list[int] = read[position : position + share.rows].tolist()
    return tokens


def _outputs(share: _Share, unread: int) -> tuple[int, bool]:
    """How many of a share's last rows are output rows, and whether they need whole logits. `unread`: of its
    sequence."""
    sequence, prompt = share.sequence, share.sequence.prompt_remaining
    if unread and not prompt:
        return 0, False
    if sequence.scores_prompt and prompt:
        return share.rows, True
    if share.draft.tokens:
        return share.rows, sequence.needs_logits
    outputs = int(sequence.max_new_tokens > 0 and share.rows >= prompt)
    return outputs, sequence.needs_logits or (sequence.cache.saves_logits and prompt > 0)
