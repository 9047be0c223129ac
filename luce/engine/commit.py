"""A step's output becomes tokens of replies. On the engine's thread."""

from __future__ import annotations

import time
from collections.abc import Sequence as Many

from luce.engine.delivery import Delivery
from luce.engine.events import FinishReason, Progress, Token, Tokens
from luce.engine.masks import StepMasks
from luce.engine.parts import EngineParts
from luce.engine.reply import OutputRow, Reply, output_rows
from luce.engine.scheduler import ScheduledSequence, ScheduledStep
from luce.kvcache.prefix_cache import Hit
from luce.runtime.step import Output


class Committer:
    """Gives each sequence its rows of a step's output: tokens are chosen, drafts accepted, prompts scored."""

    def __init__(self, parts: EngineParts, delivery: Delivery) -> None:
        self._parts = parts
        self._delivery = delivery
        #: counters since the start
        self.prompt_tokens = self.predicted_tokens = 0

    def commit(self, scheduled: ScheduledStep, output: Output, now: float, masks: StepMasks | None = None) -> None:
        """Commit the output of a step, with its masks, that ended `now`, on time.monotonic's clock."""
        for one in scheduled.sequences:
            if one.sequence not in self._delivery:
                # Its sink failed while the step ran, or it ended while the step was queued (luce.engine.overlap).
                continue
            reply = self._delivery[one.sequence]
            with self._delivery.bookkeeping(reply):
                self._commit(reply, one, output_rows(one, output, masks), output, now)

    def end_masks(self, scheduled: ScheduledStep, masks: StepMasks) -> None:
        """Wait for the masks of a step that failed: no other thread uses a reply's constraint while the reply goes on.
        A reply whose masks cannot be made fails."""
        replies = self._delivery.of(one.sequence for one in scheduled.sequences)
        for one, reply in zip(scheduled.sequences, replies, strict=True):
            with self._delivery.bookkeeping(reply):
                masks.of(one)

    def resume(self, reply: Reply) -> None:
        """Let a sequence that has a slot begin with what the prefix cache has of its prompt, and report how much."""
        if reply.given and not self._take_given(reply):
            return
        sequence, hit = reply.sequence, self._restore(reply)
        total = len(sequence.prompt)
        if hit is not None:
            reply.cached_tokens, reply.cache_tier = min(hit.length, total), hit.tier
        reply.on_event(Progress(min(sequence.computed, total), total, reply.cached_tokens))
        self._begin_cached(reply, hit)

    def _take_given(self, reply: Reply) -> bool:
        """Append the tokens that a reply begins with, to be read as behind a loss; whether it goes on behind them. Who
        gives them has delivered them."""
        reply.prompt_done_at = time.monotonic()
        for token in reply.given:
            reply.append(token)
            reason, _, stop = reply.finish_reason(token)
            if reason is not None:
                self._delivery.finish(reply, reason, stop)
                return False
        self._parts.scheduler.restart(reply.sequence)
        return True

    def resume_restarted(self, reply: Reply) -> None:
        """Let a sequence that is read again begin with what the prefix cache has of its tokens."""
        self._begin_cached(reply, self._restore(reply))

    def _restore(self, reply: Reply) -> Hit | None:
        """Restore what the prefix cache has of a sequence's tokens; None if it has nothing."""
        checkpoints = self._parts.checkpoints
        hit = None if checkpoints is None else checkpoints.resume(reply.sequence)
        if hit is not None:
            self._parts.scheduler.resume(reply.sequence, hit.length)
        return hit

    def _begin_cached(self, reply: Reply, hit: Hit | None) -> None:
        """Begin the reply if the logits behind its prompt were cached, and it has not begun."""
        if hit is not None and hit.logits is not None and not reply.sequence.reply:
            self._begin(reply, OutputRow(int(hit.logits.argmax()), hit.logits), time.monotonic())

    def _commit(
        self, reply: Reply, scheduled: ScheduledSequence, rows: list[OutputRow], output: Output, now: float
    ) -> None:
        sequence, checkpoints = reply.sequence, self._parts.checkpoints
        total = len(sequence.prompt)
        if scheduled.position >= sequence.read_end:
            self.extend(reply, rows, scheduled)
            return
        self.prompt_tokens += scheduled.rows
        if scheduled.position >= total:
            # A part of the reply, whose tokens are chosen.
            return
        # Where the logits of the prompt's last row were cached, the reply has begun before the prompt's last rows are
        # read.
        begun = bool(sequence.reply)
        if not begun:
            reply.on_event(Progress(sequence.computed, total, reply.cached_tokens))
        if sequence.scores_prompt:
            reply.score_prompt(scheduled, output)
        if sequence.prompt_remaining:
            if checkpoints is not None:
                checkpoints.prompt_part_read(sequence)
            return
        if not begun:
            reply.report_scores()
        row = rows[-1] if rows else OutputRow(-1)
        if checkpoints is not None:
            checkpoints.prompt_read(sequence, row.logits)
        if not begun:
            self._begin(reply, row, now)

    def _begin(self, reply: Reply, row: OutputRow, now: float) -> None:
        """Begin the reply: `row` is the output of the prompt's last row."""
        reply.prompt_done_at = now
        computed, cache = reply.sequence.computed - reply.cached_tokens, self._parts.cache
        # The time of a loss is not that of computing.
        if cache is not None and computed and reply.started_at is not None and not reply.losses:
            cache.record_computed(computed, now - reply.started_at)
        if reply.sequence.max_new_tokens:
            self.extend(reply, [row])
        else:
            self._delivery.finish(reply, FinishReason.LENGTH)

    def extend(self, reply: Reply, rows: Many[OutputRow], scheduled: ScheduledSequence | None = None) -> None:
        """Append the tokens chosen from the first row and from each draft row that is accepted."""
        tokens: list[Token] = []
        path, reason, stop = [0], None, None
        while True:
            try:
                token = reply.choose(rows[path[-1]])
            except Exception:
                # The client gets the tokens before it, as steps of one token would have given them.
                if tokens:
                    self._delivery.later(reply, lambda: reply.on_event(Tokens(tuple(tokens))))
                raise
            self.predicted_tokens += 1
            reason, text, stop = reply.finish_reason(token.id)
            # dataclasses.replace takes three times as long, and the drafter waits for as many tokens as were accepted.
            tokens.append(Token(token.id, text, token.logprob, token.top))
            child = None if scheduled is None else scheduled.child(path[-1], token.id)
            if reason is not None or child is None or not reply.can_choose(rows[child]):
                break
            path.append(child)
        if scheduled is not None and scheduled.draft.tokens:
            # The reply's last token may be a draft token as well, whatever ended the reply.
            accepted = path[1:] if child is None else [*path[1:], child]
            self._accept(reply, scheduled, path, accepted, ended=reason is not None)
        self._delivery.later(reply, lambda: reply.on_event(Tokens(tuple(tokens), reason is not None)))
        if reason is not None:
            self._delivery.finish(reply, reason, stop)

    def _accept(
        self, reply: Reply, scheduled: ScheduledSequence, path: Many[int], accepted: Many[int], *, ended: bool
    ) -> None:
        """Accept the rows of `path`; `accepted` are the draft rows whose tokens are in the reply."""
        parts, sequence = self._parts, reply.sequence
        assert sequence.slot is not None
        parts.scheduler.accept(scheduled, path)
        if sequence.schedule.path:
            parts.backend.move_features(sequence.slot, scheduled.position, sequence.schedule.path)
        reply.drafts = reply.drafts.plus(scheduled.draft, accepted)
        speculator = parts.speculator
        assert speculator is not None
        self._delivery.later(reply, lambda: speculator.record_verification(sequence, scheduled, accepted, ended=ended))
