"""For tests of sequences that are longer than what the devices hold: a policy, and sequences for an engine."""

from __future__ import annotations

import queue
from collections.abc import Sequence

import numpy as np

from luce.config.sampling import SamplingParams
from luce.engine.events import Event, Failed, Finished, Tokens
from luce.engine.loop import Engine
from luce.kvcache.policies import AgePolicy, Scores
from luce.runtime.step import PAGE, Int32
from tests.support.cached_engine import Silent

WAIT = 60


class Hashed(AgePolicy):
    """Scores that depend on the tokens, and change as they become more. Knows nothing of pages it has not seen."""

    name = "hashed"
    needs_pages = True

    def __init__(self) -> None:
        self.seen: dict[int, set[int]] = {}

    def scores(self, slot: int, tokens: Int32, pages: Sequence[int]) -> Scores | None:
        if not pages:
            return None
        known = self.seen.get(slot, set()) | {entry for entry, page in enumerate(pages) if page >= 0}
        assert len(known) == len(pages), "a page was swapped out before the policy saw it"
        random = np.random.default_rng(int(tokens[: len(pages) * PAGE].sum()) + len(tokens))
        return random.normal(size=len(pages)).astype(np.float32)

    def before_swap_out(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        assert all(page >= 0 for page in pages)
        self.seen.setdefault(slot, set()).update(entries)

    def forget(self, slot: int) -> None:
        self.seen.pop(slot, None)


class Asked:
    """A sequence, and what comes of it."""

    def __init__(self, engine: Engine, prompt: Sequence[int], n: int, logprobs: int | None = None) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        params = SamplingParams(max_tokens=n, ignore_eos=True, logprobs=logprobs)
        self.ticket = engine.submit(prompt, params, output=Silent(), on_event=self._events.put)
        self.cached = 0
        self.drafted = 0

    def reply(self) -> list[int]:
        tokens: list[int] = []
        while True:
            event = self._events.get(timeout=WAIT)
            if isinstance(event, Tokens):
                tokens += [token.id for token in event.tokens]
            elif isinstance(event, Finished):
                self.cached, self.drafted = event.timings.cached_tokens, event.timings.drafted
                return tokens
            elif isinstance(event, Failed):
                raise event.error
