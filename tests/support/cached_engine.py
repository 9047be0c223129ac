"""Engines with a prefix cache over the scripted backend."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from luce.config.sampling import SamplingParams
from luce.engine.events import Event, Failed, Finished, Tokens
from luce.engine.loop import Engine
from tests.support.scripted_backend import ScriptedBackend


class Silent:
    """A reply without text."""

    stopped = None
    texts = ()

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclass
class Rig:
    """An engine and its backend."""

    engine: Engine
    backend: ScriptedBackend

    def start(
        self, prompt: Sequence[int], n: int, boundaries: Sequence[int] = (), shared: int | None = None, **params: Any
    ) -> queue.SimpleQueue[Event]:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        asked = SamplingParams(max_tokens=n, **params)
        self.engine.submit(
            prompt, asked, output=Silent(), on_event=events.put, boundaries=boundaries, max_cached_tokens=shared
        )
        return events

    def ask(
        self, prompt: Sequence[int], n: int, boundaries: Sequence[int] = (), shared: int | None = None, **params: Any
    ) -> tuple[list[int], int]:
        """(reply, tokens from the cache)."""
        return finish(self.start(prompt, n, boundaries, shared, **params))


def finish(events: queue.SimpleQueue[Event]) -> tuple[list[int], int]:
    """(reply, tokens from the cache) of a sequence that has begun."""
    reply: list[int] = []
    while not isinstance(event := events.get(timeout=60), Finished):
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Tokens):
            reply += [token.id for token in event.tokens]
    return reply, event.timings.cached_tokens


def ids(n: int, seed: int = 0) -> list[int]:
    """`n` random tokens."""
    drawn: list[int] = np.random.default_rng(seed).integers(0, 97, n).tolist()
    return drawn


#: a model that resumes behind any page, and models that resume at checkpoints only
FREE: dict[str, Any] = {}
EXACT = [{"recurrent": True}, {"windows": (None, 40)}, {"windows": (None, 40), "recurrent": True}]
each_exact = pytest.mark.parametrize("kind", EXACT, ids=["recurrent", "windowed", "both"])
each_kind = pytest.mark.parametrize("kind", [FREE, *EXACT], ids=["free", "recurrent", "windowed", "both"])
