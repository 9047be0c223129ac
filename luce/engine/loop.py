"""Engine: one thread that turns submitted prompts into events, by way of scheduler, backend and sampler.

Other threads only append to the inbox; everything else belongs to the engine thread. It sleeps when nothing is left to
do, so an unfinished sequence never has to wake it: that lets `Ticket.cancel` do without a lock, and be called from a
destructor at any time.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from concurrent.futures import Future
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from luce.backend.backend import Backend
from luce.cache.disk import CachedPrefix, DiskTier
from luce.cache.prefix import CacheStats, PrefixCache
from luce.cache.tree import Point
from luce.draft.drafter import Drafter
from luce.draft.tails import Tails
from luce.engine.pages import Pages
from luce.engine.residency import QUESTION, KVFlash, Pager, ResidencyStats
from luce.engine.sampling import Sampler, needs_candidates, needs_logits, score
from luce.engine.scheduler import Part, Plan, Scheduler, Sequence
from luce.engine.sequence import (
    Event,
    EventSink,
    Failed,
    Finished,
    FinishReason,
    Progress,
    PromptLogits,
    PromptScores,
    SamplingParams,
    Started,
    TextOutput,
    Timings,
    Token,
    Tokens,
)
from luce.engine.speculate import DraftStats, Speculator
from luce.errors import (
    BackendError,
    ContextError,
    LuceError,
    QueueFullError,
    RequestError,
    ShardLostError,
    UnavailableError,
)
from luce.ops.matmul import FEW_ROWS
from luce.runtime.step import Int32, Output

_log = logging.getLogger(__name__)

# Bytes of logits that prompt scoring may take in one step.
_SCORED_BYTES = 64 << 20
# Weight of the newest reply in the moving average of service time.
_NEWEST = 0.2


@dataclass(frozen=True)
class EngineStats:
    """Numbers at one moment. Pages are of all groups together, counters are since the start.

    stalled: seconds since the last step ended (or since there is work again), 0 while nothing is pending; it goes on
    growing if a defect ended the engine thread.
    """

    queued: int
    running: int
    slots: int
    pages_used: int
    pages_total: int
    prompt_tokens: int
    predicted_tokens: int
    cancelled: int
    steps: int
    stalled: float
    cache: CacheStats
    draft: DraftStats | None = None
    residency: ResidencyStats | None = None


class Ticket:
    """A submitted sequence, in the hands of the one who submitted it."""

    def __init__(self, inbox: deque[Callable[[], None]], cancel: Callable[[Ticket], None]) -> None:
        self._inbox = inbox
        self._cancel = cancel
        #: whether the last event is given or being given
        self.over = False

    def cancel(self) -> None:
        """End the sequence before the next step, with FinishReason.CANCELLED. Idempotent, from any thread."""
        if not self.over:
            self._inbox.append(lambda: self._cancel(self))


@dataclass(frozen=True)
class _Row:
    """What a step, or the prefix cache, gives for the next token: the likeliest, and all logits or the best ones."""

    token: int
    logits: NDArray[np.float32] | None = None
    top: tuple[Int32, NDArray[np.float32]] | None = None


class _Run:
    """What the engine knows of a sequence beside its rows."""

    def __init__(
        self,
        ticket: Ticket,
        sequence: Sequence,
        params: SamplingParams,
        output: TextOutput,
        on_event: EventSink,
        ends: frozenset[int],
        submitted: float,
    ) -> None:
        self.ticket = ticket
        self.sequence = sequence
        self.params = params
        self.output = output
        self.on_event = on_event
        self.seed = secrets.randbits(32) if params.seed is None else params.seed
        self.sampler = Sampler(params, sequence.prompt, seed=self.seed, ends=ends) if needs_logits(params) else None
        self.scores: list[Token] = []
        self.submitted = submitted
        self.started: float | None = None
        self.read: float | None = None
        #: positions that came from the prefix cache, and the newest point of the sequence there
        self.cached, self.tier = 0, "none"
        self.point: Point | None = None
        #: whether the prompt has a boundary at which it is kept
        self.bounded = False
        #: tokens that were proposed and verified, and those of them in the reply
        self.drafted = self.accepted = 0

    def timings(self, now: float) -> Timings:
        started = now if self.started is None else self.started
        read = now if self.read is None else self.read
        return Timings(
            queued=started - self.submitted,
            prompt=read - started,
            predicted=now - read,
            prompt_tokens=min(self.sequence.done, len(self.sequence.prompt)),
            predicted_tokens=len(self.sequence.reply),
            cached_tokens=self.cached,
            cache_tier=self.tier,
            drafted=self.drafted,
            accepted=self.accepted,
        )


class Engine:
    """Runs sequences on a backend, which it does not close.

    eos: ids that end a reply. max_queue: sequences that may wait beyond those that have a slot. chunk: prompt rows in
    a step. max_queue_seconds, timeout: longest wait and longest life of a sequence, 0 for no limit. cache_bytes: of
    host memory for the prefix cache, 0 for no cache; cache_interval: prompt tokens between points of a long prompt at
    which a sequence can be resumed, where the model needs such points. disk: where points of at least disk_tokens
    tokens are written; it is closed with the engine, after flush_seconds at most. drafter: proposes tokens, and is
    closed with the engine; verify_width: rows of a sequence that are verified at once, 0 for as many as pay; tree: most
    tokens of a tree that it is asked for, None if it is asked for chains; tails: of the drafter's ring, kept with
    prefixes. kvflash: which pages stay on the devices, needed where the backend bounds the pages of a sequence.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos: frozenset[int],
        max_queue: int,
        chunk: int,
        max_queue_seconds: float = 0,
        timeout: float = 0,
        cache_bytes: int = 0,
        cache_interval: int = 8192,
        disk: DiskTier | None = None,
        disk_tokens: int = 512,
        flush_seconds: float = 30,
        drafter: Drafter | None = None,
        verify_width: int = 0,
        tree: int | None = None,
        tails: Tails | None = None,
        kvflash: KVFlash | None = None,
    ) -> None:
        self._backend = backend
        self._eos = eos
        self._slots = backend.slots
        self._max_queue = max_queue
        self._max_queue_seconds = max_queue_seconds
        self._timeout = timeout
        self._pages = Pages(
            backend.pages,
            backend.windows,
            slots=backend.slots,
            context=backend.context,
            chunk=chunk,
            bound=backend.bound,
            branch_pages=backend.branch_pages,
        )
        self._pager = None if kvflash is None else Pager.over(backend, self._pages.groups, kvflash, chunk)
        self._context = self._pages.longest
        #: belongs to the engine's thread, but for what it says that any thread may call
        self.cache: PrefixCache | None = None
        self._interval = cache_interval
        self._flush_seconds = flush_seconds
        if cache_bytes:
            self.cache = PrefixCache(backend, self._pages.groups, cache_bytes, disk, disk_tokens, self._pager)
            for group in self._pages.groups:
                group.reclaim = self.cache.reclaim
        self._scheduler = Scheduler(
            self._pages, slots=backend.slots, chunk=chunk, scored=max(1, _SCORED_BYTES // (4 * backend.vocab))
        )
        self._speculator: Speculator | None = None
        if drafter is not None:
            # More rows, of all sequences together, would have other bits (luce.ops.matmul).
            self._speculator = Speculator(
                drafter,
                vocab=backend.vocab,
                rows=FEW_ROWS,
                verify=min(backend.verify, chunk),
                width=verify_width,
                tree=tree,
                tails=tails,
            )
        self._runs: dict[Sequence, _Run] = {}
        self._by_ticket: dict[Ticket, _Run] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._prompt_tokens = self._predicted_tokens = self._cancelled = self._steps = 0
        self._service = 0.0

        # The lock guards what follows.
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._quiet = threading.Condition(self._lock)
        #: sequences that count against the queue, and those whose last event is still to come
        self._open = self._pending = 0
        self._progress = 0.0
        self._draining = self._closing = self._broken = False
        if disk is not None:
            disk.wake = self._wake
        self._thread = threading.Thread(target=self._main, name="luce-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Many[int],
        params: SamplingParams,
        *,
        output: TextOutput,
        on_event: EventSink,
        session: str = "",
        timeout: float = 0,
        boundaries: Many[int] = (),
    ) -> Ticket:
        """Queue a prompt; `on_event` gets its events on the engine thread.

        Started, Progress and PromptLogits, PromptScores, Tokens, then exactly one Finished or Failed. `session` shares
        the queue fairly. `timeout` in seconds from now (0: the engine's alone) ends it with FinishReason.DEADLINE.
        `boundaries`: lengths, ascending, at which prompts are likely to part (luce.text.boundaries).
        Raises RequestError (no token, or an id outside the vocabulary), ContextError, QueueFullError, UnavailableError.
        """
        ids = self._check_prompt(prompt, params)
        rest = self._context - len(ids)
        now = time.monotonic()
        limits = [t for t in (timeout, self._timeout) if t > 0]
        sequence = Sequence(
            prompt=ids,
            room=rest if params.max_tokens is None else min(params.max_tokens, rest),
            session=session,
            full=needs_logits(params) and not needs_candidates(params),
            top=needs_candidates(params),
            scored=params.prompt_logits or params.prompt_logprobs is not None,
            kept=self.cache is not None,
            cuts=self._cuts(boundaries, len(ids)),
            deadline=now + min(limits) if limits else inf,
            queue_deadline=now + self._max_queue_seconds if self._max_queue_seconds > 0 else inf,
        )
        ticket = Ticket(self._inbox, self._cancel)
        ends = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | self._eos
        known = frozenset(i for i in ends if 0 <= i < self._backend.vocab)
        run = _Run(ticket, sequence, params, output, on_event, known, now)
        run.bounded = any(0 < at < len(ids) for at in boundaries)
        with self._lock:
            if self._draining:
                raise UnavailableError("the server is shutting down", code="draining")
            if self._open >= self._slots + self._max_queue:
                raise QueueFullError(
                    f"{self._max_queue} requests wait already (--max-queue)", retry_after=self._retry_after()
                )
            if not self._pending:
                self._progress = now
            self._open += 1
            self._pending += 1
            self._inbox.append(lambda: self._add(run))
            self._work.notify()
        return ticket

    def stats(self) -> EngineStats:
        """Numbers for people and for the watchdog."""
        with self._lock:
            running = self._scheduler.busy
            return EngineStats(
                queued=max(0, self._open - running),
                running=running,
                slots=self._slots,
                pages_used=self._pages.used,
                pages_total=self._pages.total,
                prompt_tokens=self._prompt_tokens,
                predicted_tokens=self._predicted_tokens,
                cancelled=self._cancelled,
                steps=self._steps,
                stalled=time.monotonic() - self._progress if self._pending or self._broken else 0.0,
                cache=CacheStats() if self.cache is None else self.cache.stats(),
                draft=None if self._speculator is None else self._speculator.stats(),
                residency=None if self._pager is None else self._pager.stats(),
            )

    def cached(self) -> list[CachedPrefix]:
        """What the prefix cache holds, the newest first. Blocks until the engine's thread is between two steps."""
        return self._between_steps(lambda cache: cache.contents())

    def forget(self) -> int:
        """Empty the prefix cache, memory and disk; returns how many prefixes there were. Blocks as `cached` does."""
        return len(self._between_steps(lambda cache: cache.forget()))

    def drain(self) -> None:
        """Refuse new sequences and fail those that wait; those that run go on. Idempotent."""
        with self._lock:
            self._draining = True
            self._inbox.append(self._refuse_waiting)
            self._work.notify()

    def stop_running(self) -> None:
        """End the sequences that run, with FinishReason.SHUTDOWN, before the next step."""
        with self._lock:
            self._inbox.append(self._stop_running)
            self._work.notify()

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until every sequence has had its last event; False if that takes longer than `timeout` seconds."""
        with self._lock:
            return self._quiet.wait_for(lambda: not self._pending, timeout)

    def close(self) -> None:
        """End everything and join the thread, after the step that runs. Idempotent."""
        with self._lock:
            self._draining = self._closing = True
            self._work.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _between_steps(self, ask: Callable[[PrefixCache], list[CachedPrefix]]) -> list[CachedPrefix]:
        if self.cache is None:
            return []
        cache, answer = self.cache, Future[list[CachedPrefix]]()

        def reply() -> None:
            try:
                answer.set_result(ask(cache))
            except Exception as error:
                answer.set_exception(error)

        with self._lock:
            if self._closing:
                return []
            self._inbox.append(reply)
            self._work.notify()
        return answer.result()

    def _wake(self) -> None:
        with self._lock:
            self._work.notify()

    def _check_prompt(self, prompt: Many[int], params: SamplingParams) -> Int32:
        vocab = self._backend.vocab
        if not len(prompt):
            raise RequestError("the prompt has no tokens", param="prompt", code="invalid_value")
        need = len(prompt) + (params.max_tokens != 0)
        if need > self._context:
            raise ContextError(
                f"This model's maximum context length is {self._context} tokens. However, your messages resulted in "
                f"{len(prompt)} tokens. Please reduce the length of the messages."
            )
        try:
            ids = np.array(prompt, np.int64)
        except OverflowError:
            ids = np.array([-1], np.int64)
        if ids.min() < 0 or ids.max() >= vocab:
            raise RequestError(f"the prompt has ids outside 0..{vocab - 1}", param="prompt", code="invalid_value")
        if params.logit_bias and not 0 <= min(params.logit_bias) <= max(params.logit_bias) < vocab:
            raise RequestError(f"logit_bias has ids outside 0..{vocab - 1}", param="logit_bias", code="invalid_value")
        return ids.astype(np.int32)

    def _cuts(self, boundaries: Many[int], length: int) -> tuple[int, ...]:
        """Where in a prompt points are kept: at its first boundary, which conversations share, and at its last one,
        which the next turn shares whatever becomes of the reply; in long prompts between them as well."""
        if self.cache is None or not self.cache.exact:
            return ()
        inside = [at for at in boundaries if 0 < at < length]
        return tuple(sorted({*inside[:1], *inside[-1:], *range(self._interval, length, self._interval)}))

    def _retry_after(self) -> int:
        return min(60, max(1, math.ceil(self._service)))

    # What follows runs on the engine thread.

    def _main(self) -> None:
        error: LuceError = UnavailableError("the server is shutting down", code="draining")
        try:
            while self._turn():
                pass
        except Exception as bug:
            _log.exception("the engine stopped")
            self._broken = True
            error = BackendError(f"the engine stopped: {type(bug).__name__}: {bug}")
        with self._lock:
            # Nothing is added from here on, so the inbox that is worked off below is the last one.
            self._draining = self._closing = True
        self._work_off_inbox()
        for run in list(self._runs.values()):
            if run.sequence.slot is not None and not self._broken:
                self._finish(run, FinishReason.SHUTDOWN)
            else:
                self._fail(run, error)
        if self._speculator is not None:
            self._speculator.close()
        if self._pager is not None:
            self._pager.close()
        if self.cache is not None:
            self.cache.flush(0 if self._broken else self._flush_seconds)

    def _turn(self) -> bool:
        """One round: commands, deadlines, admission, a step. False when the engine is to end."""
        if not self._runs:
            if self._speculator is not None:
                self._speculator.idle()
            with self._lock:
                self._work.wait_for(lambda: self._inbox or self._closing or (self.cache and self.cache.pending))
        self._work_off_inbox()
        if self._closing:
            return False
        if loss := self._backend.lost():
            self._forget(loss)
        now = time.monotonic()
        expired, overdue = self._scheduler.late(now)
        for sequence in expired:
            self._finish(self._runs[sequence], FinishReason.DEADLINE)
        for sequence in overdue:
            message = f"waited {self._max_queue_seconds:g} s in the queue (--max-queue-seconds)"
            self._fail(self._runs[sequence], QueueFullError(message, retry_after=self._retry_after()))
        for sequence in self._scheduler.admit():
            run = self._runs[sequence]
            run.started = now
            self._emit(run, Started())
            self._resume(run)
        if self._pager is not None:
            for sequence in self._scheduler.running:
                self._page(self._pager, sequence)
        if self._speculator is not None:
            self._speculator.propose(self._scheduler.running)
        plan = self._scheduler.plan()
        if plan is not None:
            for sequence, error in plan.failed:
                self._fail(self._runs[sequence], _backend_error(error))
            if plan.parts:
                self._step(plan)
        if self.cache is not None:
            self.cache.pump(idle=not self._runs)
        return True

    def _forget(self, loss: str) -> None:
        """The backend has forgotten everything: so do those who build on it."""
        if self.cache is not None:
            self.cache.clear()
        for sequence in self._scheduler.running:
            if sequence.done:
                self._fail(self._runs[sequence], ShardLostError(loss))

    def _work_off_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _add(self, run: _Run) -> None:
        self._runs[run.sequence] = self._by_ticket[run.ticket] = run
        self._scheduler.add(run.sequence)

    def _cancel(self, ticket: Ticket) -> None:
        run = self._by_ticket.get(ticket)
        if run is not None:
            self._cancelled += 1
            self._finish(run, FinishReason.CANCELLED)

    def _refuse_waiting(self) -> None:
        for sequence in self._scheduler.waiting:
            self._fail(self._runs[sequence], UnavailableError("the server is shutting down", code="draining"))

    def _stop_running(self) -> None:
        for sequence in self._scheduler.running:
            self._finish(self._runs[sequence], FinishReason.SHUTDOWN)

    def _page(self, pager: Pager, sequence: Sequence) -> None:
        """Let the pages that matter be on the devices when the next step of a sequence runs."""
        slot, total = sequence.slot, len(sequence.prompt)
        assert slot is not None
        try:
            if sequence.prompt_left and not sequence.block and total > pager.size:
                sequence.block, sequence.question = pager.block, QUESTION
                pager.begin(slot, sequence.prompt, sequence.done)
            elif pager.due(slot, sequence.done):
                tokens = np.concatenate([sequence.prompt, np.array(sequence.reply, np.int32)])
                pager.rescore(slot, sequence.done, tokens)
            sequence.ahead = pager.ahead(slot, sequence.done)
        except LuceError as error:
            self._fail(self._runs[sequence], _backend_error(error))

    def _step(self, plan: Plan) -> None:
        begun = time.monotonic()
        try:
            output = self._backend.forward(plan.step)
        except Exception as error:
            if not isinstance(error, LuceError):
                _log.exception("a step failed")
            for part in plan.parts:
                self._fail(self._runs[part.sequence], _backend_error(error))
            self._progress = time.monotonic()
            return
        now = self._progress = time.monotonic()
        self._steps += 1
        self._scheduler.advance(plan)
        if self._speculator is not None:
            self._speculator.ran(plan, now - begun)
        for part in plan.parts:
            run = self._runs[part.sequence]
            try:
                self._commit(run, part, output, now)
            except Exception as error:
                self._reply_failed(run, error)

    def _resume(self, run: _Run) -> None:
        """Begin where the prefix cache leaves off."""
        sequence, cache = run.sequence, self.cache
        # Scores are wanted at every position; a sink that failed has ended the sequence.
        if cache is None or sequence.scored or run.ticket.over:
            return
        assert sequence.slot is not None
        hit = cache.resume(sequence.prompt, sequence.slot)
        if cache.exact and hit.length < hit.known < len(sequence.prompt):
            # Prompts part here that are alike up to here: the next one of this kind can be resumed where they do.
            sequence.cuts = tuple(sorted({*sequence.cuts, hit.known}))
        if not hit.length:
            return
        sequence.done = run.cached = hit.length
        run.tier, run.point = hit.tier, hit.point
        if self._speculator is not None and hit.point is not None:
            self._speculator.resumed(sequence.slot, hit.length, hit.point.features)
        try:
            run.on_event(Progress(sequence.done, len(sequence.prompt), run.cached))
            if not sequence.prompt_left:
                assert hit.point is not None and hit.point.logits is not None
                logits = hit.point.logits
                self._begin_reply(run, _Row(int(logits.argmax()), logits), time.monotonic())
        except Exception as error:
            self._reply_failed(run, error)

    def _keep(
        self, run: _Run, logits: NDArray[np.float32] | None = None, *, passing: bool = True, save: bool = True
    ) -> None:
        """Let later sequences begin where this one is."""
        sequence = run.sequence
        if self.cache is None or sequence.slot is None or not sequence.done:
            return
        if sequence.accepted and self._backend.recurrent:
            try:
                self._backend.accept(sequence.slot, sequence.path or range(sequence.accepted))
            except LuceError as error:
                _log.warning("a prefix could not be kept: %s", error)
                return
            sequence.accepted, sequence.path = 0, ()
        ids = np.concatenate([sequence.prompt, np.array(sequence.reply, np.int32)])[: sequence.done]
        tail = None if self._speculator is None else self._speculator.tail(sequence.slot, sequence.done)
        kept = self.cache.keep(sequence.slot, ids, logits, tail, passing=passing, after=run.point, save=save)
        run.point = kept or run.point

    def _commit(self, run: _Run, part: Part, output: Output, now: float) -> None:
        """Give a sequence its share of a step's output."""
        sequence = run.sequence
        total = len(sequence.prompt)
        rows = _rows(part, output)
        if part.position >= total:
            self._extend(run, rows, part)
            return
        self._prompt_tokens += part.rows
        run.on_event(Progress(sequence.done, total, run.cached))
        if sequence.scored:
            self._score_prompt(run, part, output)
        if sequence.prompt_left:
            if sequence.done in sequence.cuts:
                self._keep(run, passing=False)
            return
        if run.params.prompt_logprobs is not None:
            run.on_event(PromptScores(tuple(run.scores)))
        # A state is large; its end of the prompt is soon followed by the end of the reply.
        alone = self.cache is not None and not (self.cache.exact and run.bounded)
        row = rows[-1] if rows else _Row(-1)
        self._keep(run, None if row.logits is None else row.logits.copy(), save=alone)
        self._begin_reply(run, row, now)

    def _begin_reply(self, run: _Run, row: _Row, now: float) -> None:
        """The prompt is read: `row` is what comes behind it."""
        run.read = now
        computed = len(run.sequence.prompt) - run.cached
        if self.cache is not None and computed and run.started is not None:
            self.cache.note_read(computed, now - run.started)
        if run.sequence.room:
            self._extend(run, [row])
        else:
            self._finish(run, FinishReason.LENGTH)

    def _extend(self, run: _Run, rows: Many[_Row], part: Part | None = None) -> None:
        """The tokens behind the rows of a part that count: all up to the first that is not what was proposed there."""
        tokens: list[Token] = []
        path, reason, stop = [0], None, None
        while True:
            token = self._choose(run, rows[path[-1]])
            reason, text, stop = self._judge(run, token.id)
            tokens.append(replace(token, text=text))
            child = None if part is None else part.child(path[-1], token.id)
            if reason is not None or child is None:
                break
            path.append(child)
        if part is not None and part.proposal:
            self._accept(part, path)
            # The reply's last token may have been proposed as well, whatever ended it.
            right = path[1:] if child is None else [*path[1:], child]
            run.drafted += len(part.proposal)
            run.accepted += len(right)
            assert self._speculator is not None
            self._speculator.verified(run.sequence, part, right, over=reason is not None)
        run.on_event(Tokens(tuple(tokens)))
        if reason is not None:
            self._finish(run, reason, stop)

    def _accept(self, part: Part, path: Many[int]) -> None:
        """The rows of a proposal that count."""
        slot = part.sequence.slot
        assert slot is not None
        self._scheduler.accept(part, path)
        if part.sequence.path:
            self._backend.move_features(slot, part.position, part.sequence.path)

    def _choose(self, run: _Run, row: _Row) -> Token:
        """The next token: the likeliest, or what the sampler makes of the row."""
        token = row.token
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        if run.sampler is not None:
            if row.logits is not None:
                token = run.sampler.choose(row.logits)
            else:
                assert row.top is not None
                token = run.sampler.choose_among(*row.top)
            run.sampler.push(token)
            if run.params.logprobs is not None and row.logits is not None:
                logprob, top = score(row.logits, token, run.params.logprobs)
        run.sequence.reply.append(token)
        self._predicted_tokens += 1
        return Token(token, "", logprob, top)

    def _judge(self, run: _Run, token: int) -> tuple[FinishReason | None, str, str | int | None]:
        """Whether the reply's newest token ends it: (reason, text that is certain now, what stopped it)."""
        params, sequence = run.params, run.sequence
        if token in self._eos and not params.ignore_eos:
            return FinishReason.EOS, "", None
        if token in params.stop_token_ids:
            return FinishReason.STOP, "", token
        text = run.output.push(token)
        if run.output.stopped is not None:
            return FinishReason.STOP, text, run.output.stopped
        if len(sequence.reply) < sequence.room:
            return None, text, None
        return FinishReason.LENGTH if len(sequence.reply) == params.max_tokens else FinishReason.CONTEXT, text, None

    def _score_prompt(self, run: _Run, part: Part, output: Output) -> None:
        logits = output.logits[part.logits]
        if run.params.prompt_logits:
            run.on_event(PromptLogits(part.position, logits))
        if run.params.prompt_logprobs is None:
            return
        following = run.sequence.prompt[part.position + 1 : part.position + 1 + part.rows].tolist()
        for row, token in zip(logits, following, strict=False):
            logprob, top = score(row, token, run.params.prompt_logprobs)
            run.scores.append(Token(token, "", logprob, top))

    def _emit(self, run: _Run, event: Event) -> None:
        """Outside of `_commit`: an event whose sink may raise."""
        try:
            run.on_event(event)
        except Exception as error:
            _log.exception("an event sink failed")
            self._fail(run, _reply_error(error))

    def _finish(self, run: _Run, reason: FinishReason, stop: str | int | None = None) -> None:
        try:
            text = run.output.flush()
        except Exception as error:
            _log.exception("a reply failed")
            self._fail(run, _reply_error(error))
            return
        if not run.ticket.over:
            self._keep(run)
        self._end(run, Finished(reason, text, run.timings(time.monotonic()), run.seed, stop))

    def _reply_failed(self, run: _Run, error: Exception) -> None:
        """In an `except` block."""
        if not isinstance(error, LuceError):
            _log.exception("a reply failed")
        self._fail(run, _reply_error(error))

    def _fail(self, run: _Run, error: LuceError) -> None:
        self._end(run, Failed(error))

    def _end(self, run: _Run, event: Finished | Failed) -> None:
        """The last event. Slot and pages are free before it is seen."""
        if run.ticket.over:
            return
        run.ticket.over = True
        with self._lock:
            del self._runs[run.sequence], self._by_ticket[run.ticket]
            if self._speculator is not None:
                self._speculator.ended(run.sequence)
            if self._pager is not None and run.sequence.slot is not None:
                self._pager.release(run.sequence.slot)
            self._scheduler.remove(run.sequence)
            self._open -= 1
            if run.started is not None:
                taken = time.monotonic() - run.started
                self._service = taken if not self._service else self._service + _NEWEST * (taken - self._service)
        try:
            run.on_event(event)
        except Exception:
            _log.exception("an event sink failed")
        with self._lock:
            self._pending -= 1
            if not self._pending:
                self._quiet.notify_all()


def _rows(part: Part, output: Output) -> list[_Row]:
    """The wanted rows of a sequence's share."""
    ids, logits, top = output.ids[part.ids].tolist(), output.logits[part.logits], None
    if output.top is not None and part.top.stop > part.top.start:
        top = list(zip(output.top.ids[part.top], output.top.logits[part.top], strict=True))
    return [
        _Row(token, logits[row] if len(logits) else None, None if top is None else top[row])
        for row, token in enumerate(ids)
    ]


def _backend_error(error: Exception) -> BackendError:
    if isinstance(error, BackendError):
        return error
    wrapped = BackendError(str(error) if isinstance(error, LuceError) else f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _reply_error(error: Exception) -> LuceError:
    return error if isinstance(error, LuceError) else LuceError(f"the reply failed: {type(error).__name__}: {error}")
