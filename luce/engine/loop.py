"""Engine: one thread that turns submitted prompts into events, by way of scheduler, backend and sampler.

Other threads hand it their wishes through the intake; everything else belongs to the engine thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from concurrent.futures import Future
from dataclasses import dataclass
from math import inf

import numpy as np

from luce.backend.backend import Backend
from luce.config.sampling import SamplingParams
from luce.draft.drafter import Drafter
from luce.draft.feature_tail import FeatureTails
from luce.engine.admission import Admission, Ticket, shutting_down
from luce.engine.checkpoints import Checkpoints
from luce.engine.events import (
    Event,
    EventSink,
    Failed,
    Finished,
    FinishReason,
    Progress,
    Started,
    TextOutput,
    Token,
    Tokens,
)
from luce.engine.reply import Reply, Row, rows_of
from luce.engine.sampling import needs_candidates, needs_logits
from luce.engine.scheduler import Plan, Scheduler, Sequence, StepShare
from luce.engine.speculate import DraftStats, Speculator
from luce.errors import BackendError, ContextError, LuceError, RequestError, ShardLostError
from luce.kvcache.disk.stats import CachedPrefix
from luce.kvcache.disk.tier import DiskTier
from luce.kvcache.page_table import PageTables
from luce.kvcache.paging import QUESTION, KVFlash, Pager, PagingStats
from luce.kvcache.prefix_cache import CacheStats, PrefixCache
from luce.ops.matmul import FEW_ROWS
from luce.runtime.step import Int32, Output

_log = logging.getLogger(__name__)

# Bytes of logits that prompt scoring may take in one step.
_SCORED_BYTES = 64 << 20


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
    residency: PagingStats | None = None


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
    undrafted: why there is no drafter, if one was wanted.
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
        tails: FeatureTails | None = None,
        kvflash: KVFlash | None = None,
        undrafted: str = "",
    ) -> None:
        self._backend = backend
        self._eos = eos
        self._slots = backend.capacity.slots
        self._max_queue_seconds = max_queue_seconds
        self._timeout = timeout
        self._pages = PageTables.over(backend, chunk)
        self._pager = None if kvflash is None else Pager.over(backend, self._pages.groups, kvflash, chunk)
        self._context = self._pages.longest
        #: belongs to the engine's thread, but for what it says that any thread may call
        self.cache: PrefixCache | None = None
        self._flush_seconds = flush_seconds
        if cache_bytes:
            self.cache = PrefixCache(backend, self._pages.groups, cache_bytes, disk, disk_tokens, self._pager)
            for group in self._pages.groups:
                group.reclaim = self.cache.memory.reclaim
        self._scheduler = Scheduler(
            self._pages,
            slots=backend.capacity.slots,
            chunk=chunk,
            scored=max(1, _SCORED_BYTES // (4 * backend.capacity.vocab)),
        )
        self._undrafted = DraftStats({}, f"refused: {undrafted}") if undrafted else None
        self._speculator: Speculator | None = None
        if drafter is not None:
            # More rows, of all sequences together, would have other bits (luce.ops.matmul).
            self._speculator = Speculator(
                drafter,
                vocab=backend.capacity.vocab,
                rows=FEW_ROWS,
                verify=min(backend.capacity.verify_rows, chunk),
                width=verify_width,
                tree=tree,
                tails=tails,
            )
        self._saver = None if self.cache is None else self.cache.saver
        self._points: Checkpoints | None = None
        if self.cache is not None:
            self._points = Checkpoints(self.cache, backend, self._speculator, cache_interval)
        self._intake = Admission(slots=backend.capacity.slots, max_queue=max_queue)
        self._replies: dict[Sequence, Reply] = {}
        self._by_ticket: dict[Ticket, Reply] = {}
        #: who is still to be told of what replies have got
        self._unreported: list[tuple[Reply, Callable[[], None]]] = []
        self._prompt_tokens = self._predicted_tokens = self._cancelled = self._steps = 0
        if disk is not None:
            disk.wake = self._intake.wake
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
        shared: int | None = None,
    ) -> Ticket:
        """Queue a prompt; `on_event` gets its events on the engine thread.

        Started, Progress and PromptLogits, PromptScores, Tokens, then exactly one Finished or Failed. `session` shares
        the queue fairly. `timeout` in seconds from now (0: the engine's alone) ends it with FinishReason.DEADLINE.
        `boundaries`: lengths, ascending, at which prompts are likely to part (luce.text.boundaries). `shared`: how many
        of the prompt's first tokens the prefix cache may find and keep; None for all of it, and the reply.
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
            kept=self.cache is not None and (shared is None or shared >= len(ids)),
            cuts=() if self._points is None else self._points.cuts(boundaries, len(ids), shared),
            shared=shared,
            deadline=now + min(limits) if limits else inf,
            queue_deadline=now + self._max_queue_seconds if self._max_queue_seconds > 0 else inf,
        )
        ticket = self._intake.ticket(self._cancel)
        reply = Reply(
            ticket,
            sequence,
            params,
            output,
            on_event,
            eos=self._eos,
            vocab=self._backend.capacity.vocab,
            bounded=any(0 < at < len(ids) for at in boundaries),
            submitted=now,
        )
        self._intake.enter(lambda: self._add(reply))
        return ticket

    def stats(self) -> EngineStats:
        """Numbers for people and for the watchdog."""
        queued, running, stalled = self._intake.counts()
        return EngineStats(
            queued=queued,
            running=running,
            slots=self._slots,
            pages_used=self._pages.used,
            pages_total=self._pages.total,
            prompt_tokens=self._prompt_tokens,
            predicted_tokens=self._predicted_tokens,
            cancelled=self._cancelled,
            steps=self._steps,
            stalled=stalled,
            cache=CacheStats() if self.cache is None else self.cache.stats(),
            draft=self._undrafted if self._speculator is None else self._speculator.stats(),
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
        self._intake.drain()
        self._intake.tell(self._refuse_waiting)

    def stop_running(self) -> None:
        """End the sequences that run, with FinishReason.SHUTDOWN, before the next step."""
        self._intake.tell(self._stop_running)

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until every sequence has had its last event; False if that takes longer than `timeout` seconds."""
        return self._intake.wait_idle(timeout)

    def close(self) -> None:
        """End everything and join the thread, after the step that runs. Idempotent."""
        self._intake.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _between_steps(self, ask: Callable[[PrefixCache], list[CachedPrefix]]) -> list[CachedPrefix]:
        if self.cache is None:
            return []
        cache, answer = self.cache, Future[list[CachedPrefix]]()

        def work() -> None:
            try:
                answer.set_result(ask(cache))
            except Exception as error:
                answer.set_exception(error)

        return answer.result() if self._intake.tell(work) else []

    def _check_prompt(self, prompt: Many[int], params: SamplingParams) -> Int32:
        vocab = self._backend.capacity.vocab
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

    # What follows runs on the engine thread.

    def _main(self) -> None:
        error: LuceError = shutting_down()
        broken = False
        try:
            while self._turn():
                pass
        except Exception as bug:
            _log.exception("the engine stopped")
            broken = True
            error = BackendError(f"the engine stopped: {type(bug).__name__}: {bug}")
        # Nothing is added from here on, so the inbox that is worked off below is the last one.
        self._intake.close(broken=broken)
        self._intake.work_off()
        for reply in list(self._replies.values()):
            if reply.sequence.slot is not None and not broken:
                self._finish(reply, FinishReason.SHUTDOWN)
            else:
                self._fail(reply, error)
        if self._speculator is not None:
            self._speculator.close()
        if self._pager is not None:
            self._pager.close()
        if self._saver is not None:
            self._saver.flush(0 if broken else self._flush_seconds)

    def _turn(self) -> bool:
        """One round: commands, deadlines, admission, a step. False when the engine is to end."""
        if not self._replies:
            if self._speculator is not None:
                self._speculator.idle()
            self._intake.wait(lambda: self._saver is not None and self._saver.pending)
        if self._ending():
            return False
        if loss := self._backend.lost():
            self._forget(loss)
        now = time.monotonic()
        expired, overdue = self._scheduler.late(now)
        for sequence in expired:
            self._finish(self._replies[sequence], FinishReason.DEADLINE)
        for sequence in overdue:
            message = f"waited {self._max_queue_seconds:g} s in the queue (--max-queue-seconds)"
            self._fail(self._replies[sequence], self._intake.full(message))
        for sequence in self._scheduler.admit():
            self._intake.admitted()
            reply = self._replies[sequence]
            reply.started = now
            self._emit(reply, Started())
            # Other replies' sinks do not wait for what may take long.
            self._report()
            self._resume(reply)
        if self._pager is not None:
            self._report()
            for sequence in self._scheduler.running:
                self._page(self._pager, sequence)
        if self._speculator is not None:
            self._speculator.ask(self._scheduler.running)
        # What the next step does not wait for, while drafts are made; but sinks may have wishes of their own.
        self._report()
        if self._saver is not None:
            self._saver.pump(idle=not self._replies)
        ending, plan = self._ending(), self._drafted_plan()
        if ending:
            return False
        if plan is not None:
            for sequence, error in plan.failed:
                self._fail(self._replies[sequence], _backend_error(error))
            if plan.parts:
                self._step(plan)
        return True

    def _ending(self) -> bool:
        """Do what other threads, or sinks, want done; whether that is to end."""
        self._intake.work_off()
        return self._intake.closing

    def _drafted_plan(self) -> Plan | None:
        """The next step, with what is drafted for it. As far as it does not depend on that, it is planned before."""
        if self._speculator is None or not self._speculator.asking:
            return self._scheduler.plan()
        plan = None
        # Prompts share a step in turns, which each plan counts, and pages leave for the rows that are planned.
        if self._pager is None and not any(sequence.prompt_left for sequence in self._scheduler.running):
            plan = self._scheduler.plan()
        self._speculator.take()
        return (None if plan is None else self._scheduler.filled(plan)) or self._scheduler.plan()

    def _forget(self, loss: str) -> None:
        """The backend has forgotten everything: so do those who build on it."""
        if self.cache is not None:
            self.cache.memory.clear()
        for sequence in self._scheduler.running:
            if sequence.done:
                self._fail(self._replies[sequence], ShardLostError(loss))

    def _add(self, reply: Reply) -> None:
        self._replies[reply.sequence] = self._by_ticket[reply.ticket] = reply
        self._scheduler.add(reply.sequence)

    def _cancel(self, ticket: Ticket) -> None:
        reply = self._by_ticket.get(ticket)
        if reply is not None:
            self._cancelled += 1
            self._finish(reply, FinishReason.CANCELLED)

    def _refuse_waiting(self) -> None:
        for sequence in self._scheduler.waiting:
            self._fail(self._replies[sequence], shutting_down())

    def _stop_running(self) -> None:
        for sequence in self._scheduler.running:
            self._finish(self._replies[sequence], FinishReason.SHUTDOWN)

    def _page(self, pager: Pager, sequence: Sequence) -> None:
        """Let the pages that matter be on the devices when the next step of a sequence runs."""
        slot, total = sequence.slot, len(sequence.prompt)
        assert slot is not None
        try:
            if sequence.prompt_left and not sequence.block and total > pager.size:
                sequence.block, sequence.question = pager.block, QUESTION
                pager.begin(slot, sequence.prompt, sequence.done)
            elif pager.due(slot, sequence.done):
                pager.rescore(slot, sequence.done, sequence.tokens)
            sequence.ahead = pager.ahead(slot, sequence.done)
        except LuceError as error:
            self._fail(self._replies[sequence], _backend_error(error))

    def _step(self, plan: Plan) -> None:
        begun = time.monotonic()
        try:
            output = self._backend.forward(plan.step, lambda: self._queued(plan))
        except Exception as error:
            if not isinstance(error, LuceError):
                _log.exception("a step failed")
            for part in plan.parts:
                self._fail(self._replies[part.sequence], _backend_error(error))
            self._intake.stepped()
            return
        now = time.monotonic()
        self._intake.stepped()
        self._steps += 1
        self._scheduler.advance(plan)
        if self._speculator is not None:
            self._speculator.ran(plan, now - begun)
        for part in plan.parts:
            reply = self._replies[part.sequence]
            try:
                self._commit(reply, part, output, now)
            except Exception as error:
                self._reply_failed(reply, error)

    def _queued(self, plan: Plan) -> None:
        """The devices have a step, whose output nobody has waited for yet."""
        if self._speculator is not None:
            self._speculator.observe(plan)

    def _resume(self, reply: Reply) -> None:
        """Begin where the prefix cache leaves off."""
        sequence = reply.sequence
        # A sink that failed has ended the sequence.
        hit = None if self._points is None or reply.ticket.over else self._points.resume(sequence)
        if hit is None:
            return
        reply.cached, reply.tier = hit.length, hit.tier
        try:
            reply.on_event(Progress(sequence.done, len(sequence.prompt), reply.cached))
            if hit.logits is not None:
                self._begin(reply, Row(int(hit.logits.argmax()), hit.logits), time.monotonic())
        except Exception as error:
            self._reply_failed(reply, error)

    def _commit(self, reply: Reply, part: StepShare, output: Output, now: float) -> None:
        """Give a sequence its share of a step's output."""
        sequence = reply.sequence
        total = len(sequence.prompt)
        rows = rows_of(part, output)
        if part.position >= total:
            self._extend(reply, rows, part)
            return
        self._prompt_tokens += part.rows
        # What is left of a prompt may be read when its reply has begun, as the logits behind it were known.
        begun = bool(sequence.reply)
        if not begun:
            reply.on_event(Progress(sequence.done, total, reply.cached))
        if sequence.scored:
            reply.score_prompt(part, output)
        if sequence.prompt_left:
            if self._points is not None:
                self._points.reading(sequence)
            return
        reply.report_scores()
        row = rows[-1] if rows else Row(-1)
        if self._points is not None:
            self._points.read(sequence, row.logits, bounded=reply.bounded)
        if not begun:
            self._begin(reply, row, now)

    def _begin(self, reply: Reply, row: Row, now: float) -> None:
        """`row` is what comes behind the prompt."""
        reply.read = now
        computed = reply.sequence.done - reply.cached
        if self.cache is not None and computed and reply.started is not None:
            self.cache.note_read(computed, now - reply.started)
        if reply.sequence.room:
            self._extend(reply, [row])
        else:
            self._finish(reply, FinishReason.LENGTH)

    def _extend(self, reply: Reply, rows: Many[Row], part: StepShare | None = None) -> None:
        """The tokens behind the rows of a part that count: all up to the first that is not what was proposed there."""
        tokens: list[Token] = []
        path, reason, stop = [0], None, None
        while True:
            token = reply.choose(rows[path[-1]])
            self._predicted_tokens += 1
            reason, text, stop = reply.judge(token.id)
            # dataclasses.replace takes three times as long, and the draft waits for as many tokens as counted.
            tokens.append(Token(token.id, text, token.logprob, token.top))
            child = None if part is None else part.child(path[-1], token.id)
            if reason is not None or child is None:
                break
            path.append(child)
        if part is not None and part.proposal:
            self._accept(part, path)
            # The reply's last token may have been proposed as well, whatever ended it.
            right = path[1:] if child is None else [*path[1:], child]
            reply.drafted += len(part.proposal)
            reply.accepted += len(right)
            over, speculator = reason is not None, self._speculator
            assert speculator is not None
            self._unreported.append((reply, lambda: speculator.verified(reply.sequence, part, right, over=over)))
        self._unreported.append((reply, lambda: reply.on_event(Tokens(tuple(tokens)))))
        if reason is not None:
            self._finish(reply, reason, stop)

    def _report(self) -> None:
        """Tell of what replies have got: nobody has heard of it yet."""
        unreported, self._unreported = self._unreported, []
        for reply, tell in unreported:
            if reply.ticket.over:
                continue
            try:
                tell()
            except Exception as error:
                self._reply_failed(reply, error)

    def _accept(self, part: StepShare, path: Many[int]) -> None:
        """The rows of a proposal that count."""
        slot = part.sequence.slot
        assert slot is not None
        self._scheduler.accept(part, path)
        if part.sequence.path:
            self._backend.move_features(slot, part.position, part.sequence.path)

    def _emit(self, reply: Reply, event: Event) -> None:
        """Outside of `_commit`: an event whose sink may raise."""
        try:
            reply.on_event(event)
        except Exception as error:
            _log.exception("an event sink failed")
            self._fail(reply, _reply_error(error))

    def _finish(self, reply: Reply, reason: FinishReason, stop: str | int | None = None) -> None:
        self._report()
        if reply.ticket.over:
            return
        try:
            text = reply.output.flush()
        except Exception as error:
            _log.exception("a reply failed")
            self._fail(reply, _reply_error(error))
            return
        if self._points is not None and not reply.ticket.over:
            self._points.finished(reply.sequence, reply.output.texts)
        self._end(reply, Finished(reason, text, reply.timings(time.monotonic()), reply.seed, stop))

    def _reply_failed(self, reply: Reply, error: Exception) -> None:
        """In an `except` block."""
        if not isinstance(error, LuceError):
            _log.exception("a reply failed")
        self._fail(reply, _reply_error(error))

    def _fail(self, reply: Reply, error: LuceError) -> None:
        self._end(reply, Failed(error))

    def _end(self, reply: Reply, event: Finished | Failed) -> None:
        """The last event. Slot and pages are free before it is seen."""
        self._report()
        sequence, ticket = reply.sequence, reply.ticket
        if ticket.over:
            return
        ticket.over = True
        del self._replies[sequence], self._by_ticket[ticket]
        if self._points is not None:
            self._points.ended(sequence)
        if self._speculator is not None:
            self._speculator.ended(sequence)
        if self._pager is not None and sequence.slot is not None:
            self._pager.release(sequence.slot)
        self._scheduler.remove(sequence)
        self._intake.left(None if reply.started is None else time.monotonic() - reply.started)
        try:
            reply.on_event(event)
        except Exception:
            _log.exception("an event sink failed")
        self._intake.gone()


def _backend_error(error: Exception) -> BackendError:
    if isinstance(error, BackendError):
        return error
    wrapped = BackendError(str(error) if isinstance(error, LuceError) else f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _reply_error(error: Exception) -> LuceError:
    return error if isinstance(error, LuceError) else LuceError(f"the reply failed: {type(error).__name__}: {error}")
