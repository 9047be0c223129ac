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
from dataclasses import dataclass
from math import inf

import numpy as np

from luce.backend.backend import Backend
from luce.engine.pages import Pages
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
from luce.errors import (
    BackendError,
    ContextError,
    LuceError,
    QueueFullError,
    RequestError,
    ShardLostError,
    UnavailableError,
)
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

    def timings(self, now: float) -> Timings:
        started = now if self.started is None else self.started
        read = now if self.read is None else self.read
        return Timings(
            queued=started - self.submitted,
            prompt=read - started,
            predicted=now - read,
            prompt_tokens=min(self.sequence.done, len(self.sequence.prompt)),
            predicted_tokens=len(self.sequence.reply),
        )


class Engine:
    """Runs sequences on a backend, which it does not close.

    eos: ids that end a reply. max_queue: sequences that may wait beyond those that have a slot. chunk: prompt rows in
    a step. max_queue_seconds, timeout: longest wait and longest life of a sequence, 0 for no limit.
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
    ) -> None:
        self._backend = backend
        self._eos = eos
        self._slots = backend.slots
        self._max_queue = max_queue
        self._max_queue_seconds = max_queue_seconds
        self._timeout = timeout
        self._pages = Pages(backend.pages, backend.windows, slots=backend.slots, context=backend.context, chunk=chunk)
        self._context = self._pages.longest
        self._scheduler = Scheduler(
            self._pages, slots=backend.slots, chunk=chunk, scored=max(1, _SCORED_BYTES // (4 * backend.vocab))
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
    ) -> Ticket:
        """Queue a prompt; `on_event` gets its events on the engine thread.

        Started, Progress and PromptLogits, PromptScores, Tokens, then exactly one Finished or Failed. `session` shares
        the queue fairly. `timeout` in seconds from now (0: the engine's alone) ends it with FinishReason.DEADLINE.
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
            deadline=now + min(limits) if limits else inf,
            queue_deadline=now + self._max_queue_seconds if self._max_queue_seconds > 0 else inf,
        )
        ticket = Ticket(self._inbox, self._cancel)
        ends = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | self._eos
        known = frozenset(i for i in ends if 0 <= i < self._backend.vocab)
        run = _Run(ticket, sequence, params, output, on_event, known, now)
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
            )

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

    def _turn(self) -> bool:
        """One round: commands, deadlines, admission, a step. False when the engine is to end."""
        if not self._runs:
            with self._lock:
                self._work.wait_for(lambda: self._inbox or self._closing)
        self._work_off_inbox()
        if self._closing:
            return False
        if self._backend.lost():
            for sequence in self._scheduler.running:
                if sequence.done:
                    self._fail(
                        self._runs[sequence], ShardLostError("a shard was lost, and with it what the reply stands on")
                    )
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
        plan = self._scheduler.plan()
        if plan is not None:
            self._step(plan)
        return True

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

    def _step(self, plan: Plan) -> None:
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
        for part in plan.parts:
            run = self._runs[part.sequence]
            try:
                self._commit(run, part, output, now)
            except Exception as error:
                if not isinstance(error, LuceError):
                    _log.exception("a reply failed")
                self._fail(run, _reply_error(error))

    def _commit(self, run: _Run, part: Part, output: Output, now: float) -> None:
        """Give a sequence its share of a step's output."""
        sequence = run.sequence
        total = len(sequence.prompt)
        if part.position < total:
            self._prompt_tokens += part.rows
            run.on_event(Progress(sequence.done, total))
            if sequence.scored:
                self._score_prompt(run, part, output)
            if sequence.prompt_left:
                return
            run.read = now
            if run.params.prompt_logprobs is not None:
                run.on_event(PromptScores(tuple(run.scores)))
            if not sequence.room:
                self._finish(run, FinishReason.LENGTH)
                return
        token = int(output.ids[part.ids][-1])
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        if run.sampler is not None:
            logits = output.logits[part.logits]
            if len(logits):
                token = run.sampler.choose(logits[-1])
            else:
                assert output.top is not None
                token = run.sampler.choose_among(output.top.ids[part.top][-1], output.top.logits[part.top][-1])
            run.sampler.push(token)
            if run.params.logprobs is not None:
                logprob, top = score(logits[-1], token, run.params.logprobs)
        sequence.reply.append(token)
        self._predicted_tokens += 1
        reason, text, stop = self._judge(run, token)
        run.on_event(Tokens((Token(token, text, logprob, top),)))
        if reason is not None:
            self._finish(run, reason, stop)

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
        self._end(run, Finished(reason, text, run.timings(time.monotonic()), run.seed, stop))

    def _fail(self, run: _Run, error: LuceError) -> None:
        self._end(run, Failed(error))

    def _end(self, run: _Run, event: Finished | Failed) -> None:
        """The last event. Slot and pages are free before it is seen."""
        if run.ticket.over:
            return
        run.ticket.over = True
        with self._lock:
            del self._runs[run.sequence], self._by_ticket[run.ticket]
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


def _backend_error(error: Exception) -> BackendError:
    if isinstance(error, BackendError):
        return error
    wrapped = BackendError(str(error) if isinstance(error, LuceError) else f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _reply_error(error: Exception) -> LuceError:
    return error if isinstance(error, LuceError) else LuceError(f"the reply failed: {type(error).__name__}: {error}")
