"""Events on their way to the sinks of replies, and the end of replies. On the engine's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator

from luce.engine.admission import SequenceHandle
from luce.engine.events import Failed, Finished, FinishReason, Timings
from luce.engine.failures import FailureBoundary, Failures
from luce.engine.parts import EngineParts
from luce.engine.reply import Reply
from luce.engine.sequence import Sequence
from luce.errors import BackendError, LuceError

_log = logging.getLogger(__name__)


class Delivery:
    """The replies whose last event is not delivered yet.

    Events that a step produced are delivered later (`later`), while the next step's drafts are made (`flush`) or the
    devices compute it (`deliver`).
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._replies: dict[Sequence, Reply] = {}
        self._by_handle: dict[SequenceHandle, Reply] = {}
        self._pending: list[tuple[Reply, Callable[[], None]]] = []
        #: those whose sinks failed while a step ran
        self._failed: dict[Sequence, Exception] = {}
        #: seconds and tokens of the replies that ended in order, together
        self.finished = Timings()

    def __len__(self) -> int:
        return len(self._replies)

    def __iter__(self) -> Iterator[Reply]:
        return iter(list(self._replies.values()))

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._replies

    def __getitem__(self, sequence: Sequence) -> Reply:
        return self._replies[sequence]

    def of(self, sequences: Iterable[Sequence]) -> list[Reply]:
        """The replies of sequences. While one of them ends, another may fail: `finish` and `fail` pass it over then."""
        return [self._replies[sequence] for sequence in sequences]

    def add(self, reply: Reply) -> None:
        """Take a new reply."""
        self._replies[reply.sequence] = self._by_handle[reply.handle] = reply

    def find(self, handle: SequenceHandle) -> Reply | None:
        """The reply of a handle; None if it has ended."""
        return self._by_handle.get(handle)

    def later(self, reply: Reply, deliver: Callable[[], None]) -> None:
        """Have `flush` call `deliver`, unless the reply has ended by then."""
        self._pending.append((reply, deliver))

    def flush(self) -> None:
        """Deliver the events of the last step, between steps."""
        self.deliver()
        self.end_failed()

    def deliver(self) -> None:
        """Deliver the events of the last step, also while a step runs: replies whose sinks fail end with `end_failed`,
        as none may end while the devices compute its rows."""
        pending, self._pending = self._pending, []
        for reply, deliver in pending:
            if not reply.handle.ended and reply.sequence not in self._failed:
                try:
                    deliver()
                except Exception as error:
                    self._failed[reply.sequence] = error

    def end_failed(self) -> None:
        """End the replies whose sinks failed: they get no other event."""
        if failed := self._failed:
            self._pending = [(reply, deliver) for reply, deliver in self._pending if reply.sequence not in failed]
            self._failed = {}
        for sequence, error in failed.items():
            if sequence in self:
                self.fail_reply(self._replies[sequence], error)

    def bookkeeping(self, reply: Reply) -> FailureBoundary:
        """What runs in this context concerns one reply only: an exception fails this reply, and goes no further."""
        return FailureBoundary(lambda error: self.fail_reply(reply, error))

    def fail_replies(self, failures: Iterable[tuple[Sequence, Exception]]) -> None:
        """End the replies of sequences with the exceptions that their bookkeeping raised in a stage of all sequences.

        LuceErrors come from devices there: they are no fault of the request.
        """
        for reply, error in [(self._replies[sequence], error) for sequence, error in failures]:
            self.fail_reply(reply, _backend_error(error) if isinstance(error, LuceError) else error)

    def finish(self, reply: Reply, reason: FinishReason, stop: str | int | None = None) -> None:
        """End a reply in order, unless it has ended."""
        self.flush()
        if reply.handle.ended:
            return
        checkpoints = self._parts.checkpoints
        with self.bookkeeping(reply):
            text = reply.output.flush()
            if checkpoints is not None:
                checkpoints.reply_finished(reply.sequence, reply.output.texts)
            timings = reply.timings(time.monotonic())
            self.finished = self.finished.plus_times(timings)
            self._end(reply, Finished(reason, text, timings, reply.seed, stop, reply.close_kind))

    def fail(self, reply: Reply, error: LuceError) -> None:
        """End a reply with an error, unless it has ended."""
        self._end(reply, Failed(error))

    def fail_step(self, reply: Reply, error: Exception) -> None:
        """End a reply with the error of a step, as a BackendError."""
        self.fail(reply, _backend_error(error))

    def fail_reply(self, reply: Reply, error: Exception) -> None:
        """End a reply with the exception that its own bookkeeping raised, unless it has ended."""
        if not isinstance(error, LuceError):
            _log.error("a reply failed", exc_info=error)
        self.fail(reply, _reply_error(error))

    def _end(self, reply: Reply, event: Finished | Failed) -> None:
        """Deliver the last event, which is Failed if the end itself fails. Slot and pages are free before the sink sees
        it."""
        self.flush()
        parts, sequence, handle = self._parts, reply.sequence, reply.handle
        if handle.ended:
            return
        handle.ended = True
        del self._replies[sequence], self._by_handle[handle]
        failures = self._forget(sequence)
        for _, error in failures:
            _log.error("a reply failed at its end", exc_info=error)
        if failures and isinstance(event, Finished):
            event = Failed(_reply_error(failures[0][1]))
        try:
            parts.scheduler.remove(sequence)
            parts.admission.note_ended(None if reply.started_at is None else time.monotonic() - reply.started_at)
        except Exception as error:
            # The engine ends, but this client does not wait for ever.
            event = Failed(_reply_error(error))
            raise
        finally:
            try:
                reply.on_event(event)
            except Exception:
                _log.exception("an event sink failed")
            parts.admission.note_delivered()

    def _forget(self, sequence: Sequence) -> Failures:
        """Have every part forget a sequence, also if another part fails."""
        parts, failures = self._parts, Failures()
        if parts.checkpoints is not None:
            with failures.of(sequence):
                parts.checkpoints.sequence_ended(sequence)
        if parts.speculator is not None:
            with failures.of(sequence):
                parts.speculator.forget(sequence)
        if parts.paging is not None and sequence.slot is not None:
            with failures.of(sequence):
                parts.paging.release(sequence.slot)
        return failures


def _backend_error(error: Exception) -> BackendError:
    if isinstance(error, BackendError):
        return error
    wrapped = BackendError(str(error) if isinstance(error, LuceError) else f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _reply_error(error: Exception) -> LuceError:
    return error if isinstance(error, LuceError) else LuceError(f"the reply failed: {type(error).__name__}: {error}")
