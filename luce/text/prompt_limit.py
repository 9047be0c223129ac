"""How long a prompt may become while it is read, and whether its client still waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from luce.errors import ContextError, RequestError

# A prompt is read this many tokens beyond the limit, so that the message for most has its exact length.
_EXCESS = 32768


@dataclass(frozen=True)
class PromptLimit:
    """Stops the reading of a prompt between two pieces of it."""

    #: the context length; None: no limit
    tokens: int | None = None
    #: whether nobody waits for the prompt any more; called on the reading thread
    stopped: Callable[[], bool] = lambda: False

    def check(self, read: int) -> None:
        """`read`: tokens so far, or a lower bound of all. Raises ContextError, RequestError if the client has left."""
        if self.stopped():
            raise RequestError("the client has left", code="cancelled")
        if self.tokens is not None and read > self.tokens + _EXCESS:
            raise ContextError(
                f"This model's maximum context length is {self.tokens} tokens. However, your messages resulted in at "
                f"least {read} tokens. Please reduce the length of the messages.",
                tokens=read,
                context=self.tokens,
            )


NO_LIMIT = PromptLimit()
