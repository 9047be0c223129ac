"""The sequences of one request on the event loop: their events in order of arrival."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType

from luce.api import Model
from luce.engine.admission import SequenceHandle
from luce.engine.events import Event, Failed, Finished, Progress, Started, Tokens
from luce.errors import LuceError, QueueFullError
from luce.server.metrics import Metrics
from luce.server.prepare import Job

# Seconds between tries of a request with waiting sequences and none running: other requests have the queue's places.
_RETRY_SECONDS = 0.25
NOTHING_GIVEN: Mapping[int, tuple[int, ...]] = MappingProxyType({})


class Replies:
    """All sequences of one job. Used on the event loop; only the engine's events come from another thread.

    A job with more sequences than the queue has places is admitted with the first; the others follow when places become
    free. `given`: by choice, the tokens that its reply begins with, which the client has; `ended`: choices that it has
    whole. Use it as `with Replies(...) as replies`: leaving the block cancels the sequences that still run.
    """

    def __init__(
        self,
        job: Job,
        model: Model,
        metrics: Metrics,
        arrived: float,
        *,
        given: Mapping[int, tuple[int, ...]] = NOTHING_GIVEN,
        ended: frozenset[int] = frozenset(),
    ) -> None:
        self._job = job
        self._model = model
        self._metrics = metrics
        self._arrived = arrived
        self._given = given
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        # Longest prompt first: if one does not fit the context, the request is refused before anything runs.
        left = [choice for choice in range(job.choices) if choice not in ended]
        order = sorted(left, key=lambda choice: -len(job.prompts[choice // job.n]))
        self._waiting = deque(order)
        self._running: dict[int, SequenceHandle] = {}
        self._stage: dict[int, str] = {}
        self._submitted: dict[int, float] = {}
        self._last_token: dict[int, float] = {}
        self._closed = False

    def __enter__(self) -> Replies:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()

    def admit(self) -> None:
        """Queue as many sequences as the queue takes. Raises LuceError if it refuses the first one."""
        if self._waiting:
            self._submit(self._waiting[0])
            self._waiting.popleft()
        self._submit_waiting()

    def cancel(self) -> None:
        """Cancel the sequences that still run. Idempotent."""
        self._closed = True
        self._waiting.clear()
        for choice, handle in self._running.items():
            handle.cancel()
            self._metrics.cancelled.labels(self._stage[choice]).inc()
        self._running.clear()

    @property
    def ended(self) -> bool:
        """Whether every sequence has ended and `next` has returned its last event."""
        return not self._running and not self._waiting and self._events.empty()

    async def next(self, timeout: float | None = None) -> tuple[int, Event]:
        """The next event and the choice it belongs to. Raises TimeoutError."""
        if self._events.empty():
            async with asyncio.timeout(timeout):
                return await self._events.get()
        return self._events.get_nowait()

    def _submit(self, choice: int) -> None:
        job = self._job
        params, repeat = job.params, choice % job.n
        if params.seed is not None and repeat:
            # Replies to one prompt differ; the first is the same as that of a request with n = 1.
            # Within 64 bits, so that a client can send the reported seed.
            params = dataclasses.replace(params, seed=(params.seed + repeat + 2**63) % 2**64 - 2**63)
        prompt = job.prompts[choice // job.n]
        self._running[choice] = self._model.engine.submit(
            prompt,
            params,
            output=self._model.reply_text(
                job.stops, prompt, remember=job.max_cached_tokens is None, split=job.chat, tools=job.tools
            ),
            on_event=self._model.compression.observing(self._sink(choice)),
            position_ids=job.readings[choice // job.n].position_ids,
            session=job.session,
            timeout=job.timeout,
            boundaries=job.boundaries[choice // job.n],
            max_cached_tokens=job.max_cached_tokens,
            reasoning=job.reasoning,
            constraint=None if job.grammar is None else job.grammar.constraint(job.reasoning_tokens),
            given=self._given.get(choice, ()),
        )
        self._stage[choice] = "queued"
        self._submitted[choice] = time.monotonic()

    def _sink(self, choice: int) -> Callable[[Event], None]:
        def sink(event: Event) -> None:
            # On the engine thread. A closed loop raises here, which ends only this sequence.
            self._loop.call_soon_threadsafe(self._take, choice, event, time.monotonic())

        return sink

    def _submit_waiting(self) -> None:
        while self._waiting and not self._closed:
            try:
                self._submit(self._waiting[0])
            except QueueFullError:
                if not self._running:
                    self._loop.call_later(_RETRY_SECONDS, self._submit_waiting)
                return
            except LuceError as error:
                self._events.put_nowait((self._waiting[0], Failed(error)))
            self._waiting.popleft()

    def _take(self, choice: int, event: Event, at: float) -> None:
        if self._closed or (choice in self._given and isinstance(event, Progress)):
            return
        if isinstance(event, Started):
            self._stage[choice] = "prefill"
            self._metrics.queue_seconds.observe(at - self._submitted[choice])
        elif isinstance(event, Tokens):
            self._time_tokens(choice, len(event.tokens), at)
        elif isinstance(event, Finished | Failed):
            del self._running[choice]
            self._submit_waiting()
        self._events.put_nowait((choice, event))

    def _time_tokens(self, choice: int, count: int, at: float) -> None:
        self._stage[choice] = "decode"
        if choice in self._last_token:
            for _ in range(count):
                self._metrics.inter_token_latency.observe((at - self._last_token[choice]) / count)
        else:
            self._metrics.time_to_first_token.observe(at - self._arrived)
        self._last_token[choice] = at
