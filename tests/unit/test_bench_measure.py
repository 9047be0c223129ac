"""The steps that `luce bench` times: they equal the engine's."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.bench.cost import Rows
from luce.bench.measure import Kind, Stepper, Workload
from luce.kvcache.paging import KVFlash
from luce.runtime.step import PAGE, Step
from tests.support.paging import Asked, Hashed
from tests.support.replies import make_engine
from tests.support.scripted_backend import ScriptedBackend

CHUNK = 16


@pytest.mark.parametrize("windows", [(None,), (None, 40)])
def test_replies_are_those_of_the_prompts(windows: tuple[int | None, ...]) -> None:
    # The scripted backend's tokens are a hash of what it reads back through the pages.
    backend = ScriptedBackend(chunk=CHUNK, windows=windows, context=200)
    stepper = Stepper(backend, CHUNK)
    stepper.prefill([0, 2], 70)
    for _ in range(20):
        stepper.decode([0, 2])
    assert backend.broken is None
    prompts = [backend.state.seen[slot][:70] for slot in (0, 2)]
    assert prompts[0] != prompts[1]
    for slot, prompt in zip((0, 2), prompts, strict=True):
        assert backend.state.seen[slot][70:] == backend.reply(prompt, 20)
    assert backend.steps == [(16, 1)] * 4 + [(6, 1)] + [(16, 1)] * 4 + [(6, 1)] + [(2, 2)] * 20


@pytest.mark.parametrize(
    "test", [Workload("prompt", 40, 9), Workload("decode", 5, 70), Workload("verify", 4, 0), Workload("batch", 3, 9, 5)]
)
def test_plans_equal_the_steps_that_run(test: Workload) -> None:
    ran: list[tuple[list[Rows], int]] = []

    class Recorder(ScriptedBackend):
        def _compute(self, step: Step) -> NDArray[np.float32]:
            # Only the contract: these steps read contexts that nothing computed.
            self._check(step)
            return np.zeros((len(step.output_rows), self.capacity.vocab), np.float32)

    def hook(step: Step) -> None:
        ran.append(([Rows(span.rows, span.position) for span in step.spans], len(step.output_rows)))
        assert step.positions.tolist() == [span.position + i for span in step.spans for i in range(span.rows)]

    backend = Recorder(chunk=CHUNK, context=200, hook=hook)
    stepper = Stepper(backend, CHUNK)
    for _ in range(2):
        ran.clear()
        assert stepper.run(test).seconds > 0
        assert ran == test.plan(CHUNK)
    assert sum(span.rows for spans, _ in ran for span in spans) == test.tokens
    assert max(span.position + span.rows for spans, _ in ran for span in spans) == test.context


def paged(backend: ScriptedBackend, tau: int = 16) -> Stepper:
    return Stepper(backend, backend.chunk, KVFlash(Hashed(), 4, tau, 1 << 30))


def test_pages_are_swapped_as_in_the_engine() -> None:
    """A row's token depends on which pages it sees."""
    sizes = {"chunk": 2 * PAGE, "context": 30 * PAGE, "bound": 9, "slots": 2, "windows": (None, 100)}
    backend = ScriptedBackend(**sizes)  # type: ignore[arg-type]
    stepper = paged(backend)
    depth = 20 * PAGE + 9
    prefilled = stepper.prefill([0, 1], depth)
    assert prefilled.traffic.pages_swapped_out > 20 and prefilled.traffic.pages_swapped_in > 0
    assert prefilled.traffic.rescores == 2
    for _ in range(100):
        stepper.decode([0, 1])
    assert backend.broken is None
    again = ScriptedBackend(**sizes)  # type: ignore[arg-type]
    how = KVFlash(Hashed(), 4, 16, 1 << 30)
    engine = make_engine(again, kvflash=how)
    try:
        for seen in backend.state.seen:
            assert Asked(engine, seen[:depth], 100).reply() == seen[depth:]
        stats = engine.stats().paging
    finally:
        engine.close()
    pager = stepper.pager
    assert stats is not None and pager is not None
    # Neither copies a page to host memory twice.
    found = pager.stats()
    assert (found.swapped_out, found.swapped_in, found.rescores, found.moved_bytes) == (
        stats.swapped_out,
        stats.swapped_in,
        stats.rescores,
        stats.moved_bytes,
    )


@pytest.mark.parametrize("kind", ["prompt", "decode", "verify", "batch"])
def test_every_run_begins_with_the_same_pages(kind: Kind) -> None:
    class Unread(ScriptedBackend):
        def _compute(self, step: Step) -> NDArray[np.float32]:
            return np.zeros((len(step.output_rows), self.capacity.vocab), np.float32)

    views: list[list[list[int]]] = []

    def hook(step: Step) -> None:
        view = step.views[0]
        assert view.count.max() <= 9
        views[-1].append(view.first[0, : view.count[0]].tolist())

    backend = Unread(chunk=2 * PAGE, context=30 * PAGE, bound=9, slots=2, hook=hook)
    stepper = paged(backend)
    views.append([])
    stepper.prefill([0, 1], 20 * PAGE)
    test = Workload(kind, {"batch": 2, "verify": 3}.get(kind, 100), 20 * PAGE, 100 if kind == "batch" else 1)
    runs = []
    for _ in range(3):
        views.append([])
        runs.append(stepper.run(test).traffic)
    # Another prompt swaps other pages in.
    same = slice(0, 1) if kind == "prompt" else slice(None)
    assert views[1][same] == views[2][same] == views[3][same]
    if kind == "verify":
        assert runs[0].pages_swapped_out <= 1 and not runs[0].rescores
    else:
        assert runs[0].pages_swapped_out > 1 and runs[0].rescores > 0 and runs[0].rescore_seconds > 0
    assert len({run.rescores for run in runs}) == 1
    assert len({(run.pages_swapped_out, run.pages_swapped_in) for run in runs}) == 1 or kind == "prompt"


def test_the_time_of_a_round_of_scoring() -> None:
    backend = ScriptedBackend(chunk=2 * PAGE, context=200 * PAGE, bound=9, slots=1)
    stepper = paged(backend)
    stepper.prefill([0], 9 * PAGE)
    assert stepper.time_rescore(0) is None, "all pages are resident"
    for depth, interval in ((10 * PAGE, 16), (150 * PAGE, 150 * PAGE // 45)):
        stepper.prefill([0], depth)
        rescore = stepper.time_rescore(0)
        assert rescore is not None and rescore[0] > 0 and rescore[1] == interval
    assert Stepper(ScriptedBackend(chunk=CHUNK), CHUNK).time_rescore(0) is None


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
    Stepper(backend, CHUNK).prefill(range(4), 9)
    assert len({tuple(seen) for seen in backend.state.seen}) == 4
    assert np.unique([len(seen) for seen in backend.state.seen]).tolist() == [9]
