"""What drafts cost is measured before the first reply, on a device whose times are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from luce.draft.drafter import Draftable, PendingProposals
from luce.engine.draft_costs import shapes
from luce.engine.loop import Engine
from luce.errors import BackendError
from tests.support.draft_load import Costs, Load
from tests.support.drafters import oracle
from tests.support.replies import PROMPT, make_engine, submit
from tests.support.scripted_backend import ScriptedBackend

COSTS = Costs(rows={1: 5.0, 2: 6.0, 4: 7.0, 8: 9.0, 16: 14.0}, sequence=0.0, drafting={1: 2.0, 2: 2.5, 4: 4.0, 8: 6.0})


def test_the_table_has_the_times_of_the_device() -> None:
    load = Load(COSTS, [0.5] * 8, measured=10.0)
    pace = load.speculator.pace
    for rows in (1, 2, 4, 8, 9, 11, 15, 16):
        # A verification's rows are read by the drafter too.
        assert 1e3 * pace.step_times(rows, 1 if rows < 9 else 2) == pytest.approx(COSTS.step(rows, 1), abs=0.2), rows
    for count in (1, 2, 4, 8):
        # And the row that the drafter has not read.
        assert 1e3 * pace.draft_times(count) == pytest.approx(COSTS.drafts(count) + COSTS.reading, abs=0.1), count
    # Nothing was booked, nothing is known of acceptance.
    assert not pace.account.overdrawn and not pace.account.affords(1e-9)


def test_a_drafter_captures_what_it_reads_behind_rests() -> None:
    """When it is made: twice each number of rows, launched and captured."""
    assert list(Load(COSTS, [0.5]).device.shapes.values()) == 5 * [2]


def test_replies_correct_the_table() -> None:
    load = Load(COSTS, [0.9], tokens=800, measured=10.0)
    pace, slower = load.speculator.pace, Costs(rows={1: 5.0, 16: 60.0}, sequence=0.0, drafting=COSTS.drafting)
    drafted = pace.step_times(8, 1)
    load.costs = load.device.costs = slower
    load.replies()
    assert pace.step_times(8, 1) > 2 * drafted


@pytest.mark.parametrize("seconds", [0.02, 0.3])
def test_the_time_is_bounded(seconds: float) -> None:
    load = Load(COSTS, [0.5] * 8, measured=seconds)
    # A first step takes up to 36 ms and what the drafter reads of it. The drafter captures its own before.
    taken = load.device.seconds - Load(COSTS, [0.5] * 8).device.seconds
    assert seconds <= taken < seconds + 0.05
    assert load.replies() > 0.5


def test_one_of_each_shape() -> None:
    sizes = (2, 4, 8, 16)
    assert list(shapes(1, 7, 16, sizes)) == [[1], [3], [7]]
    found = list(shapes(4, 7, 16, sizes))
    assert found == [[1, 1, 1, 1], [3, 1, 0, 0], [4, 0, 0, 0], [3, 3, 1, 0], [7, 0, 0, 0], [3, 3, 3, 3], [7, 5, 0, 0]]
    assert list(shapes(16, 7, 16, sizes)) == []
    for count in range(1, 16):
        for drafts in shapes(count, 7, 16, sizes):
            assert len(drafts) == count and count + sum(drafts) <= 16 and max(drafts) <= 7


def engine(backend: ScriptedBackend, drafter: Any, **options: Any) -> Engine:
    return make_engine(backend, drafter=drafter, chunk=64, **options)


@pytest.mark.parametrize("recurrent", [False, True])
def test_replies_are_what_they_are_without(recurrent: bool) -> None:
    replies = []
    for measured in (False, True):
        backend = ScriptedBackend(recurrent=recurrent)
        running = engine(backend, oracle(backend, block=7))
        if measured:
            running.measure_drafting(60.0)
            assert len(backend.steps) > 40 and running.stats().steps == 0 and running.stats().pages_used == 0
        reply, _ = submit(running, PROMPT, max_tokens=40)
        reply.finished()
        running.close()
        replies.append(reply.ids)
    assert replies[0] == replies[1]


def test_nothing_is_written_to_pages_of_the_prefix_cache() -> None:
    backend = ScriptedBackend()
    running = engine(backend, oracle(backend, block=7), cache_bytes=1 << 20)
    reply, _ = submit(running, list(range(20, 90)) * 3, max_tokens=40)
    reply.finished()
    steps = len(backend.steps)
    running.measure_drafting(60.0)
    assert len(backend.steps) == steps
    running.close()


def test_a_failure_ends_the_measuring_only(caplog: pytest.LogCaptureFixture) -> None:
    backend = ScriptedBackend()
    drafter, calls = oracle(backend, block=7), 0
    propose = drafter.propose

    def failing(asked: Sequence[Draftable]) -> PendingProposals:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise BackendError("the draft is away")
        return propose(asked)

    drafter.propose = failing  # type: ignore[method-assign]
    running = engine(backend, drafter)
    running.measure_drafting(60.0)
    assert "measured while replies run: the draft is away" in caplog.text and calls == 2
    reply, _ = submit(running, PROMPT, max_tokens=20)
    reply.finished()
    stats = running.stats().draft
    running.close()
    assert reply.ids == backend.reply(list(PROMPT), 20)[:20] and stats is not None and stats.on
