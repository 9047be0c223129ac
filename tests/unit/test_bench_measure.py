"""The steps that `luce bench` times: each is a step as the engine would make it."""

from __future__ import annotations

import numpy as np
import pytest

from luce.bench.cost import Rows
from luce.bench.measure import Stepper, Workload
from luce.runtime.step import Output, Step
from tests.support.scripted_backend import ScriptedBackend

CHUNK = 16


@pytest.mark.parametrize("windows", [(None,), (None, 40)])
def test_replies_are_those_of_the_prompts(windows: tuple[int | None, ...]) -> None:
    # The scripted backend's tokens are a hash of what it reads back through the pages.
    backend = ScriptedBackend(chunk=CHUNK, windows=windows, context=200)
    stepper = Stepper(backend, CHUNK)
    stepper.fill([0, 2], 70)
    for _ in range(20):
        stepper.decode([0, 2])
    assert backend.broken is None
    prompts = [backend._seen[slot][:70] for slot in (0, 2)]
    assert prompts[0] != prompts[1]
    for slot, prompt in zip((0, 2), prompts, strict=True):
        assert backend._seen[slot][70:] == backend.reply(prompt, 20)
    assert backend.steps == [(16, 1)] * 4 + [(6, 1)] + [(16, 1)] * 4 + [(6, 1)] + [(2, 2)] * 20


@pytest.mark.parametrize(
    "test", [Workload("prompt", 40, 9), Workload("decode", 5, 70), Workload("verify", 4, 0), Workload("batch", 3, 9, 5)]
)
def test_plans_are_what_runs(test: Workload) -> None:
    ran: list[tuple[list[Rows], int]] = []

    class Recorder(ScriptedBackend):
        def _forward(self, step: Step) -> Output:
            # Only the contract: these steps read contexts that nothing computed.
            self._check(step)
            return Output(np.zeros(len(step.wanted), np.int32), np.empty((0, self.vocab), np.float32))

    def hook(step: Step) -> None:
        ran.append(([Rows(span.rows, span.position) for span in step.spans], len(step.wanted)))
        assert step.positions.tolist() == [span.position + i for span in step.spans for i in range(span.rows)]

    backend = Recorder(chunk=CHUNK, context=200, hook=hook)
    stepper = Stepper(backend, CHUNK)
    for _ in range(2):
        ran.clear()
        assert stepper.run(test) > 0
        assert ran == test.plan(CHUNK)
    assert sum(span.rows for spans, _ in ran for span in spans) == test.tokens
    assert max(span.position + span.rows for spans, _ in ran for span in spans) == test.context


def test_names() -> None:
    tests = [
        Workload("prompt", 512, 0),
        Workload("decode", 128, 8192),
        Workload("verify", 16, 0),
        Workload("batch", 64, 0, 32),
    ]
    assert [test.name for test in tests] == ["prompt 512", "decode 128 at 8192", "verify 16 rows", "64 sequences"]


def test_every_sequence_gets_a_prompt_of_its_own() -> None:
    backend = ScriptedBackend(chunk=CHUNK)
    Stepper(backend, CHUNK).fill(range(4), 9)
    assert len({tuple(seen) for seen in backend._seen}) == 4
    assert np.unique([len(seen) for seen in backend._seen]).tolist() == [9]
