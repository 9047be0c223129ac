"""Which rows run next. Pure: sequences and step results in, steps out; no clock, no I/O, no threads.

Every step holds the next row of all sequences that decode, with the rows of what was proposed to follow it, and behind
these up to `chunk` rows of one prompt, and FEW_ROWS rows of others that have no more left. Each prompt is read in the
pieces that it would be read in alone, as products of other numbers of rows round otherwise, and they take turns: a long
one slows the others down, but neither stops replies nor keeps a short one waiting for its end. Sequences wait first in,
first out within a session, and the sessions take turns. The one whose turn it is waits until a slot and its pages are
free, and all others behind it, so that a large one gets its turn too.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from luce.engine import draft_tree
from luce.engine.draft_tree import Taken, moved
from luce.errors import LuceError
from luce.kvcache.page_table import PageTables
from luce.ops.matmul import FEW_ROWS
from luce.runtime.step import Int32, PageView, Span, Step


@dataclass(eq=False)
class Sequence:
    """One prompt and its reply.

    prompt    int32 [n], n > 0
    room      most tokens of the reply, 0 if only the prompt is to be read
    session   waits in turn with other sessions
    full      whether choosing a token needs whole logits
    top       whether it needs the best candidates
    scored    whether whole logits are wanted at every prompt position
    kept      whether whole logits are wanted behind the prompt, to be kept for later
    shared    how many of the first tokens the prefix cache may find and keep, None for all
    cuts      positions, ascending, that a step ends at while the prompt is read
    proposal  tokens that may follow the reply's last one, to be verified in the next step
    parents   of a proposal that is a tree: the row of each token's parent, row 0 being that of the reply's last token,
              so that rows come in depth-first order; empty if each token follows the one before it
    ahead     most of them, None if there is no limit
    block     no step crosses a multiple of so many rows while the prompt is read, 0 if any may
    question  the prompt's last rows that no step reads together with those before them
    deadline, queue_deadline  in the caller's time: when it is `expired`, and `overdue` if it still waits then

    What the scheduler keeps: `done` positions are in the cache, of which the last `accepted` are rows of a speculative
    span that recurrent states have not been taken through, the rows `path` of it if these are not its first ones;
    `slot` is None while it waits; `served` is the number of the last turn in which its prompt got on, and `due` of the
    first one since then for which there was no room.
    """

    prompt: Int32
    room: int
    session: str = ""
    full: bool = False
    top: bool = False
    scored: bool = False
    kept: bool = False
    shared: int | None = None
    cuts: tuple[int, ...] = ()
    deadline: float = inf
    queue_deadline: float = inf
    reply: list[int] = field(default_factory=list)
    proposal: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    ahead: int | None = None
    block: int = 0
    question: int = 0
    done: int = 0
    accepted: int = 0
    path: tuple[int, ...] = ()
    slot: int | None = None
    served: int = -1
    due: float = inf

    @property
    def tokens(self) -> Int32:
        """Prompt and reply: int32 [n]."""
        return np.concatenate([self.prompt, np.array(self.reply, np.int32)])

    @property
    def prompt_left(self) -> int:
        """Prompt rows that are not in the cache yet."""
        return max(0, len(self.prompt) - self.done)

    @property
    def stretch(self) -> int:
        """Of these, the rows up to the next place where a step has to end."""
        left = self.prompt_left
        ends = [left, next((cut - self.done for cut in self.cuts if cut > self.done), left)]
        if left > self.question:
            ends.append(left - self.question)
        if self.block:
            ends.append(self.block - self.done % self.block)
        return min(ends)


@dataclass(frozen=True)
class StepShare:
    """A sequence's share of a step: rows from `position` on; `ids`, `logits` and `top` are its rows of the Output.

    Behind the row of the reply's last token come those of `proposal`: they count as far as Scheduler.accept says.
    `parents` as in Sequence. `taken`: of each page group, the pages that branches have for themselves, by the branch's
    first row of this part.
    """

    sequence: Sequence
    position: int
    rows: int
    ids: slice
    logits: slice
    top: slice
    proposal: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    taken: tuple[Taken, ...] = ()

    def child(self, row: int, token: int) -> int | None:
        """The row of a token that was proposed behind a row; None if it was not."""
        if not self.parents:
            return row + 1 if row < len(self.proposal) and self.proposal[row] == token else None
        children = (child for child, parent in enumerate(self.parents, 1) if parent == row)
        return next((child for child in children if self.proposal[child - 1] == token), None)


@dataclass(frozen=True)
class Plan:
    """A step, and whose rows it holds; `failed` had to have some, but there were no pages for them."""

    step: Step
    parts: tuple[StepShare, ...]
    failed: tuple[tuple[Sequence, LuceError], ...] = ()


class Scheduler:
    """Waiting and running sequences.

    chunk   most rows of a prompt in a step
    scored  of prompt rows, most with whole logits: they bound the memory that prompt scoring takes
    """

    def __init__(self, pages: PageTables, *, slots: int, chunk: int, scored: int) -> None:
        self._pages = pages
        self._chunk = chunk
        self._scored = min(scored, chunk)
        self._free_slots = set(range(slots))
        self._waiting: OrderedDict[str, deque[Sequence]] = OrderedDict()
        self._running: dict[Sequence, None] = {}
        self._turns = 0
        # Never later than the first deadline of any sequence, so that most looks at the time are one comparison.
        self._soonest = inf

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that have a slot, in order of admission."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences that wait for a slot, session by session."""
        return tuple(s for queue in self._waiting.values() for s in queue)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait. Its prompt and room together fit into `PageTables.longest`."""
        self._waiting.setdefault(sequence.session, deque()).append(sequence)
        self._soonest = min(self._soonest, sequence.deadline, sequence.queue_deadline)

    def remove(self, sequence: Sequence) -> None:
        """A sequence ends, for whatever reason, between two steps: its slot and pages are free at once."""
        if sequence.slot is None:
            queue = self._waiting[sequence.session]
            queue.remove(sequence)
            if not queue:
                del self._waiting[sequence.session]
            return
        del self._running[sequence]
        self._pages.release(sequence.slot)
        self._free_slots.add(sequence.slot)

    def late(self, now: float) -> tuple[list[Sequence], list[Sequence]]:
        """(expired, overdue): sequences past their deadline, and waiting ones past their queue deadline only."""
        if now < self._soonest:
            return [], []
        everyone = [*self._running, *self.waiting]
        expired = [s for s in everyone if s.deadline <= now]
        overdue = [s for s in everyone if s.slot is None and s.queue_deadline <= now < s.deadline]
        self._soonest = min(
            (min(s.deadline, inf if s.slot is not None else s.queue_deadline) for s in everyone), default=inf
        )
        return expired, overdue

    def admit(self) -> Iterator[Sequence]:
        """Give slots to sequences that wait, in turn, and yield them."""
        while self._waiting and self._free_slots:
            session, queue = next(iter(self._waiting.items()))
            sequence, slot = queue[0], min(self._free_slots)
            if not self._pages.reserve(slot, len(sequence.prompt) + sequence.room):
                return
            queue.popleft()
            if queue:
                self._waiting.move_to_end(session)
            else:
                del self._waiting[session]
            self._free_slots.remove(slot)
            sequence.slot = slot
            self._running[sequence] = None
            yield sequence

    def plan(self) -> Plan | None:
        """The next step, None if nothing runs. If it runs, `advance` must be told before the next plan.

        A sequence whose prompt is read needs a token of its reply that is not in the cache yet.
        """
        if not self._running:
            return None
        if any(s.parents for s in self._running):
            self._trim()
        shares = [(s, 1 + len(s.proposal)) for s in self._running if not s.prompt_left]
        prompts = [s for s in self._running if s.prompt_left]
        if prompts:
            shares += self._share(prompts)
        return self._build(shares)

    def filled(self, plan: Plan) -> Plan | None:
        """The newest plan with the tokens that its sequences propose now; None if there are more or fewer of them than
        there were then, or they are a tree."""
        parts, row = [], 0
        for part in plan.parts:
            proposal = part.sequence.proposal
            if len(proposal) != len(part.proposal) or part.sequence.parents:
                return None
            plan.step.tokens[row + 1 : row + 1 + len(proposal)] = proposal
            parts.append(replace(part, proposal=proposal))
            row += part.rows
        return replace(plan, parts=tuple(parts))

    def advance(self, plan: Plan) -> None:
        """The step ran: its rows are in the cache, but for those of proposals until they are accepted."""
        for part in plan.parts:
            part.sequence.accepted, part.sequence.path = 0, ()
            part.sequence.done += 0 if part.proposal else part.rows

    def accept(self, part: StepShare, path: Many[int]) -> None:
        """These rows of a part with a proposal count: the first one, and each the child of the one before it."""
        sequence = part.sequence
        sequence.done += len(path)
        sequence.accepted = len(path)
        sequence.path = tuple(path) if moved(path) else ()
        branch = max((row for row in part.taken[0] if row <= path[-1]), default=0) if part.taken else 0
        if branch:
            assert sequence.slot is not None
            for group, taken in zip(self._pages.groups, part.taken, strict=True):
                for entry, page in taken[branch].items():
                    group.exchange(sequence.slot, entry, page)

    def _share(self, prompts: list[Sequence]) -> list[tuple[Sequence, int]]:
        """Of each prompt the rows that come next if it is read alone, or none in this step; few rows come first."""
        few, many, scored = min(FEW_ROWS, self._chunk), self._chunk, self._scored
        shares = []
        for sequence in sorted(prompts, key=lambda s: (s.due, s.served)):
            rows = min(sequence.stretch, self._scored if sequence.scored else self._chunk)
            room = few if rows <= FEW_ROWS else many
            if rows > (min(room, scored) if sequence.scored else room):
                sequence.due = min(sequence.due, self._turns)
                continue
            shares.append((sequence, rows))
            few, many = (few - rows, many) if rows <= FEW_ROWS else (few, 0)
            scored -= rows * sequence.scored
            sequence.served, sequence.due = self._turns, inf
            self._turns += 1
        return sorted(shares, key=lambda share: share[1] > FEW_ROWS)

    def _trim(self) -> None:
        """Where pages for branches are missing, trees keep their first chain."""
        # A branch begins and ends in two pages at most.
        if 2 * sum(len(s.proposal) for s in self._running) > self._pages.refill():
            for sequence in self._running:
                if sequence.parents:
                    sequence.proposal = sequence.proposal[: draft_tree.branches(sequence.parents)[0].last]
                    sequence.parents = ()

    def _hold(
        self, shares: list[tuple[Sequence, int]]
    ) -> tuple[list[tuple[Sequence, int]], list[tuple[Sequence, LuceError]]]:
        """The shares whose pages are there now, and what failed."""
        held, failed = [], []
        for sequence, rows in shares:
            assert sequence.slot is not None
            try:
                depth = draft_tree.depth(sequence.parents) if sequence.parents else rows
                self._pages.extend(sequence.slot, sequence.done, depth)
            except LuceError as error:
                failed.append((sequence, error))
            else:
                held.append((sequence, rows))
        return held, failed

    def _build(self, shares: list[tuple[Sequence, int]]) -> Plan:
        shares, failed = self._hold(shares)
        tokens: list[int] = []
        spans: list[Span] = []
        parts: list[StepShare] = []
        wanted: list[int] = []
        full: list[bool] = []
        top: list[bool] = []
        start = logits = tops = 0
        for sequence, n in shares:
            slot, position, end = sequence.slot, sequence.done, start + n
            assert slot is not None
            if n == 1:
                # One row is the common case, and twice as fast without slices.
                tokens.append(int(sequence.prompt[position]) if sequence.prompt_left else sequence.reply[-1])
            elif sequence.prompt_left:
                tokens += sequence.prompt[position : position + n].tolist()
            else:
                tokens += [sequence.reply[-1], *sequence.proposal]
            proposal = () if sequence.prompt_left else sequence.proposal
            parents = sequence.parents if proposal else ()
            if sequence.scored and sequence.prompt_left:
                asked, whole, best = n, True, False
            elif proposal:
                asked, whole, best = n, sequence.full, sequence.top
            else:
                asked = int(sequence.room > 0 and n >= sequence.prompt_left)
                whole = sequence.full or (sequence.kept and sequence.prompt_left > 0)
                best = sequence.top
            ids = slice(len(wanted), len(wanted) + asked)
            wanted += range(end - asked, end)
            full += [whole] * asked
            top += [best] * asked
            rows_of = slice(logits, logits + asked * whole), slice(tops, tops + asked * best)
            parts.append(StepShare(sequence, position, n, ids, *rows_of, proposal, parents))
            logits += asked * whole
            tops += asked * best
            span = Span(slot, start, n, position, sequence.accepted, bool(proposal), sequence.path)
            spans += draft_tree.spans(parents, span) if parents else [span]
            start = end
        step = Step.of_spans(spans, tokens, self._pages.views, wanted, needs_logits=full, needs_candidates=top)
        if len(spans) > len(parts):
            views, parts = self._with_branches(step.views, parts, spans)
            step = replace(step, views=views)
        return Plan(step, tuple(parts), tuple(failed))

    def _with_branches(
        self, views: tuple[PageView, ...], parts: list[StepShare], spans: list[Span]
    ) -> tuple[tuple[PageView, ...], list[StepShare]]:
        """The views and parts of a step in which branches of trees have pages for themselves."""
        made = [draft_tree.own_pages(view, group, spans) for view, group in zip(views, self._pages.groups, strict=True)]
        found, start = [], 0
        for part in parts:
            rows = range(start, start + part.rows)
            taken = tuple({row - start: pages for row, pages in own.items() if row in rows} for _, own in made)
            found.append(replace(part, taken=taken if taken[0] else ()) if part.parents else part)
            start += part.rows
        return tuple(view for view, _ in made), found
