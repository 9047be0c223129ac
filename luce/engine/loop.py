"""Engine: one thread that turns submitted prompts into events, by way of scheduler, backend and sampler.

Other threads reach it through luce.engine.admission; all other state belongs to the engine's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from math import inf

import numpy as np

from luce.backend.backend import Backend
from luce.config.sampling import SamplingParams
from luce.draft.drafter import Drafter
from luce.draft.feature_tail import FeatureTails
from luce.engine.admission import SequenceHandle, shutting_down_error
from luce.engine.commit import Committer
from luce.engine.delivery import Delivery
from luce.engine.drafted import DraftStats
from luce.engine.engine_options import EngineOptions, EngineStats, SlotStats
from luce.engine.events import EventSink, FinishReason, Started, TextOutput, Timings
from luce.engine.failures import Failures
from luce.engine.masks import StepMasks
from luce.engine.overlap import Overlap
from luce.engine.parts import EngineParts
from luce.engine.reasoning_limit import ReasoningLimit
from luce.engine.recovery import POLL_INTERVAL, Recovery
from luce.engine.relocation import Relocation
from luce.engine.reply import Reply
from luce.engine.request_checks import check_given, checked_prompt, set_position_ids
from luce.engine.sampling import device_draws, needs_logits, reply_ends
from luce.engine.scheduler import ScheduledStep
from luce.engine.sequence import CacheState, Constraint, Sequence
from luce.engine.stretching import Stretching
from luce.errors import BackendError, LuceError, ShardLostError, UnavailableError
from luce.kvcache.disk.stats import CachedPrefix
from luce.kvcache.disk.tier import DiskTier
from luce.kvcache.paging import KVFlash
from luce.kvcache.prefix_cache import CacheStats, PrefixCache
from luce.runtime.step import Int32

_log = logging.getLogger(__name__)


class Engine:
    """Runs sequences on a backend, which it does not close.

    disk           the disk tier of the prefix cache; closing the engine flushes it
    kvflash        how pages of long sequences are swapped, needed where the backend bounds the pages of a sequence
    drafter        proposes tokens; it is closed with the engine
    feature_tails  the part of the drafter's feature ring that is saved with checkpoints
    on_verified    gets the draft rows that a sequence's step verified, and how many it accepted, on the engine's
                   thread; not where a grammar or the limit of the reasoning forced some
    """

    def __init__(
        self,
        backend: Backend,
        options: EngineOptions,
        *,
        disk: DiskTier | None = None,
        kvflash: KVFlash | None = None,
        drafter: Drafter | None = None,
        feature_tails: FeatureTails | None = None,
        on_verified: Callable[[int, int], None] | None = None,
    ) -> None:
        self._backend = backend
        self._options = options
        #: the collaborators, which belong to the engine's thread except for the methods that say otherwise
        self.parts = parts = EngineParts.build(
            backend,
            options,
            disk=disk,
            kvflash=kvflash,
            drafter=drafter,
            feature_tails=feature_tails,
            on_verified=on_verified,
        )
        self._admission = parts.admission
        self._scheduler = parts.scheduler
        self._speculator = parts.speculator
        self._context = parts.pages.longest
        self.cache: PrefixCache | None = parts.cache
        self._saver = None if parts.cache is None else parts.cache.saver
        self._masker = parts.masker
        self._delivery = Delivery(parts)
        self._committer = Committer(parts, self._delivery)
        self._recovery = Recovery(backend, parts, self._delivery, self._committer, options.resume_seconds)
        self._relocation = Relocation(backend, parts, self._delivery, self._recovery, self._forget_lost)
        self._overlap = Overlap(backend, parts, self._delivery, self._relocation, self._recovery)
        self._stretching = Stretching(options.original_context, parts, self._delivery, self._committer)
        #: whether there is a drafter: without one, only what grammars force is drafted
        self._drafts = drafter is not None
        self._cancelled = self._steps = 0
        self._step_ended = 0.0
        self._thread = threading.Thread(target=self._main, name="luce-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Many[int],
        params: SamplingParams,
        *,
        output: TextOutput,
        on_event: EventSink,
        position_ids: Int32 | None = None,
        session: str = "",
        timeout: float = 0,
        boundaries: Many[int] = (),
        max_cached_tokens: int | None = None,
        constraint: Constraint | None = None,
        reasoning: ReasoningLimit | None = None,
        given: Many[int] = (),
    ) -> SequenceHandle:
        """Queue a prompt; `on_event` gets its events on the engine's thread.

        The events are Started, Progress and PromptLogits, PromptScores, Tokens, then exactly one Finished or Failed.
        `position_ids`, int32 [n]: the position of each token of the prompt in a longer text that it is a part of,
        ascending; the reply goes on from there, up to the length for which the model was trained. None: they are
        counted.

        Sessions share slots and prompts. `timeout`, in seconds from now (0: only the engine's holds), ends the
        sequence with FinishReason.DEADLINE. `boundaries`: lengths, ascending, at which prompts often diverge
        (luce.text.boundaries). `max_cached_tokens`: how many of the prompt's first tokens the prefix cache may restore
        and save; None for the whole prompt, and the reply. `constraint`: which tokens the reply may hold; it belongs to
        this reply. `reasoning`: how long its reasoning may be, and what ends it then. `given`: the first tokens of the
        reply, which another engine has chosen with the same seed; the reply goes on behind them as it would have there,
        and no event has them.

        Raises RequestError (no token, an id outside the vocabulary, position ids that are not as described, or given
        tokens where prompts are scored or KVFlash swaps pages), ContextError, QueueFullError, UnavailableError.
        """
        ids = checked_prompt(prompt, params, vocab=self._backend.capacity.vocab, context=self._context)
        sequence = self._sequence(ids, params, session, timeout, self._cache_state(ids, boundaries, max_cached_tokens))
        if position_ids is not None:
            set_position_ids(sequence, position_ids, self._options.positions)
        if given:
            check_given(given, sequence, vocab=self._backend.capacity.vocab, paged=self.parts.paging is not None)
        self._stretching.begin(sequence)
        sequence.constraint, sequence.reasoning = constraint, reasoning
        handle = self._admission.handle(self._cancel)
        reply = Reply(
            handle,
            sequence,
            params,
            output,
            on_event,
            eos=self._options.eos,
            submitted_at=time.monotonic(),
            given=tuple(given),
        )
        self._admission.submit(lambda: self._add(reply))
        return handle

    def stats(self) -> EngineStats:
        """Numbers at this moment. Any thread may ask."""
        waiting, running, stalled = self._admission.counts()
        parts, reason = self.parts, self._options.no_drafter_reason
        no_draft = DraftStats({}, f"refused: {reason}") if reason else None
        return EngineStats(
            waiting=waiting,
            running=running,
            slots=self._backend.capacity.slots,
            pages_used=parts.pages.used,
            pages_total=parts.pages.total,
            prompt_tokens=self._committer.prompt_tokens,
            predicted_tokens=self._committer.predicted_tokens,
            cancelled=self._cancelled,
            steps=self._steps,
            stalled=stalled,
            cache=CacheStats() if parts.cache is None else parts.cache.stats(),
            draft=parts.speculator.stats() if self._drafts and parts.speculator is not None else no_draft,
            forced=(0, 0) if parts.speculator is None else parts.speculator.forced(),
            paging=None if parts.pager is None else parts.pager.stats(),
            resumed=self._recovery.resumed,
            masks=parts.masker.stats(),
            finished=self._delivery.finished,
        )

    def slots(self) -> tuple[SlotStats, ...]:
        """The slots that have a sequence, in order. Any thread may ask, also while a step runs."""
        found = []
        for sequence in self._scheduler.running:
            # Read once: the engine's thread goes on meanwhile.
            slot, computed, predicted = sequence.slot, sequence.computed, len(sequence.reply)
            if slot is not None:
                prompt = len(sequence.prompt)
                number, left = sequence.schedule.number, max(0, sequence.max_new_tokens - predicted)
                drafts = None if self._speculator is None else self._speculator.drafts(sequence)
                found.append(SlotStats(slot, number, prompt, min(computed, prompt), predicted, left, drafts))
        return tuple(sorted(found, key=lambda stats: stats.slot))

    def cached_prefixes(self) -> list[CachedPrefix]:
        """The contents of the prefix cache, the newest first. Blocks until the engine's thread is between two steps."""
        return self._between_steps(lambda cache: cache.contents())

    def prefix_ids(self, prompt: Many[int], params: SamplingParams, position_ids: Int32 | None = None) -> list[int]:
        """What the prefix cache would know the tokens of a prompt by; arguments as of `submit`."""
        sequence = self._sequence(np.array(prompt, np.int32), params, "", 0, CacheState())
        sequence.position_ids = position_ids
        self._stretching.begin(sequence)
        found: list[int] = sequence.prefix_ids.tolist()
        return found

    def clear_cache(self) -> int:
        """Empty the prefix cache, memory and disk; returns how many prefixes it had. Blocks as `cached_prefixes`."""
        return len(self._between_steps(lambda cache: cache.clear()))

    def reset_counters(self) -> None:
        """Count steps and tokens from zero again. Blocks until the engine's thread is between two steps."""

        def reset() -> None:
            self._steps = self._committer.prompt_tokens = self._committer.predicted_tokens = 0
            self._delivery.finished = Timings()

        self._admission.call(reset, None)

    def relocate(self, replace: Callable[[], None], drain: float = 0.0) -> None:
        """Let `replace` load the backend on other devices, on the engine's thread between two steps; running replies go
        on behind it. `drain`: seconds that they have to end before it; no other begins meanwhile. Blocks.

        Raises what `replace` raises, and UnavailableError if the engine ends. Not for an engine with KVFlash or with a
        drafter on the backend's devices.
        """
        self._relocation.move(self._admission, replace, drain)

    def measure_drafting(self, seconds: float) -> None:
        """Measure what steps with drafts take on this device, for about so long at most, unless a sequence has begun.
        Blocks until that is done."""

        def measure() -> None:
            # Pages of sequences and of the prefix cache would be written to.
            free = not len(self._delivery) and all(group.free == group.total for group in self.parts.pages.groups)
            if self._speculator is not None and free:
                self._speculator.measure_costs(self._backend, seconds)

        self._admission.call(measure, None)

    def drain(self) -> None:
        """Refuse new sequences and fail those that wait; those that run go on. Idempotent."""
        self._admission.drain()
        self._admission.post(self._refuse_waiting)

    def end_replies(self, why: str) -> None:
        """Fail the sequences that wait or run, before the next step, with UnavailableError or, while a lost shard is
        awaited, ShardLostError."""
        self._admission.post(lambda: self._end_replies(why))

    def stop_running(self) -> None:
        """End the sequences that run, with FinishReason.SHUTDOWN, before the next step."""
        self._admission.post(self._stop_running)

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until every sequence has had its last event; False if that takes longer than `timeout` seconds."""
        return self._admission.wait_idle(timeout)

    def close(self) -> None:
        """End everything and join the thread, after the step that runs. Idempotent."""
        self._admission.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _between_steps(self, work: Callable[[PrefixCache], list[CachedPrefix]]) -> list[CachedPrefix]:
        """What `work` finds in the prefix cache; nothing without one, and once the engine is closed."""
        cache, nothing = self.cache, list[CachedPrefix]()
        return nothing if cache is None else self._admission.call(lambda: work(cache), nothing)

    def _cache_state(self, ids: Int32, boundaries: Many[int], max_tokens: int | None) -> CacheState:
        checkpoints = self.parts.checkpoints
        return CacheState(
            max_tokens=max_tokens,
            lengths=() if checkpoints is None else checkpoints.checkpoint_lengths(boundaries, len(ids), max_tokens),
            saves_logits=checkpoints is not None and (max_tokens is None or max_tokens >= len(ids)),
            has_boundary=any(0 < at < len(ids) for at in boundaries),
        )

    def _sequence(
        self, ids: Int32, params: SamplingParams, session: str, timeout: float, cache: CacheState
    ) -> Sequence:
        rest, now = self._context - len(ids), time.monotonic()
        limits = [t for t in (timeout, self._options.timeout) if t > 0]
        queue_seconds = self._options.max_queue_seconds
        return Sequence(
            prompt=ids,
            max_new_tokens=rest if params.max_tokens is None else min(params.max_tokens, rest),
            session=session,
            needs_logits=needs_logits(params) and not device_draws(params),
            device_draws=device_draws(params),
            ends=reply_ends(params, self._options.eos, self._backend.capacity.vocab),
            scores_prompt=params.prompt_logits or params.prompt_logprobs is not None,
            deadline=now + min(limits) if limits else inf,
            queue_deadline=now + queue_seconds if queue_seconds > 0 else inf,
            cache=cache,
        )

    # Methods from here on run on the engine's thread.

    def _main(self) -> None:
        error: LuceError = shutting_down_error()
        broken = False
        try:
            while self._follow() or self._turn():
                pass
        except Exception as bug:
            _log.exception("the engine stopped")
            broken = True
            error = BackendError(f"the engine stopped: {type(bug).__name__}: {bug}")
        # No sequence is admitted from here on, so the commands below are the last ones.
        self._admission.close(broken=broken)
        self._admission.run_commands()
        for reply in self._delivery:
            if reply.sequence.slot is not None and not broken:
                self._delivery.finish(reply, FinishReason.SHUTDOWN)
            else:
                self._delivery.fail(reply, error)
        if self._speculator is not None:
            self._speculator.close()
        self._masker.close()
        if self.parts.pager is not None:
            self.parts.pager.close()
        if self._saver is not None:
            self._saver.flush(0 if broken else self._options.flush_seconds)

    def _follow(self) -> bool:
        """Finish the step that is queued behind the last one; False if there is none."""
        if (ahead := self._overlap.take()) is None:
            return False
        if self._saver is not None:
            self._saver.pump(idle=False)
        self._step(ahead, self._step_ended)
        self._delivery.end_failed()
        return True

    def _turn(self) -> bool:
        """One round: commands, deadlines, admission, a step. False when the engine is to end."""
        if not len(self._delivery):
            if self._speculator is not None:
                self._speculator.idle()
            self._admission.wait_for_work(lambda: self._saver is not None and self._saver.pending)
        if self._closing():
            return False
        if loss := self._backend.lost():
            self._forget_lost(loss)
        now = time.monotonic()
        self._end_expired(now)
        if self._recovery.waits():
            self._admission.wait_for_command(POLL_INTERVAL)
            return True
        if not self._relocation.holds:
            self._admit(now)
        elif not self._scheduler.running:
            self._admission.wait_for_command(POLL_INTERVAL)
        self._stretching.stretch()
        self._swap_pages()
        if self._speculator is not None:
            self._delivery.fail_replies(self._speculator.propose(self._scheduler.running))
        # Work that the next step does not wait for is done while drafts are made; without them, while the step runs.
        if not self._backend.asynchronous or (self._speculator is not None and self._speculator.pending):
            self._delivery.flush()
        if self._saver is not None:
            self._saver.pump(idle=not len(self._delivery))
        closing, scheduled = self._closing(), self._schedule()
        if closing:
            return False
        if scheduled is not None:
            self._delivery.fail_replies(scheduled.failures)
            if scheduled.sequences:
                self._step(scheduled)
                self._delivery.end_failed()
                return True
        self._delivery.flush()
        return True

    def _closing(self) -> bool:
        """Run the commands of other threads, and of sinks; whether the engine is to end."""
        self._admission.run_commands()
        return self._admission.closing

    def _end_expired(self, now: float) -> None:
        expired, overdue = map(self._delivery.of, self._scheduler.expired(now))
        for reply in expired:
            self._delivery.finish(reply, FinishReason.DEADLINE)
        for reply in overdue:
            message = f"waited {self._options.max_queue_seconds:g} s in the queue (--max-queue-seconds)"
            self._delivery.fail(reply, self._admission.queue_full_error(message))

    def _admit(self, now: float) -> None:
        for sequence in self._scheduler.admit():
            self._admission.note_started()
            reply = self._delivery[sequence]
            reply.started_at = now
            # Restoring a prefix may take long: the sinks of other replies do not wait for it.
            self._delivery.flush()
            with self._delivery.bookkeeping(reply):
                reply.on_event(Started())
                self._committer.resume(reply)

    def _swap_pages(self) -> None:
        paging = self.parts.paging
        if paging is None:
            return
        self._delivery.flush()
        failures = Failures()
        for sequence in self._scheduler.running:
            with failures.of(sequence):
                paging.prepare(sequence)
        self._delivery.fail_replies(failures)

    def _schedule(self) -> ScheduledStep | None:
        """The next step with its drafts. Where it does not depend on them, it is scheduled before they are there."""
        if self._speculator is None or not self._speculator.pending:
            return self._scheduler.schedule()
        scheduled = None
        # Prompts take turns, which each scheduled step counts, and pages are swapped out for the rows of a step.
        if self.parts.paging is None and not any(s.unread for s in self._scheduler.running):
            scheduled = self._scheduler.schedule()
            if scheduled is not None:
                self._backend.stage(scheduled.step)
        failures = self._speculator.receive()
        if failures:
            self._delivery.fail_replies(failures)
            scheduled = None
        return (None if scheduled is None else self._scheduler.with_drafts(scheduled)) or self._scheduler.schedule()

    def _forget_lost(self, loss: str) -> None:
        """The backend has lost its state: forget everything that was built on it."""
        if self.cache is not None:
            self.cache.memory.clear()
        self._recovery.lose(loss)

    def _add(self, reply: Reply) -> None:
        self._delivery.add(reply)
        with self._delivery.bookkeeping(reply):
            self._scheduler.add(reply.sequence)

    def _cancel(self, handle: SequenceHandle) -> None:
        reply = self._delivery.find(handle)
        if reply is not None:
            self._cancelled += 1
            self._delivery.finish(reply, FinishReason.CANCELLED)

    def _refuse_waiting(self) -> None:
        for reply in self._delivery.of(self._scheduler.waiting):
            self._delivery.fail(reply, shutting_down_error())

    def _end_replies(self, why: str) -> None:
        loss = self._recovery.loss
        error = ShardLostError(f"{loss}; {why}") if loss else UnavailableError(why, code="moving")
        for reply in self._delivery:
            self._delivery.fail(reply, error)

    def _stop_running(self) -> None:
        for reply in self._delivery.of(self._scheduler.running):
            self._delivery.finish(reply, FinishReason.SHUTDOWN)

    def _step(self, scheduled: ScheduledStep, since: float | None = None) -> None:
        """Run a step. `since`: if it was queued ahead, when the step before it ended."""
        begun, masks = time.monotonic() if since is None else since, None
        try:
            masks = self._masker.begin(scheduled)
            step = scheduled.step if masks is None else replace(scheduled.step, masks=masks)
            output = self._backend.forward(step, lambda: self._queued(scheduled, masks, observed=since is not None))
        except Exception as error:
            self._overlap.drop()
            self._admission.note_step()
            if self._recovery.seconds and isinstance(error, ShardLostError) and (loss := self._backend.lost()):
                if masks is not None:
                    self._committer.end_masks(scheduled, masks)
                self._forget_lost(loss)
                return
            if not isinstance(error, LuceError):
                _log.exception("a step failed")
            for reply in self._delivery.of(one.sequence for one in scheduled.sequences):
                self._delivery.fail_step(reply, error)
            return
        now = self._step_ended = time.monotonic()
        self._admission.note_step()
        self._steps += 1
        if since is None:
            self._scheduler.advance(scheduled)
        self._overlap.advance()
        if self._speculator is not None and scheduled.sequences:
            self._speculator.record_step(scheduled, now - begun)
        self._committer.commit(scheduled, output, now, masks)

    def _queued(self, scheduled: ScheduledStep, masks: StepMasks | None, *, observed: bool) -> None:
        """The devices have a step whose output was not waited for yet. Sinks may post commands."""
        if self._speculator is not None and not observed:
            self._speculator.observe(scheduled)
        self._delivery.deliver()
        self._scheduler.prepare(scheduled)
        if self._speculator is not None:
            self._speculator.prepare(scheduled)
        self._overlap.queue(time.monotonic(), masks)
