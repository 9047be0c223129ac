"""Reply: a reply while it grows. Chooses tokens, finds the finish reason, scores the prompt, measures times."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from luce.config.sampling import SamplingParams
from luce.engine.admission import SequenceHandle
from luce.engine.events import (
    DraftCounts,
    EventSink,
    FinishReason,
    PromptLogits,
    PromptScores,
    TextOutput,
    Timings,
    Token,
)
from luce.engine.masks import StepMasks
from luce.engine.reasoning_limit import CloseKind, ReasoningState
from luce.engine.sampling import Sampler, draw_of, mask_allows, needs_logits, score
from luce.engine.scheduler import ScheduledSequence
from luce.engine.sequence import RowKind, Sequence
from luce.errors import BackendError, GrammarLimitError
from luce.runtime.step import Output


class OutputRow(NamedTuple):
    """What the next token is chosen from: one row of a step's output, or logits from the prefix cache."""

    #: the token that the device chose; -1: none, as the logits are not finite
    token: int
    #: float32 [vocab]
    logits: NDArray[np.float32] | None = None
    #: what the reply's constraint says of the next token; None if that is not known yet
    kind: RowKind | None = None
    #: the mask of the next token, uint32 [words], under which the device has chosen `token`
    mask: NDArray[np.uint32] | None = None


def output_rows(scheduled: ScheduledSequence, output: Output, masks: StepMasks | None = None) -> list[OutputRow]:
    """A sequence's rows of a step's output. Raises what making their masks raised."""
    ids = output.tokens[scheduled.ids]
    if masks is None and scheduled.logits.stop == scheduled.logits.start:
        return [OutputRow(token) for token in ids]
    logits = output.logits[scheduled.logits]
    known: list[tuple[RowKind | None, NDArray[np.uint32] | None]] = [(None, None)] * len(ids)
    if masks is not None and (made := masks.of(scheduled)):
        known[-len(made) :] = made
    return [OutputRow(token, logits[row] if len(logits) else None, *known[row]) for row, token in enumerate(ids)]


class Reply:
    """A sequence with its sampler, its text and its sink. `eos` ids end it unless `params` ignores them. Times are on
    time.monotonic's clock. `given`: its first tokens, which were chosen before, by another engine.
    """

    def __init__(
        self,
        handle: SequenceHandle,
        sequence: Sequence,
        params: SamplingParams,
        output: TextOutput,
        on_event: EventSink,
        *,
        eos: frozenset[int],
        submitted_at: float,
        given: tuple[int, ...] = (),
    ) -> None:
        self.handle = handle
        self.sequence = sequence
        self.params = params
        self.output = output
        self.on_event = on_event
        self.given = given
        self.seed = secrets.randbits(32) if params.seed is None else params.seed
        sequence.draw = draw_of(params, self.seed)
        self._eos = frozenset() if params.ignore_eos else eos
        self._sampler: Sampler | None = None
        if needs_logits(params) or sequence.constraint is not None:
            self._sampler = Sampler(params, sequence.prompt, seed=self.seed, ends=sequence.ends)
        limit = sequence.reasoning
        self._reasoning = None if limit is None else ReasoningState(limit, sequence.max_new_tokens)
        self._scores: list[Token] = []
        self._submitted_at = submitted_at
        #: when the sequence got a slot
        self.started_at: float | None = None
        #: when its prompt was computed
        self.prompt_done_at: float | None = None
        #: positions that the prefix cache restored
        self.cached_tokens = 0
        #: the tier that they came from: ram, disk, or none
        self.cache_tier = "none"
        self.drafts = DraftCounts()
        #: how often the backend has lost its state
        self.losses = 0

    def can_choose(self, row: OutputRow) -> bool:
        """Whether the next token can be chosen from a row. Where the mask of a draft row cannot be made, the next step
        begins with its token."""
        return row.kind is not RowKind.LEFT

    def choose(self, row: OutputRow) -> Token:
        """Choose the next token and append it: the one that ends the reasoning if its budget is used up, else the
        device's, or the sampler's. It has no text yet.

        Raises GrammarLimitError if the constraint allows no token, and the errors of Sampler.choose.
        """
        forced = self._forced()
        token = self._chosen(row) if forced is None else forced
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        if self._sampler is not None and self.params.logprobs is not None and row.logits is not None:
            logprob, top = score(row.logits, token, self.params.logprobs)
        self.append(token)
        return Token(token, "", logprob, top)

    def append(self, token: int) -> None:
        """Append a token that is chosen."""
        sequence = self.sequence
        if self._sampler is not None:
            self._sampler.push(token)
        if self._reasoning is not None:
            self._reasoning.push(token)
            sequence.ending = self._reasoning.ending
        if sequence.constraint is not None and token not in sequence.ends:
            sequence.constraint.push(token)
        sequence.reply.append(token)

    def _chosen(self, row: OutputRow) -> int:
        """The token that the sampler chooses where the host has whole logits, or the device's."""
        constraint, mask = self.sequence.constraint, row.mask
        if constraint is not None and row.kind is None and not constraint.open:
            mask = constraint.mask(self.sequence.ends)
        if self._sampler is not None and row.logits is not None:
            return self._sampler.choose(row.logits, mask)
        if mask is not None and not (mask.any() if row.token < 0 else mask_allows(mask, row.token)):
            raise GrammarLimitError("the grammar of the reply allows no token here")
        if row.token < 0:
            raise BackendError(f"position {len(self.sequence.tokens)}: the logits are not finite")
        return row.token

    @property
    def close_kind(self) -> CloseKind | None:
        """How the reasoning ended; None: it did not, or there was none."""
        return None if self._reasoning is None else self._reasoning.close_kind

    def _forced(self) -> int | None:
        """The token that comes next whatever the model would choose."""
        reasoning, constraint = self._reasoning, self.sequence.constraint
        forced = None if reasoning is None else reasoning.forced
        if forced is not None and constraint is not None and not constraint.allows(forced):
            # White space that the family writes behind the reasoning is not part of each grammar.
            assert reasoning is not None
            reasoning.refuse_forced()
            return None
        return forced

    def finish_reason(self, token: int) -> tuple[FinishReason | None, str, str | int | None]:
        """Push the newest token to the text: (reason or None, text that is certain now, stop string or stop token)."""
        params, sequence = self.params, self.sequence
        if token in self._eos:
            return FinishReason.EOS, "", None
        if token in params.stop_token_ids:
            return FinishReason.STOP, "", token
        text = self.output.push(token)
        if self.output.stopped is not None:
            return FinishReason.STOP, text, self.output.stopped or None
        if sequence.constraint is not None and sequence.constraint.over:
            return FinishReason.EOS, text, None
        if len(sequence.reply) < sequence.max_new_tokens:
            return None, text, None
        return FinishReason.LENGTH if len(sequence.reply) == params.max_tokens else FinishReason.CONTEXT, text, None

    def score_prompt(self, scheduled: ScheduledSequence, output: Output) -> None:
        """Report the logits of prompt rows, and score the token after each, if `params` asks for it."""
        position, logits = scheduled.position, output.logits[scheduled.logits]
        if self.params.prompt_logits:
            self.on_event(PromptLogits(position, logits))
        if self.params.prompt_logprobs is None:
            return
        following = self.sequence.prompt[position + 1 : position + 1 + scheduled.rows].tolist()
        for row, token in zip(logits, following, strict=False):
            logprob, top = score(row, token, self.params.prompt_logprobs)
            self._scores.append(Token(token, "", logprob, top))

    def report_scores(self) -> None:
        """Report the scores of the whole prompt, if `params` asks for them."""
        if self.params.prompt_logprobs is not None:
            self.on_event(PromptScores(tuple(self._scores)))

    def timings(self, now: float) -> Timings:
        """Seconds and token counts until `now`."""
        started = now if self.started_at is None else self.started_at
        prompt_done = now if self.prompt_done_at is None else self.prompt_done_at
        return Timings(
            queued=started - self._submitted_at,
            prompt=prompt_done - started,
            predicted=now - prompt_done,
            prompt_tokens=min(self.sequence.most_computed, len(self.sequence.prompt)),
            predicted_tokens=len(self.sequence.reply),
            cached_tokens=self.cached_tokens,
            cache_tier=self.cache_tier,
            draft_state="" if self.sequence.draft_state is None else self.sequence.draft_state.value,
            **asdict(self.drafts),
        )
