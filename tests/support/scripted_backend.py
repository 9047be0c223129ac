"""A Backend without a model: its logits are a hash of the tokens that it reads back through the page tables.

So a wrong page, a row in the wrong place or a neighbour's page changes the reply, and a right one gives the reply that
the same prompt has alone. Every Step is also checked against its contract; what is wrong raises AssertionError and is
kept in `broken`, as the engine turns errors into events.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from luce.backend.backend import Capacity
from luce.ops.draw import draw_among
from luce.ops.matmul import FEW_ROWS
from luce.runtime.host import HostEvent
from luce.runtime.step import MAX_CANDIDATES, PAGE, Candidates, Int32, Output, PendingMasks, Span, Step
from luce.shard.saved_state import HostSavedState, SavedState, StatePiece, Tensors
from luce.shard.sizes import pages_for

#: token that follows a history (prompt and reply so far), None to leave it to the hash
Script = Callable[[Sequence[int]], int | None]

_MIX = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
#: tokens that are hashed at once: each step hashes its whole history, most of which the last one has hashed
_RUN = 16


def after(marker: Sequence[int], reply: Sequence[int]) -> Script:
    """A script: behind the last `marker` of the history comes `reply`, over and over."""
    marker = list(marker)

    def script(history: Sequence[int]) -> int | None:
        for end in range(len(history), len(marker) - 1, -1):
            if list(history[end - len(marker) : end]) == marker:
                return reply[(len(history) - end) % len(reply)]
        return None

    return script


class ScriptedBackend:
    """See luce.backend.backend.Backend for the properties.

    pages     per group; default: as many as all slots need for full contexts
    delay     seconds that each step takes
    script    the tokens to say (their logit is 30 above the hash's, which are in [0, 4))
    hook      called at the start of every forward: may wait, or raise to make the step fail
    recurrent whether a slot's history is a state that has to be saved and restored, not only in the pages
    lag       how often one has to ask for pages that were saved while they are held before they are there: they are
              read as late as that
    bound     most pages of a sequence in groups without a window: which of them are missing changes what is said
    branch_pages  pages of each group for branches of trees
    resumes   whether sequences may be resumed behind pages alone, so that the pages tell what a slot's history is
    """

    def __init__(
        self,
        *,
        vocab: int = 97,
        context: int = 512,
        slots: int = 4,
        chunk: int = 64,
        windows: Sequence[int | None] = (None,),
        pages: Sequence[int] | None = None,
        delay: float = 0.0,
        script: Script | None = None,
        hook: Callable[[Step], None] | None = None,
        recurrent: bool = False,
        resumes: bool = False,
        verify: int = 16,
        invariant_rows: int = 16,
        lag: int = 0,
        bound: int | None = None,
        branch_pages: int = 0,
        asynchronous: bool = True,
    ) -> None:
        self.resumes = resumes
        self.asynchronous = asynchronous
        #: paths of trees that are not their first rows, as `move_features` was told: (slot, position, path)
        self.moved: list[tuple[int, int, tuple[int, ...]]] = []
        self.chunk = chunk

        def most(window: int | None) -> int:
            """Pages of a sequence."""
            needed = pages_for(window, context, chunk)
            return needed if bound is None or window is not None else min(needed, bound)

        counts = tuple(pages) if pages else tuple(slots * most(window) for window in windows)
        self.capacity = Capacity(
            vocab=vocab,
            context=context,
            slots=slots,
            windows=tuple(windows),
            pages=counts,
            page_bytes=tuple(windows).count(None) * PAGE * 2 * np.dtype(np.int64).itemsize,
            checkpoint_bytes=slots * (1 << 20),
            max_resident_pages=bound,
            branch_pages=branch_pages,
            verify_rows=verify,
            invariant_rows=invariant_rows,
            recurrent=recurrent,
            # A shard for each page group, and one for the recurrent state.
            layers=tuple(range(i, i + 1) for i in range(len(counts) + 1)),
            ranking_bytes=0,
        )
        self.delay = delay
        self.script = script
        self.hook = hook
        #: the first violation of a contract
        self.broken: str | None = None
        #: (rows, spans) of every step that ran
        self.steps: list[tuple[int, int]] = []
        self.closed = False
        #: the step that is queued behind the newest one, if there is one, and its logits once that one has run
        self._behind: list[Step] = []
        self._behind_logits = np.empty((0, vocab), np.float32)
        #: steps that were queued behind another one
        self.followed = 0
        #: steps that were staged
        self.staged: list[Step] = []
        #: what the next `lost` says
        self.gone = ""
        #: whether a shard is away, and whether that is for good
        self.away = self.lasting = False
        self.state = ScriptedState(self.capacity, lag)
        self.ranking = ScriptedRanking()

    def lost(self) -> str:
        gone, self.gone = self.gone, ""
        if gone:
            for rows in self.state.rows:
                rows[:] = -1
            for slot in range(self.capacity.slots):
                self.state.seen[slot], self.state.proposed[slot] = [], []
        return gone

    def ready(self) -> bool:
        return not self.away

    def down(self) -> str:
        return "a shard is down" if self.lasting else ""

    def forward(self, step: Step, queued: Callable[[], None] = lambda: None) -> Output:
        follows = bool(self._behind)
        assert not follows or self._behind.pop().spans is step.spans, "another step is queued"
        assert follows or not step.masks_deferred, "masks of a step that nobody queued ahead"
        assert not follows or step.masks_deferred or step.masks is None, "masks that were not announced"
        if self.asynchronous and step.masks is not None:
            self.wait_for_masks(step.masks)
        queued()
        try:
            if self.hook is not None:
                self.hook(step)
            if self.delay:
                time.sleep(self.delay)
            logits = self._behind_logits if follows else self._compute(step)
            output = self._output(step, logits)
            for behind in self._behind:
                # The devices go on, whatever the engine does with the output.
                assert behind.rows == len(output.ids), "a step follows one of other rows"
                # They have some token where none could be drawn.
                tokens = np.maximum(output.ids, 0)
                self._behind_logits = self._compute(dataclasses.replace(behind, tokens=tokens))
        except BaseException as error:
            self._behind.clear()
            self.broken = self.broken or (str(error) if isinstance(error, AssertionError) else None)
            raise
        self.steps.append((step.rows, len(step.spans)))
        return output

    def wait_for_masks(self, masks: PendingMasks) -> None:
        """Shards queue a step's output under its masks, before `queued` is called."""
        masks.wait()

    def stage(self, step: Step) -> None:
        self.staged.append(step)

    def follow(self, step: Step) -> bool:
        if not self.asynchronous:
            return False
        assert step.masks is None, "masks before the tokens that they depend on"
        self._behind.append(step)
        self.followed += 1
        return True

    def accept(self, slot: int, rows: Sequence[int]) -> None:
        assert self.capacity.recurrent and 0 < len(rows) <= len(self.state.proposed[slot]), (
            "rows that were not speculative"
        )
        self.state.seen[slot] += [self.state.proposed[slot][row] for row in rows]
        self.state.proposed[slot] = []

    def move_features(self, slot: int, position: int, path: Sequence[int]) -> None:
        self.moved.append((slot, position, tuple(path)))

    def close(self) -> None:
        self.closed = True

    def reply(self, prompt: Sequence[int], n: int) -> list[int]:
        """The greedy reply of n tokens that `prompt` has, computed without pages."""
        history = list(prompt)
        for _ in range(n):
            history.append(int(self.logits(history).argmax()))
        return history[len(prompt) :]

    def logits(self, history: Sequence[int], missing: Sequence[int] = ()) -> NDArray[np.float32]:
        """Logits behind a history of which some pages are not seen: float32 [vocab]."""
        text, state = (*missing, *history), 0
        for at in range(0, len(text), _RUN):
            state = _after(state, text[at : at + _RUN])
        mixed = (np.arange(1, self.capacity.vocab + 1, dtype=np.uint64) * np.uint64(state | 1)) >> np.uint64(40)
        row = (mixed % np.uint64(4096)).astype(np.float32) / np.float32(1024)
        if self.script is not None and (token := self.script(history)) is not None:
            row[token] += 30
        return row

    def _compute(self, step: Step) -> NDArray[np.float32]:
        """Run a step: the logits of its output rows."""
        self._check(step)
        for span in step.spans:
            self._write(step, span)
        for group, view in enumerate(step.views):
            if view.copies is not None:
                source, target = view.copies[view.copies[:, 0] >= 0].T
                assert not set(source.tolist()) & set(target.tolist()), "a place is copied from and to"
                self.state.rows[group][target] = self.state.rows[group][source]
        for index, span in enumerate(step.spans):
            for group in range(len(self.capacity.pages)):
                self._read(step, span, index, group)
        rows = []
        for row in step.output_rows.tolist():
            span = next(s for s in step.spans if s.start <= row < s.start + s.rows)
            position = int(step.positions[row])
            rows.append(self.logits(self._history(step, span)[: position + 1], self._missing(step, span, position)))
        return np.array(rows, np.float32).reshape(-1, self.capacity.vocab)

    def _output(self, step: Step, logits: NDArray[np.float32]) -> Output:
        masked = self._masked(step, logits)
        top, chosen = None, masked.argmax(axis=1).astype(np.int32)
        if step.needs_candidates is not None and step.needs_candidates.any():
            best = masked[step.needs_candidates]
            ids = np.argsort(-best, axis=1, kind="stable")[:, :MAX_CANDIDATES].astype(np.int32)
            top = Candidates(ids, np.take_along_axis(best, ids, axis=1))
        if step.draws is not None:
            own = step.draws.drawn
            ids = np.argsort(-masked[own], axis=1, kind="stable")[:, :MAX_CANDIDATES].astype(np.int32)
            few = np.take_along_axis(masked[own], ids, axis=1)
            chosen[own] = draw_among(ids, few, step.draws[own], step.next_positions[own])
        return Output(chosen, logits[step.needs_logits], top)

    def _masked(self, step: Step, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits without the tokens that masks lack."""
        if step.masks is None:
            return logits
        masks, masked = step.masks.wait(), logits.copy()
        assert not step.needs_logits[masks.rows].any(), "a row of whole logits is masked"
        for row, words in zip(masks.rows.tolist(), masks.words, strict=True):
            allowed = [bool(int(words[token // 32]) >> token % 32 & 1) for token in range(self.capacity.vocab)]
            masked[row, ~np.array(allowed)] = -np.inf
        return masked

    def _missing(self, step: Step, span: Span, position: int) -> list[int]:
        """The pages of the bounded group that a row does not see."""
        if self.capacity.max_resident_pages is None:
            return []
        view, index = step.views[self.capacity.windows.index(None)], step.spans.index(span)
        there = set((view.first[index, : view.count[index]] // PAGE).tolist())
        return [page for page in range(position // PAGE + 1) if page not in there]

    def _history(self, step: Step, span: Span) -> list[int]:
        """The tokens up to the last row of a span."""
        seen = self.state.seen[span.slot]
        if not span.speculative:
            return seen
        return seen + step.tokens[[*span.ancestors, *range(span.start, span.start + span.rows)]].tolist()

    def _check(self, step: Step) -> None:
        """What holds for every step, whatever ran before."""
        n = len(step.tokens)
        assert n > 0, "empty step"
        for array, name in ((step.tokens, "tokens"), (step.positions, "positions"), (step.output_rows, "output_rows")):
            assert array.dtype == np.int32, f"{name} is {array.dtype}"
        outputs, logits, candidates = step.output_rows, step.needs_logits, step.needs_candidates
        assert logits.dtype == np.bool_ and len(logits) == len(outputs), "needs_logits does not match output_rows"
        assert candidates is None or len(candidates) == len(outputs), "needs_candidates does not match output_rows"
        assert (np.diff(outputs) > 0).all(), "output_rows is not ascending"
        assert not len(outputs) or 0 <= outputs[0] <= outputs[-1] < n, "output_rows is outside the step"
        assert ((step.tokens >= 0) & (step.tokens < self.capacity.vocab)).all(), "token outside the vocabulary"
        prompts = [s.rows for s in step.spans if s.rows > 1 and not s.speculative]
        assert sum(rows for rows in prompts if rows > FEW_ROWS) <= self.chunk, "more rows of prompts than a chunk"
        assert sum(rows for rows in prompts if rows <= FEW_ROWS) <= FEW_ROWS, "more than few rows of short prompts"
        verified = sum(s.rows for s in step.spans if s.speculative)
        assert verified <= max(self.capacity.invariant_rows, self.capacity.slots), "more rows than have the bits of one"
        roots = [s for s in step.spans if not s.ancestors]
        assert len({s.slot for s in roots}) == len(roots), "two spans of one slot"
        start, root = 0, step.spans[0]
        for span in step.spans:
            root = root if span.ancestors else span
            assert span.slot == root.slot and root.speculative >= bool(span.ancestors), "a branch of another tree"
            assert all(root.start <= row < span.start for row in span.ancestors), "a branch of another tree"
            assert span.position - len(span.ancestors) == root.position, "a branch in another depth"
            assert not span.path or len(span.path) == span.accepted, "a path of another length"
            assert 0 <= span.slot < self.capacity.slots, f"slot {span.slot}"
            assert not span.speculative or (span.position and span.rows <= self.capacity.verify_rows), (
                "a speculative span out of place"
            )
            assert span.position or not span.accepted, "rows of another sequence are accepted"
            assert span.start == start and span.rows > 0, "spans do not tile the rows"
            start += span.rows
            expected = np.arange(span.position, span.position + span.rows)
            assert (step.positions[span.start : start] == expected).all(), "positions are not contiguous"
            assert span.position + span.rows <= self.capacity.context, "row beyond the context"
        assert start == n, "spans do not tile the rows"
        assert len(step.views) == len(self.capacity.pages), "views do not match the page groups"
        for view, total in zip(step.views, (n + self.capacity.branch_pages for n in self.capacity.pages), strict=True):
            for array in (view.table, view.first, view.count, view.dest):
                assert array.dtype == np.int32, "views are int32"
            assert view.table.shape == view.first.shape and len(view.count) == len(view.table) == len(step.spans)
            seen_by: Counter[int] = Counter()
            written: set[int] = set()
            for index, span in enumerate(step.spans):
                count = int(view.count[index])
                pages, first = view.table[index, :count].tolist(), view.first[index, :count]
                assert all(0 <= page < total for page in pages), "page outside the pool"
                assert (np.diff(first) > 0).all(), "view is not sorted by position"
                assert (first % PAGE == 0).all(), "page at a position between pages"
                assert len(set(pages)) == count, "a page twice in one view"
                seen_by.update(pages)
                dest = {int(d) // PAGE for d in view.dest[span.start : span.start + span.rows]}
                assert dest <= set(pages), "row written to a page of someone else"
                written |= dest
            assert all(seen_by[page] == 1 for page in written), "row written to a shared page"

    def _write(self, step: Step, span: Span) -> None:
        own = slice(span.start, span.start + span.rows)
        for group, view in enumerate(step.views):
            self.state.rows[group][view.dest[own]] = np.stack([step.tokens[own], step.positions[own]], axis=1)
        if span.ancestors:
            self.state.proposed[span.slot] += step.tokens[own].tolist()
            return
        seen = self.state.seen[span.slot]
        proposed, self.state.proposed[span.slot] = self.state.proposed[span.slot], []
        assert span.accepted <= len(proposed), "more rows are accepted than were speculative"
        if span.position == 0:
            seen.clear()
        elif self.resumes:
            full = self.capacity.windows.index(None)
            view, index = step.views[full], step.spans.index(span)
            numbers = view.table[index, : view.count[index]].tolist()
            seen[:] = self.state.rows[full][_rows_of(numbers), 0][: span.position].tolist()
        else:
            assert span.accepted or not proposed, "not even the seed is accepted"
            seen += [proposed[row] for row in span.path or range(span.accepted)]
        assert span.position == len(seen), f"slot {span.slot} has {len(seen)} positions, the span begins elsewhere"
        (self.state.proposed[span.slot] if span.speculative else seen).extend(step.tokens[own].tolist())

    def _read(self, step: Step, span: Span, index: int, group: int) -> None:
        """What the span's rows see must be the slot's own tokens."""
        view, window = step.views[group], self.capacity.windows[group]
        count = int(view.count[index])
        first = view.first[index, :count].astype(np.int64)
        place = (view.table[index, :count].astype(np.int64)[:, None] * PAGE + np.arange(PAGE)).ravel()
        at = (first[:, None] + np.arange(PAGE)).ravel()
        low = 0 if window is None else max(0, span.position - window + 1)
        visible = (at >= low) & (at < span.position + span.rows)
        if self.capacity.max_resident_pages is None or window is not None:
            assert (at[visible] == np.arange(low, span.position + span.rows)).all(), "a visible position has no page"
        else:
            assert count <= self.capacity.max_resident_pages, "more pages than a sequence may have"
            assert {0, *range(span.position // PAGE - 4, (span.position + span.rows - 1) // PAGE + 1)} <= {
                *(first // PAGE).tolist(),
                *range(-4, 0),
            }, "a page that has to stay has left"
        held = self.state.rows[group][place[visible]]
        assert (held[:, 1] == at[visible]).all(), f"a page of slot {span.slot} was written by someone else"
        seen = self._history(step, span)
        assert (held[:, 0] == np.array(seen)[at[visible]]).all(), f"slot {span.slot} lost its tokens"


class ScriptedState:
    """What the pages and the recurrent states hold.

    lag     as in ScriptedBackend
    """

    def __init__(self, capacity: Capacity, lag: int) -> None:
        self.lag = lag
        self._groups = len(capacity.pages)
        #: page counts given to `reserve`
        self.reserved: list[int] = []
        #: (token, position) of each row of each page group
        self.rows = [np.full(((n + capacity.branch_pages) * PAGE, 2), -1, np.int64) for n in capacity.pages]
        #: tokens of each slot's history
        self.seen: list[list[int]] = [[] for _ in range(capacity.slots)]
        #: tokens of each slot's speculative spans, of which none is accepted yet
        self.proposed: list[list[int]] = [[] for _ in range(capacity.slots)]

    def save(self, slot: int | None, pages: Sequence[Sequence[int]], *, held: bool = False) -> SavedState:
        if held and self.lag:
            return _Lagging(lambda: self._saved(slot, pages), self.lag)
        return self._saved(slot, pages)

    def _saved(self, slot: int | None, pages: Sequence[Sequence[int]]) -> HostSavedState:
        saved: dict[str, NDArray[np.generic]] = {
            f"blk.{group}.k": self.rows[group][_rows_of(numbers)].copy()
            for group, numbers in enumerate(pages)
            if numbers
        }
        paged = frozenset(saved)
        if slot is not None:
            assert not self.proposed[slot], "a state is saved before its rows are accepted"
            saved[f"blk.{self._groups}.memory"] = np.array(self.seen[slot], np.int64)
        return HostSavedState(saved, HostEvent(), paged)

    def restore(self, slot: int | None, pages: Sequence[Sequence[int]], saved: SavedState, first: int = 0) -> None:
        if isinstance(saved, _Lagging):
            saved = saved.landed()
        assert isinstance(saved, HostSavedState)
        for group, numbers in enumerate(pages):
            if numbers:
                rows = saved.tensors[f"blk.{group}.k"][first * PAGE : (first + len(numbers)) * PAGE]
                self.rows[group][_rows_of(numbers)] = rows
        if slot is not None:
            self.proposed[slot] = []
            self.seen[slot] = saved.tensors[f"blk.{self._groups}.memory"].tolist()

    def staging_buffer(self, size: int) -> NDArray[np.uint8]:
        return np.empty(size, np.uint8)

    def reserve(self, pages: int) -> None:
        self.reserved.append(pages)

    def load(self, pieces: Iterable[StatePiece]) -> None:
        for piece in pieces:
            for group, numbers in enumerate(piece.pages):
                if numbers and group in piece.layers:
                    self.rows[group][_rows_of(numbers)] = piece.tensors[f"blk.{group}.k"]
            if piece.slot is not None and self._groups in piece.layers:
                self.proposed[piece.slot] = []
                self.seen[piece.slot] = piece.tensors[f"blk.{self._groups}.memory"].tolist()


class ScriptedRanking:
    """Ranks no pages."""

    def add(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        raise AssertionError("no page is ranked")

    def drop(self, slot: int) -> None:
        raise AssertionError("no page is ranked")

    def rank(self, slot: int, position: int, entries: Int32) -> NDArray[np.float64]:
        raise AssertionError("no page is ranked")


class _Lagging:
    """What is copied when somebody has asked for it a few times, or waits."""

    def __init__(self, copy: Callable[[], HostSavedState], lag: int) -> None:
        self._copy = copy
        self._lag = lag
        self._landed: HostSavedState | None = None
        #: what it will be: sizes do not change
        self.nbytes, self.pages = copy().nbytes, copy().pages

    def landed(self) -> HostSavedState:
        if self._landed is None:
            self._landed = self._copy()
        return self._landed

    def ready(self) -> bool:
        self._lag -= 1
        if self._lag < 0:
            self.landed()
        return self._landed is not None

    def wait(self) -> None:
        self.landed()

    def windows(self, first: int = 0, count: int | None = None) -> Iterator[Tensors]:
        yield from self.landed().windows(first, count)


def _rows_of(pages: Sequence[int]) -> NDArray[np.int64]:
    return (np.asarray(pages, np.int64)[:, None] * PAGE + np.arange(PAGE)).ravel()


@functools.lru_cache(1 << 16)
def _after(state: int, tokens: tuple[int, ...]) -> int:
    for token in tokens:
        state = ((state ^ (token + 1)) * _MIX + (state >> 29)) & _MASK
    return state
