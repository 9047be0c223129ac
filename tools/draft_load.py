"""Tokens a second of several replies at once, plain and drafted, with acceptance given: `bench_draft load`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luce.api import MEASURED_SECONDS
from luce.backend.layersplit import LayerSplitBackend
from luce.cli import progress
from luce.config.sampling import SamplingParams
from luce.draft.drafter import Draftable, Drafter, PendingProposals, Proposal
from luce.engine.drafted import DraftStats
from luce.engine.engine_options import EngineOptions
from luce.engine.events import Event, Failed, Tokens
from luce.engine.loop import Engine
from luce.errors import LuceError
from tools.draft_target import REPLY_TIMEOUT, Silent, opened


class GivenDrafter:
    """A drafter that outlives its engines, whose tokens are right with a given chance: it replaces the tokens of its
    proposals. `texts`: prompts and their greedy replies, by the bytes of the prompts' `depth` tokens."""

    def __init__(self, drafter: Drafter, texts: dict[bytes, list[int]], depth: int, chance: float) -> None:
        self._drafter = drafter
        self._texts, self._depth = texts, depth
        # A place is right or wrong whenever it is proposed. Drawn before anything is timed.
        length = max(map(len, texts.values()))
        self._wrong = [np.random.default_rng(slot).random(length) >= chance for slot in range(len(texts))]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, asked: Sequence[Draftable]) -> PendingProposals:
        """As the drafter, with other tokens."""
        begun = self._drafter.propose(asked)

        def wait() -> list[Proposal]:
            return [self._given(one, own) for one, own in zip(asked, begun(), strict=True)]

        return wait

    def close(self) -> None:
        """The drafter stays open."""

    def _given(self, one: Draftable, own: Proposal) -> Proposal:
        text, at = self._texts.get(one.tokens[: self._depth].tobytes()), len(one.tokens)
        if text is None:
            # What the engine measures before the first reply.
            return own
        right = text[at : at + one.max_tokens]
        wrong = self._wrong[one.slot % len(self._wrong)][at : at + len(right)]
        return Proposal([token ^ 1 if bad else token for token, bad in zip(right, wrong, strict=True)])


def together(engine: Engine, prompts: Sequence[NDArray[np.int32]], tokens: int) -> tuple[float, list[list[int]]]:
    """Tokens a second of greedy replies at once, from where the last of them begins to where the first one ends, and
    their tokens."""
    events: list[list[tuple[float, Event]]] = [[] for _ in prompts]

    def sink(own: list[tuple[float, Event]]) -> Callable[[Event], None]:
        return lambda event: own.append((time.perf_counter(), event))

    for prompt, own in zip(prompts, events, strict=True):
        engine.submit(
            prompt.tolist(),
            SamplingParams(max_tokens=tokens),
            output=Silent(),
            on_event=sink(own),
        )
    if not engine.wait_idle(REPLY_TIMEOUT):
        raise TimeoutError(f"{len(prompts)} replies take longer than {REPLY_TIMEOUT} s")
    for own in events:
        if isinstance(own[-1][1], Failed):
            raise own[-1][1].error
    found = [[(at, [t.id for t in e.tokens]) for at, e in own if isinstance(e, Tokens)] for own in events]
    begin, end = max(own[0][0] for own in found), min(own[-1][0] for own in found)
    count = sum(len(ids) for own in found for at, ids in own if begin < at <= end)
    if not count:
        raise LuceError(f"replies of {tokens} tokens are too short to run at once")
    return count / (end - begin), [[token for _, ids in own for token in ids] for own in found]


def load_table(
    target: str, sequences: Sequence[int], chances: Sequence[float], depth: int, tokens: int, **fields: Any
) -> dict[str, Any]:
    """Load a target with its drafter, and report tokens a second by sequences at once and by acceptance."""
    fields = {"max_ctx": depth + tokens + 64, "parallel": max(sequences), **fields}
    report: dict[str, Any] = {"target": Path(target).name, "draft": fields["draft"], "depth": depth, "load": []}
    with (
        progress.shown(f"loading {report['target']}", lines=True) as wait,
        opened(target, **fields) as (backend, drafter),
    ):
        assert drafter is not None
        report["devices"] = [shard.info.device for shard in backend.shards]
        random = np.random.default_rng(0)
        for count in sequences:
            prompts = [random.integers(0, backend.capacity.vocab, depth, np.int32) for _ in range(count)]
            wait.step(f"{count} sequences, plain")
            first, replies, _ = loaded(backend, None, prompts, tokens)
            texts = {p.tobytes(): [*p.tolist(), *own] for p, own in zip(prompts, replies, strict=True)}
            rows: list[dict[str, Any]] = []
            for chance in chances:
                wait.step(f"{count} sequences, acceptance {chance:g}")
                given = GivenDrafter(drafter, texts, depth, chance)
                speed, drafted, stats = loaded(backend, given, prompts, tokens)
                assert stats is not None
                row = {"sequences": count, "acceptance": chance, "drafted": speed, "equal": drafted == replies}
                rows.append(row | {"tokens_per_step": stats.tokens_per_step, "state": stats.state})
            wait.step(f"{count} sequences, plain again")
            second, _, _ = loaded(backend, None, prompts, tokens)
            plain = (first + second) / 2
            both = {"plain": plain, "plain_spread": abs(first - second) / plain}
            report["load"] += [row | both | {"gain": row["drafted"] / plain} for row in rows]
    return report


def loaded(
    backend: LayerSplitBackend, drafter: Drafter | None, prompts: Sequence[NDArray[np.int32]], tokens: int
) -> tuple[float, list[list[int]], DraftStats | None]:
    """`together` by a new engine, after what `luce serve` measures first and two times, which build kernels, capture
    graphs and measure for the engine; and what the drafter did."""
    options = EngineOptions(eos=frozenset(), max_queue=len(prompts), chunk=backend.options.chunk)
    engine = Engine(backend, options, drafter=drafter)
    try:
        engine.measure_drafting(MEASURED_SECONDS)
        for _ in range(2):
            together(engine, prompts, tokens)
        speed, replies = together(engine, prompts, tokens)
        return speed, replies, engine.stats().draft
    finally:
        engine.close()
