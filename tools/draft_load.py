"""Tokens a second of several replies at once, plain and drafted, with acceptance given: `bench_draft load`."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luce.api import MEASURED_SECONDS
from luce.backend.layersplit import LayerSplitBackend
from luce.cli import progress
from luce.config.sampling import SamplingParams
from luce.draft.drafter import Draftable, Drafter, PendingProposals, Proposal
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


@dataclass(frozen=True)
class Measured:
    """Greedy replies at once, from where the last of them begins to where the first one ends."""

    #: tokens a second
    speed: float
    #: median seconds of the steps that gave each reply one token
    plain_step: float
    #: tokens of each reply, whole
    replies: list[list[int]]


def together(engine: Engine, prompts: Sequence[NDArray[np.int32]], tokens: int) -> Measured:
    """Replies to all prompts at once."""
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
    within = [[(at, len(ids)) for at, ids in own if begin < at <= end] for own in found]
    count = sum(ids for own in within for _, ids in own)
    if not count:
        raise LuceError(f"replies of {tokens} tokens are too short to run at once")
    replies = [[token for _, ids in own for token in ids] for own in found]
    return Measured(count / (end - begin), _plain_step(within), replies)


def _plain_step(within: Sequence[Sequence[tuple[float, int]]]) -> float:
    """The median time of steps of one token each, in the reply that has the most of them; nan without any."""
    gaps = [
        [at - before for (before, _), (at, count) in itertools.pairwise(own) if count == 1] for own in within if own
    ]
    longest = max(gaps, key=len, default=[])
    return float(np.median(longest)) if longest else float("nan")


def load_table(
    target: str,
    sequences: Sequence[int],
    chances: Sequence[float],
    depth: int,
    tokens: int,
    *,
    rounds: int = 3,
    lookup: bool = False,
    **fields: Any,
) -> dict[str, Any]:
    """Load a target with its drafter, and report tokens a second by sequences at once and by acceptance: the medians of
    `rounds` rounds. Plain and drafted replies take turns, so that a device which slows down slows both. `lookup`: texts
    that repeat are looked up too, as `luce serve` does."""
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
            report["load"] += _rows(backend, drafter, prompts, chances, tokens, rounds, wait.step, lookup=lookup)
    return report


def _rows(
    backend: LayerSplitBackend,
    drafter: Drafter,
    prompts: Sequence[NDArray[np.int32]],
    chances: Sequence[float],
    tokens: int,
    rounds: int,
    say: Callable[[str], None],
    *,
    lookup: bool,
) -> list[dict[str, Any]]:
    """The report of replies to these prompts, one row for each acceptance."""
    count = len(prompts)
    with ExitStack() as stack:
        say(f"{count} sequences, plain")
        plain, replies = _engine(stack, backend, None, prompts, tokens)
        texts = {p.tobytes(): [*p.tolist(), *own] for p, own in zip(prompts, replies, strict=True)}
        engines = []
        for chance in chances:
            say(f"{count} sequences, acceptance {chance:g}")
            given = GivenDrafter(drafter, texts, len(prompts[0]), chance)
            engines.append(_engine(stack, backend, given, prompts, tokens, lookup=lookup)[0])
        # A collection of all that is loaded takes as long as some steps, in whatever replies it happens to come.
        gc.freeze()
        before = [together(plain, prompts, tokens)]
        drafted: list[list[Measured]] = []
        for turn in range(rounds):
            say(f"{count} sequences, round {turn + 1} of {rounds}")
            drafted.append([together(engine, prompts, tokens) for engine in engines])
            before.append(together(plain, prompts, tokens))
        speeds = [one.speed for one in before]
        both = {
            "plain": float(np.median(speeds)),
            "plain_spread": (max(speeds) - min(speeds)) / float(np.median(speeds)),
            "plain_step": float(np.median([one.plain_step for one in before])),
        }
        rows = []
        for chance, engine, own in zip(chances, engines, zip(*drafted, strict=True), strict=True):
            around = [(a.speed + b.speed) / 2 for a, b in itertools.pairwise(before)]
            gains = [one.speed / plain for one, plain in zip(own, around, strict=True)]
            stats = engine.stats().draft
            assert stats is not None
            row = {
                "sequences": count,
                "acceptance": chance,
                "drafted": float(np.median([one.speed for one in own])),
                "gain": float(np.median(gains)),
                "gain_spread": max(gains) - min(gains),
                "drafted_plain_step": float(np.median([one.plain_step for one in own])),
                "equal": all(one.replies == replies for one in own),
                "tokens_per_step": stats.tokens_per_step,
                "state": stats.state,
            }
            rows.append(row | both)
        return rows


def _engine(
    stack: ExitStack,
    backend: LayerSplitBackend,
    drafter: Drafter | None,
    prompts: Sequence[NDArray[np.int32]],
    tokens: int,
    *,
    lookup: bool = False,
) -> tuple[Engine, list[list[int]]]:
    """An engine after what `luce serve` measures first and two times all replies, which build kernels, capture graphs
    and measure for the engine; and the replies."""
    options = EngineOptions(eos=frozenset(), max_queue=len(prompts), chunk=backend.options.chunk, lookup=lookup)
    engine = Engine(backend, options, drafter=drafter)
    stack.callback(engine.close)
    engine.measure_drafting(MEASURED_SECONDS)
    together(engine, prompts, tokens)
    return engine, together(engine, prompts, tokens).replies
