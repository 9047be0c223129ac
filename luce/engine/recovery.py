"""Replies go on behind the loss of a shard: their tokens are read again once it is back. On the engine's thread.

What a client has got stays as it is: tokens so far are read, not chosen again, and the sampler, the grammar and the
text of a reply go on where they were. So a client sees a pause, and no token twice.
"""

from __future__ import annotations

import logging
import time

from luce import log
from luce.backend.backend import Backend
from luce.engine.commit import Committer
from luce.engine.delivery import Delivery
from luce.engine.parts import EngineParts
from luce.engine.reply import Reply
from luce.errors import ShardLostError

_log = logging.getLogger(__name__)

#: losses behind which a reply goes on
MOST_LOSSES = 2
#: seconds between two looks at whether a shard is back
POLL_INTERVAL = 0.05


class Recovery:
    """What happens to replies when the backend loses its state.

    `seconds`: longest wait for a shard; 0: no reply goes on.
    """

    def __init__(
        self, backend: Backend, parts: EngineParts, delivery: Delivery, committer: Committer, seconds: float
    ) -> None:
        self._backend = backend
        self._parts = parts
        self._delivery = delivery
        self._committer = committer
        self.seconds = seconds
        #: when the state was lost, None while all shards are there; and why
        self._since: float | None = None
        self._why = ""
        #: how often replies went on
        self.resumed = 0

    @property
    def waiting(self) -> bool:
        """Whether a shard is awaited."""
        return self._since is not None

    @property
    def loss(self) -> str:
        """Why the state was lost, while a shard is awaited; "" otherwise."""
        return self._why if self.waiting else ""

    def lose(self, loss: str) -> None:
        """The backend has lost its state: replies that have begun wait until they can be read again, or fail."""
        self._delivery.flush()
        for reply in self._delivery.of(s for s in self._parts.scheduler.running if s.computed):
            self.lose_one(reply, loss)
        if self.seconds:
            self._since, self._why = self._since or time.monotonic(), loss

    def lose_one(self, reply: Reply, loss: str) -> None:
        """The backend has lost the state of a reply that has begun."""
        with self._delivery.bookkeeping(reply):
            if self.seconds and self._can_resume(reply):
                self._restart(reply)
                self._since, self._why = self._since or time.monotonic(), loss
            else:
                self._delivery.fail(reply, ShardLostError(loss))

    def waits(self) -> bool:
        """Whether no step can run because a shard is not back. Replies that have waited too long fail."""
        if self._since is None:
            return False
        running = self._delivery.of(self._parts.scheduler.running)
        waiting = [reply for reply in running if reply.losses and not reply.sequence.computed]
        if self._backend.ready():
            self._since = None
            if waiting:
                log.event(_log, "replies go on", count=len(waiting), reason=self._why)
            for reply in waiting:
                self.resumed += 1
                with self._delivery.bookkeeping(reply):
                    self._committer.resume_restarted(reply)
            return False
        if waiting and time.monotonic() - self._since < self.seconds:
            return True
        for reply in waiting:
            why = f"{self._why}; it was not back within {self.seconds:g} s (--cluster-resume)"
            self._delivery.fail(reply, ShardLostError(why))
        if not self._backend.down():
            # A step would wait for the shard, and the engine for the step: no reply could be cancelled.
            return True
        self._since = None
        return False

    def _can_resume(self, reply: Reply) -> bool:
        sequence = reply.sequence
        if self._parts.paging is not None or reply.losses >= MOST_LOSSES:
            # Which pages are on the devices depends on all steps so far.
            return False
        # Scores of a part of the prompt have been reported.
        return not (sequence.scores_prompt and sequence.prompt_remaining)

    def _restart(self, reply: Reply) -> None:
        reply.losses += 1
        self._parts.restart(reply.sequence)
