"""Several replies at once by the speculator, as the engine drives it, on a device whose times come from a table.

No thread, no wall time: the clock is the sum of what the table says. A draft reads the target's features in the steps
of luce.draft, whose shapes take longer at first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from luce.draft.context import CONTEXT_CHUNK, Context, PageRing, of_few_sizes
from luce.draft.dflash.drafter import DFlashDrafter
from luce.draft.drafter import Draftable, PendingProposals, Proposal
from luce.engine.drafted import DraftLimits
from luce.engine.scheduler import ScheduledSequence, ScheduledStep
from luce.engine.sequence import Sequence
from luce.engine.speculate import Speculator
from luce.runtime.step import Int32, Span, Step, StepShape

PROMPT = 8


@dataclass(frozen=True)
class Costs:
    """What a device takes, in ms."""

    #: a step by its rows, of one sequence
    rows: dict[int, float]
    #: each further sequence of a step
    sequence: float
    #: proposals by the number of sequences
    drafting: dict[int, float]
    #: the host between two steps, for each sequence; beside the device where nothing is drafted
    host: float = 0.03
    #: the first step of a shape, and the second one, which is captured
    first: tuple[float, float] = (10.0, 22.0)
    #: up to 16 rows of features that a draft reads, and the first two times of a shape: such proposals took 11 to 37 ms
    #: on an H100, others 3 to 8
    reading: float = 0.15
    first_reading: tuple[float, float] = (8.0, 25.0)
    #: how much the times of launches vary, and the share of launches that take so many ms more
    noise: float = 0.0
    stalls: tuple[float, float] = (0.0, 0.0)

    def step(self, rows: int, sequences: int) -> float:
        """A step."""
        return float(np.interp(rows, [*self.rows], [*self.rows.values()])) + self.sequence * (sequences - 1)

    def drafts(self, count: int) -> float:
        """Proposals for so many sequences."""
        return float(np.interp(count, [0, *self.drafting], [0.0, *self.drafting.values()]))


@dataclass
class Device:
    """A clock, in seconds, and the shapes of steps that were seen."""

    costs: Costs
    seconds: float = 0.0
    shapes: Counter[tuple[Hashable, ...]] = field(default_factory=Counter)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    #: a GPU as luce.draft sees it
    host: bool = False
    captures: bool = True
    name: str = "given"

    def clock(self) -> float:
        return self.seconds

    def run(self, *shape: Hashable, ms: float, first: tuple[float, float] | None = None) -> None:
        """Work of a shape."""
        seen, first = self.shapes[shape], first or self.costs.first
        self.shapes[shape] += 1
        (share, stall), noise = self.costs.stalls, self.costs.noise
        varied = ms * float(np.exp(self.random.normal(0.0, noise) - noise**2 / 2)) if noise else ms
        held_up = stall if share and self.random.random() < share else 0.0
        self.seconds += 1e-3 * (varied + held_up + (first[seen] if seen < len(first) else 0.0))


class ReadingModel:
    """The context of a draft, whose device takes what the table says."""

    weights = state = 0

    def __init__(self, device: Device, slots: int, block: int) -> None:
        self.spec = SimpleNamespace(block=1 + block)
        self.context = Context([PageRing(2048, CONTEXT_CHUNK)], slots)
        self._device = device

    def append_context(self, slots: Many[int], counts: Many[int], rows: Int32) -> None:
        shape = StepShape.of(self.context.append_step(slots, counts, of_few_sizes(rows)))
        self.context.commit(slots, counts)
        costs = self._device.costs
        self._device.run(shape, ms=costs.reading * -(-shape.rows // 16), first=costs.first_reading)

    def close(self) -> None:
        pass


class Given(DFlashDrafter):
    """Blocks whose tokens are right with a chance, which depends on place and sequence alone. The right token at
    position p is p."""

    def __init__(self, device: Device, chances: Many[float], block: int) -> None:
        slots = len(chances)
        ring, head = SimpleNamespace(slots=slots, capacity=4096), SimpleNamespace(device=device)
        super().__init__(ReadingModel(device, slots, block), ring, head)  # type: ignore[arg-type]
        self._device, self.chances = device, list(chances)
        self.asked = [0] * slots

    def right(self, slot: int, position: int) -> bool:
        return bool(np.random.default_rng((slot, position)).random() < self.chances[slot])

    def propose(self, asked: Many[Draftable]) -> PendingProposals:
        for parts in self._missing([one.slot for one in asked], [len(one.tokens) - 1 for one in asked]):
            self._append(parts)

        def wait() -> list[Proposal]:
            self._device.run(-1, len(asked), ms=self._device.costs.drafts(len(asked)))
            return [self._block(one) for one in asked]

        return wait

    def _block(self, one: Draftable) -> Proposal:
        self.asked[one.slot] += 1
        places = range(len(one.tokens), len(one.tokens) + one.max_tokens)
        return Proposal([place if self.right(one.slot, place) else -place % 1_000_000 for place in places])


class GivenBackend:
    """Steps that take what the table says."""

    def __init__(self, device: Device, slots: int) -> None:
        self.capacity = SimpleNamespace(slots=slots, pages=(slots,), windows=())
        self._device = device

    def forward(self, step: Step, queued: Callable[[], None] = lambda: None) -> None:
        queued()
        self._device.run(StepShape.of(step), ms=self._device.costs.step(step.rows, len(step.spans)))

    def stage(self, step: Step) -> None:
        pass

    def follow(self, step: Step) -> bool:
        return False


@dataclass
class Load:
    """Replies of `tokens` tokens each, one for each chance, again and again with one speculator."""

    costs: Costs
    chances: Many[float]
    tokens: int = 96
    block: int = 7
    step_rows: int = 64
    #: seconds of the device's time for measuring at first
    measured: float = 0.0

    def __post_init__(self) -> None:
        self.device = Device(self.costs)
        self.drafter = Given(self.device, self.chances, self.block)
        limits = DraftLimits(vocab=1 << 20, step_rows=self.step_rows, verify_rows=16)
        self.speculator = Speculator(self.drafter, limits, clock=self.device.clock)
        if self.measured:
            backend: Any = GivenBackend(self.device, len(self.chances))
            self.speculator.measure_costs(backend, self.measured)
        #: (rows, sequences, asked, seconds) of each step
        self.steps: list[tuple[int, int, int, float]] = []

    def replies(self) -> float:
        """All replies at once; returns how many times faster than plain steps they are until the first one ends."""
        known = [self._begun(slot) for slot in range(len(self.chances))]
        self.drafter.observe([Span(slot, 0, PROMPT, 0) for slot in range(len(self.chances))])
        begun, plain_steps = self.device.seconds, 0
        while known:
            self._step(known)
            if any(len(one.reply) >= one.max_new_tokens for one in known) and not plain_steps:
                seconds, tokens = self.device.seconds - begun, sum(len(one.reply) - 1 for one in known)
                plain_steps = len(known)
                share, stall = self.costs.stalls
                # The host works while the device computes the step ahead.
                plain = 1e-3 * (self.costs.step(plain_steps, plain_steps) + share * stall)
                gain = tokens / seconds / (plain_steps / plain)
            for one in known:
                if len(one.reply) >= one.max_new_tokens:
                    self.speculator.forget(one)
            running, known = known, [one for one in known if len(one.reply) < one.max_new_tokens]
            self._ahead &= known == running
        return gain

    def _begun(self, slot: int) -> Sequence:
        one = Sequence(prompt=np.arange(PROMPT, dtype=np.int32), max_new_tokens=self.tokens)
        one.schedule.slot, one.schedule.computed = slot, PROMPT
        one.reply.append(PROMPT)
        return one

    def _step(self, known: list[Sequence]) -> None:
        begun = self.device.seconds
        asked_before = sum(self.drafter.asked)
        if not self._ahead:
            assert not self.speculator.propose(tuple(known))
        for call in self._later:
            call()
        self._later = []
        if not self._ahead:
            assert not self.speculator.receive()
            host = 1e-3 * self.costs.host * len(known)
            # The host works while drafts are made.
            self.device.seconds = max(self.device.seconds, begun + host)
        counts = [1 + len(one.draft.tokens) for one in known]
        rows = sum(counts)
        found, at = [], 0
        for one, count in zip(known, counts, strict=True):
            part = slice(at, at + count)
            found.append(ScheduledSequence(one, PROMPT + len(one.reply) - 1, count, part, part, one.draft))
            at += count
        spans = tuple(
            Span(
                slot := one.sequence.slot or 0,
                one.ids.start,
                one.rows,
                one.position,
                accepted=self._pending.pop(slot, 0),
                speculative=one.rows > 1,
            )
            for one in found
        )
        step = Step.of_spans(spans, np.zeros(rows, np.int32), (), np.arange(rows, dtype=np.int32))
        scheduled, queued = ScheduledStep(step, tuple(found)), self.device.seconds
        self.speculator.observe(scheduled)
        self.speculator.prepare(scheduled)
        self._ahead = self.speculator.drafts_nothing
        self.device.run(StepShape.of(step), ms=self.costs.step(rows, len(known)))
        spent = self.device.seconds - queued
        self.speculator.record_step(scheduled, spent)
        self.steps.append((rows, len(known), sum(self.drafter.asked) - asked_before, spent))
        for done in found:
            self._commit(done)

    #: whether the next step is queued already, as luce.engine.overlap queues it
    _ahead: bool = False
    #: rows of slots' last steps that the next ones accept
    _pending: dict[int, int] = field(default_factory=dict)
    _later: list[Callable[[], None]] = field(default_factory=list)

    def _commit(self, one: ScheduledSequence) -> None:
        sequence, accepted = one.sequence, list[int]()
        room = sequence.max_new_tokens - len(sequence.reply)
        place = PROMPT + len(sequence.reply)
        for token in one.draft.tokens:
            if token != place + len(accepted) or len(accepted) >= room - 1:
                break
            accepted.append(len(accepted) + 1)
        sequence.reply.extend(range(place, place + 1 + len(accepted)))
        sequence.schedule.computed = PROMPT + len(sequence.reply) - 1
        if one.draft.tokens:
            self._pending[sequence.slot or 0] = 1 + len(accepted)
            ended = len(sequence.reply) >= sequence.max_new_tokens
            record = self.speculator.record_verification
            if ended:
                record(sequence, one, accepted, ended=ended)
            else:
                self._later.append(lambda: record(sequence, one, accepted, ended=ended))
