"""What the engine reports of a sequence, in order of arrival."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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
    """One generated token. `text` is what became certain with it: empty while a character or a stop string is open.

    `logprob` is natural log; `top` are (id, logprob) pairs, most likely first.
    """

    id: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Timings:
    """Seconds and token counts of one sequence. `cached_tokens` of the prompt were not computed for it, but came from
    `cache_tier`: ram, disk, or none. `drafted` tokens were verified, of which `accepted` became part of the reply."""

    queued: float = 0.0
    prompt: float = 0.0
    predicted: float = 0.0
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0
    cache_tier: str = "none"
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Started:
    """The sequence left the queue and has a slot."""


@dataclass(frozen=True)
class Progress:
    """A prompt chunk was processed, or `cached` tokens of the prompt were found in the prefix cache."""

    done: int
    total: int
    cached: int = 0


@dataclass(frozen=True)
class PromptScores:
    """Log probabilities of prompt tokens 1..n-1 given their prefix (asked for by `prompt_logprobs`)."""

    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class PromptLogits:
    """Logits of consecutive prompt positions beginning at `first`: float32 [n, vocab]."""

    first: int
    logits: NDArray[np.float32]


@dataclass(frozen=True)
class Tokens:
    """Tokens committed by one step."""

    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Finished:
    """The last event of a sequence that ended in order. `text` is what was still held back.

    `seed` is the seed that was used, also when none was given.
    """

    reason: FinishReason
    text: str
    timings: Timings
    seed: int
    stop: str | int | None = None


@dataclass(frozen=True)
class Failed:
    """The last event of a sequence that an error ended."""

    error: LuceError


Event = Started | Progress | PromptScores | PromptLogits | Tokens | Finished | Failed
#: Called on the engine thread; must return at once.
EventSink = Callable[[Event], None]


#: texts of a reply between special tokens: of each its digest, and where its ids are, [begin, end) from the prompt's on
Texts = tuple[tuple[str, int, int], ...]


class TextOutput(Protocol):
    """Turns a sequence's ids into text; implemented by luce.text.output, called on the engine thread."""

    @property
    def stopped(self) -> str | None:
        """The stop string that was reached, if any."""

    @property
    def texts(self) -> Texts:
        """Those that later prompts may bring back; known once all is flushed."""

    def push(self, token: int) -> str:
        """Text that is certain after one more token (nothing of a stop string or of an unfinished character)."""

    def flush(self) -> str:
        """What was held back; unfinished bytes become U+FFFD. Empty if a stop string was reached."""
