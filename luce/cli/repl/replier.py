"""What answers a chat: the model in this process, or a server. The same protocol for both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from luce.config.values import EFFORTS, tokens
from luce.errors import UsageError
from luce.text.reasoning import Delta

#: what `/set think` takes for a model, beside a budget: a switch, or how much to reason
THINK = ("on", "off", *EFFORTS)
_BUDGET = tokens(0)

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Thinking:
    """What `/set think` and `--think` choose."""

    #: one of THINK, or most tokens of the reasoning; None: as the model does by itself
    think: str | int | None = None
    #: the whole reasoning shows
    shown: bool = False

    def changed(self, value: str, origin: str) -> Thinking:
        """After a value: one of THINK, a number of tokens, default, show or hide. Raises UsageError that begins with
        `origin`."""
        if value in ("show", "hide"):
            return replace(self, shown=value == "show")
        if value in (*THINK, "default"):
            return replace(self, think=None if value == "default" else value)
        try:
            return replace(self, think=_BUDGET(value))
        except ValueError:
            names = ", ".join(THINK)
            raise UsageError(
                f"{origin}: expected show, hide, default, {names} or a number of tokens, got {value!r}"
            ) from None


@dataclass(frozen=True)
class Request:
    """What the user asks of a reply, beside the messages."""

    #: sampling values that the user set
    sampling: Mapping[str, Any] = field(default_factory=dict)
    #: as in Thinking
    think: str | int | None = None
    #: as in OpenAI's API; None: free text
    response_format: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Ending:
    """How a reply ended."""

    #: a value of FinishReason, or what a server reports
    reason: str
    #: tokens of the reply; None: not known
    tokens: int | None = None
    #: tokens of the prompt; None: not known
    prompt: int | None = None
    #: tokens of the prompt from a prefix cache, and the tier
    cached: int = 0
    tier: str = "none"
    #: draft tokens that were verified, and those that became part of the reply
    drafted: int = 0
    accepted: int = 0
    #: whether the drafter was asked at last, or why not; empty without a drafter
    draft_state: str = ""
    #: for `/set verbose`
    details: tuple[str, ...] = ()


class Reply(Iterator[Delta], ABC):
    """Iterates over the text of one reply while it is generated. Raises LuceError."""

    #: tokens so far; of a server that does not count them, its chunks
    tokens = 0
    #: tokens of the prompt; None: not known
    prompt: int | None = None
    #: set when the iteration has ended
    ending: Ending | None = None

    @abstractmethod
    def close(self) -> None:
        """Cancel the reply. Idempotent."""


class Replier(ABC):
    """Answers conversations. Methods raise LuceError; those about what it does not know raise UsageError."""

    #: the model's name
    name: str
    #: tokens of the context; None: not known
    context: int | None

    @abstractmethod
    def reply(self, messages: Messages, request: Request, on_progress: Callable[[int, int], None]) -> Reply:
        """Begin the reply to messages. `on_progress` gets (done, total) tokens of the prompt, if they are known."""

    @abstractmethod
    def count(self, text: str) -> int | None:
        """Tokens of a text; None: not known."""

    @abstractmethod
    def prompt_tokens(self, messages: Messages) -> int | None:
        """Tokens of a conversation with its template; None: not known."""

    @abstractmethod
    def check(self, request: Request, origin: str) -> None:
        """Raise UsageError that begins with `origin` if the model cannot do what a request asks."""

    @abstractmethod
    def default(self, name: str) -> Any:
        """The sampling value in force where the user sets none, as text or number."""

    # What /show prints: rows of names and values, or lines.

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """The model."""

    @abstractmethod
    def template(self) -> str:
        """The source of the chat template."""

    @abstractmethod
    def devices(self) -> list[dict[str, Any]]:
        """As Model.placement."""

    @abstractmethod
    def cache(self) -> dict[str, Any]:
        """The prefix cache."""

    @abstractmethod
    def close(self) -> None:
        """Release what the replier opened itself. Idempotent."""
