"""The scheduler driven over the scripted backend, without threads or time."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from luce.engine.scheduler import ScheduledStep, Scheduler
from luce.engine.sequence import Sequence
from luce.kvcache.page_table import PageTables
from tests.support.scripted_backend import ScriptedBackend

SLOTS, CHUNK, CONTEXT = 3, 32, 512


def sequence(prompt: int | Many[int], max_new_tokens: int = 4, **more: object) -> Sequence:
    ids = list(range(prompt)) if isinstance(prompt, int) else prompt
    return Sequence(prompt=np.array([i % 97 for i in ids], np.int32), max_new_tokens=max_new_tokens, **more)  # type: ignore[arg-type]


@dataclass
class Drive:
    """Runs steps, picks the argmax and ends sequences, as the engine does."""

    slots: int = SLOTS
    chunk: int = CHUNK
    max_scored_rows: int = CHUNK
    windows: tuple[int | None, ...] = (None,)
    totals: tuple[int, ...] | None = None
    ended: list[Sequence] = field(default_factory=list)
    fail: bool = False
    #: whether the next step is prepared while one runs, as in the engine
    prepares: bool = True
    shares_prompts: bool = False

    def __post_init__(self) -> None:
        self.backend = ScriptedBackend(
            slots=self.slots, chunk=self.chunk, context=CONTEXT, windows=self.windows, pages=self.totals
        )
        self.pages = PageTables(
            self.backend.capacity.pages, self.windows, slots=self.slots, context=CONTEXT, chunk=self.chunk
        )
        self.scheduler = Scheduler(
            self.pages,
            slots=self.slots,
            chunk=self.chunk,
            max_scored_rows=self.max_scored_rows,
            shares_prompts=self.shares_prompts,
        )

    def step(self) -> ScheduledStep | None:
        for _ in self.scheduler.admit():
            pass
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        if self.fail:
            self.fail = False
            for part in plan.sequences:
                self.scheduler.remove(part.sequence)
            return plan
        output = self.backend.forward(plan.step)
        if self.prepares:
            self.scheduler.prepare(plan)
        assert len(output.logits) == plan.step.needs_logits.sum()
        self.scheduler.advance(plan)
        for part in plan.sequences:
            one = part.sequence
            if not one.prompt_remaining and one.max_new_tokens:
                one.reply.append(int(output.ids[part.ids][-1]))
            if not one.prompt_remaining and len(one.reply) == one.max_new_tokens:
                self.end(one)
        return plan

    def end(self, one: Sequence) -> None:
        self.scheduler.remove(one)
        self.ended.append(one)

    def run(self) -> None:
        while self.step():
            pass


def rows(plan: ScheduledStep | None) -> dict[Sequence, int]:
    assert plan is not None
    return {part.sequence: part.rows for part in plan.sequences}
