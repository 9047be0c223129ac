"""A reply as it grows: which token comes next, whether it is the last, and what to report of both."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luce.config.sampling import SamplingParams
from luce.engine.admission import Ticket
from luce.engine.events import EventSink, FinishReason, PromptLogits, PromptScores, TextOutput, Timings, Token
from luce.engine.sampling import Sampler, needs_logits, score
from luce.engine.scheduler import Sequence, StepShare
from luce.runtime.step import Int32, Output


@dataclass(frozen=True)
class Row:
    """What a step, or the prefix cache, gives for the next token: the likeliest, and all logits or the best ones."""

    token: int
    logits: NDArray[np.float32] | None = None
    top: tuple[Int32, NDArray[np.float32]] | None = None


def rows_of(part: StepShare, output: Output) -> list[Row]:
    """The wanted rows of a sequence's share of a step."""
    ids, logits, top = output.ids[part.ids].tolist(), output.logits[part.logits], None
    if output.candidates is not None and part.top.stop > part.top.start:
        top = list(zip(output.candidates.ids[part.top], output.candidates.logits[part.top], strict=True))
    return [
        Row(token, logits[row] if len(logits) else None, None if top is None else top[row])
        for row, token in enumerate(ids)
    ]


class Reply:
    """What is known of a sequence beside its rows.

    eos: ids that end it unless `params` says otherwise; vocab: ids are below it; bounded: whether its prompt has a
    boundary to be kept at. `submitted`, `started` (it got a slot), `read` (its prompt was): on time.monotonic's clock.
    """

    def __init__(
        self,
        ticket: Ticket,
        sequence: Sequence,
        params: SamplingParams,
        output: TextOutput,
        on_event: EventSink,
        *,
        eos: frozenset[int],
        vocab: int,
        bounded: bool,
        submitted: float,
    ) -> None:
        self.ticket = ticket
        self.sequence = sequence
        self.params = params
        self.output = output
        self.on_event = on_event
        self.seed = secrets.randbits(32) if params.seed is None else params.seed
        self._eos = frozenset() if params.ignore_eos else eos
        ends = frozenset(i for i in params.stop_token_ids | self._eos if 0 <= i < vocab)
        self._sampler = Sampler(params, sequence.prompt, seed=self.seed, ends=ends) if needs_logits(params) else None
        self._scores: list[Token] = []
        self.bounded = bounded
        self.submitted = submitted
        self.started: float | None = None
        self.read: float | None = None
        #: positions that came from the prefix cache, and from where in it
        self.cached, self.tier = 0, "none"
        #: tokens that were proposed and verified, and those of them in the reply
        self.drafted = self.accepted = 0

    def choose(self, row: Row) -> Token:
        """The next token, as yet without text: the likeliest, or what the sampler makes of the row."""
        token = row.token
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        if self._sampler is not None:
            if row.logits is not None:
                token = self._sampler.choose(row.logits)
            else:
                assert row.top is not None
                token = self._sampler.choose_among(*row.top)
            self._sampler.push(token)
            if self.params.logprobs is not None and row.logits is not None:
                logprob, top = score(row.logits, token, self.params.logprobs)
        self.sequence.reply.append(token)
        return Token(token, "", logprob, top)

    def judge(self, token: int) -> tuple[FinishReason | None, str, str | int | None]:
        """Whether the newest token ends the reply: (reason, text that is certain now, what stopped it)."""
        params, sequence = self.params, self.sequence
        if token in self._eos:
            return FinishReason.EOS, "", None
        if token in params.stop_token_ids:
            return FinishReason.STOP, "", token
        text = self.output.push(token)
        if self.output.stopped is not None:
            return FinishReason.STOP, text, self.output.stopped
        if len(sequence.reply) < sequence.room:
            return None, text, None
        return FinishReason.LENGTH if len(sequence.reply) == params.max_tokens else FinishReason.CONTEXT, text, None

    def score_prompt(self, part: StepShare, output: Output) -> None:
        """Report the logits of prompt rows, and score the tokens behind them, as far as somebody asked."""
        logits = output.logits[part.logits]
        if self.params.prompt_logits:
            self.on_event(PromptLogits(part.position, logits))
        if self.params.prompt_logprobs is None:
            return
        following = self.sequence.prompt[part.position + 1 : part.position + 1 + part.rows].tolist()
        for row, token in zip(logits, following, strict=False):
            logprob, top = score(row, token, self.params.prompt_logprobs)
            self._scores.append(Token(token, "", logprob, top))

    def report_scores(self) -> None:
        """Report the scores of the prompt, which is read, if somebody asked."""
        if self.params.prompt_logprobs is not None:
            self.on_event(PromptScores(tuple(self._scores)))

    def timings(self, now: float) -> Timings:
        """Seconds and token counts until now."""
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
