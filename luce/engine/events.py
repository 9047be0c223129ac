"""The events of a sequence, from the engine to its sink, and the protocol of a reply's text."""

from __future__ import annotations

import enum
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from luce.engine.reasoning_limit import CloseKind
from luce.engine.sequence import Draft
from luce.errors import LuceError


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Token:
    """One generated token."""

    id: int
    #: text that became certain with the token; empty while a character or a stop string is incomplete
    text: str
    #: natural logarithm of the token's probability
    logprob: float | None = None
    #: (id, log probability) of the most probable tokens, descending
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class DraftCounts:
    """Draft tokens of one sequence."""

    #: draft tokens that were verified
    drafted: int = 0
    #: draft tokens that became part of the reply
    accepted: int = 0
    #: of `drafted`, those that were forced: by the grammar of the reply, or to end its reasoning
    forced_drafted: int = 0
    #: of `accepted`, those that were forced
    forced_accepted: int = 0
    #: of `forced_accepted`, those that the grammar forced
    grammar_forced: int = 0

    def plus(self, draft: Draft, accepted: Many[int]) -> DraftCounts:
        """The counts with a draft that was verified; `accepted`: its rows whose tokens are in the reply, from 1 on."""
        forced = sum(row <= draft.forced for row in accepted)
        return DraftCounts(
            self.drafted + len(draft.tokens),
            self.accepted + len(accepted),
            self.forced_drafted + draft.forced,
            self.forced_accepted + forced,
            self.grammar_forced + (0 if draft.ends_reasoning else forced),
        )


@dataclass(frozen=True)
class Timings(DraftCounts):
    """Seconds and token counts of one sequence."""

    #: seconds in the queue
    queued: float = 0.0
    #: seconds from there until the prompt was computed
    prompt: float = 0.0
    #: seconds from there to the end
    predicted: float = 0.0
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    #: prompt tokens that the prefix cache restored
    cached_tokens: int = 0
    #: the tier that they came from: ram, disk, or none
    cache_tier: str = "none"
    #: whether the drafter was asked for the sequence at last, or why not (luce.engine.sequence.DraftState); empty
    #: without a drafter
    draft_state: str = ""

    def plus_times(self, other: Timings) -> Timings:
        """These with the seconds, and the tokens of prompts and replies, of another sequence added."""
        names = ("queued", "prompt", "predicted", "prompt_tokens", "predicted_tokens", "cached_tokens")
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True)
class Started:
    """The sequence left the queue and has a slot."""


@dataclass(frozen=True)
class Progress:
    """How far the prompt is: once when it begins, with what the prefix cache restored, then after each step."""

    #: prompt tokens that are computed or restored
    done: int
    #: tokens of the prompt
    total: int
    #: prompt tokens that the prefix cache restored
    cached: int = 0


@dataclass(frozen=True)
class PromptScores:
    """Log probabilities of prompt tokens 1..n-1 given their prefix, if `prompt_logprobs` is set."""

    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class PromptLogits:
    """Logits of consecutive prompt positions, if `prompt_logits` is set."""

    #: position of the first row
    first: int
    #: float32 [n, vocab]
    logits: NDArray[np.float32]


@dataclass(frozen=True)
class Tokens:
    """The tokens of one step."""

    tokens: tuple[Token, ...]
    #: whether they end the reply: the next event is the last one
    ends: bool = False


@dataclass(frozen=True)
class Finished:
    """The last event of a sequence that ended in order."""

    reason: FinishReason
    #: text that was held back until now
    text: str
    timings: Timings
    #: the seed that was used, also when the request set none
    seed: int
    #: the stop string or stop token that ended the reply
    stop: str | int | None = None
    #: how the reasoning ended; None: it did not, or there was none
    close_kind: CloseKind | None = None


@dataclass(frozen=True)
class Failed:
    """The last event of a sequence that ended with an error."""

    error: LuceError


Event = Started | Progress | PromptScores | PromptLogits | Tokens | Finished | Failed
#: Called on the engine's thread; returns at once.
EventSink = Callable[[Event], None]


#: Texts whose ids are remembered, so that a later prompt with the same text gets the same ids. Each is (digest, begin,
#: end): the digest stands for the text, or for what a call of a tool means; its ids are those from `begin` up to `end`
#: of prompt and reply, counted from the prompt's first id.
Texts = tuple[tuple[str, int, int], ...]


class TextOutput(Protocol):
    """Turns a sequence's ids into text; implemented by luce.text.output, called on the engine thread."""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, None if nothing did; empty if the text is complete without one."""

    @property
    def texts(self) -> Texts:
        """The texts of the reply that later prompts may contain; empty until `flush`."""

    def push(self, token: int) -> str:
        """Text that one more token makes certain: no part of a stop string or of an incomplete character."""

    def flush(self) -> str:
        """Text that was held back; incomplete bytes become U+FFFD. Empty if a stop string ended the text."""
