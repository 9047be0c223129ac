"""Drafting under load never costs: several replies by the speculator on a device whose times are an H100's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from luce.api import MEASURED_SECONDS
from luce.runtime.step import StepShape
from tests.support.draft_load import Costs, Load

# 50 s of CPU, whose result the sources alone decide: the device's clock is a sum.
pytestmark = pytest.mark.provable

#: the synthetic 27B (Q4_K_M) with a DFlash2 draft of the published size, docs/measurements/2026-11-26-h100.md
H100 = Costs(
    rows={1: 7.57, 2: 8.45, 3: 8.1, 4: 8.05, 8: 8.35, 9: 9.15, 16: 9.25, 17: 15.9, 32: 16.4, 64: 25.3},
    sequence=0.12,
    drafting={1: 3.0, 2: 3.5, 3: 4.2, 4: 5.0, 8: 6.4},
)
CHANCES = (0.0, 0.3, 0.6, 0.8, 0.95)
# What drafting has to gain at least, by sequences and by acceptance.
GAINS = {
    1: (0.99, 0.99, 1.65, 2.9, 4.0),
    2: (0.99, 0.99, 1.65, 2.9, 4.3),
    4: (0.99, 0.99, 1.15, 1.6, 2.5),
    8: (0.99, 0.99, 0.99, 1.05, 1.85),
    16: (0.99, 0.99, 0.99, 0.99, 1.15),
    32: (0.99, 0.99, 0.99, 0.99, 1.03),
    64: (0.999, 0.999, 0.999, 0.999, 0.999),
}


@pytest.mark.parametrize("sequences", GAINS)
def test_replies_with_drafts_are_never_slower_than_without(sequences: int) -> None:
    for chance, least in zip(CHANCES, GAINS[sequences], strict=True):
        load = Load(H100, [chance] * sequences, tokens=256, measured=MEASURED_SECONDS)
        first, _, *gains = (load.replies() for _ in range(4 if sequences < 16 else 3))
        # Of the first replies each sequence is tried.
        assert first > 0.965 and min(gains) > 0.98 and sum(gains) / len(gains) >= least, (chance, first, gains)
        assert load.drafter.asked != [0] * sequences or sequences == 64


@pytest.mark.parametrize("costs", [replace(H100, noise=0.15), replace(H100, noise=0.02, stalls=(0.02, 10.0))])
@pytest.mark.parametrize("sequences", [2, 8, 32])
def test_noise_and_stalls_of_a_host_cost_no_more(sequences: int, costs: Costs) -> None:
    """The mean of several runs: each has its own luck with the device, as those without drafts have."""
    for chance in (0.0, 0.3, 0.6):
        load = Load(costs, [chance] * sequences, tokens=256, measured=3.0)
        gains = [load.replies() for _ in range(4 if sequences > 8 else 8)][1:]
        assert sum(gains) / len(gains) > 0.975, (chance, gains)


@pytest.mark.parametrize("sequences", [2, 4, 8])
def test_tries_behind_a_rest_cost_what_they_are_expected_to(sequences: int) -> None:
    """A sequence that rested owes the drafter as many rows: their number builds nothing, and is part of the price."""
    load = Load(H100, [0.0] * sequences, tokens=400, measured=3.0)
    load.replies()
    shapes = len(load.device.shapes)
    load.replies()
    assert len(load.device.shapes) <= shapes + 2
    pace = load.speculator.pace
    for owed in (20, 60, 60, 60):
        usual, booked = pace.record_drafting(1, owed, 0.004)
        assert booked == 0.004 and usual == pytest.approx(1e-3 * (3.0 + H100.reading * -(-owed // 16)), rel=0.3)
    # Not at twice a proposal: at twice what such tries took, as the host may have held it up.
    assert pace.record_drafting(1, 1 << 20, 0.05)[1] == 0.05
    usual, booked = pace.record_drafting(1, 60, 0.05)
    assert booked == 2 * usual < 0.01


def test_replies_find_the_shapes_of_their_steps() -> None:
    """What is measured before the first reply is captured then: drafted replies capture nothing, until some end."""
    for sequences in (1, 2, 4, 8):
        known, new = Load(H100, [0.8] * sequences, measured=3.0), Load(H100, [0.8] * sequences)
        before = set(known.device.shapes)
        assert known.replies() > new.replies() + 0.15
        found = [shape for (shape, *_) in known.device.shapes.keys() - before if isinstance(shape, StepShape)]
        assert max((shape.spans for shape in found), default=0) < sequences


def test_first_steps_of_shapes_are_no_debt() -> None:
    """Steps that capture graphs take several times as long, once: they do not end drafting."""
    load = Load(H100, [0.8] * 4)
    load.replies()
    before = sum(load.drafter.asked)
    load.replies()
    assert sum(load.drafter.asked) - before > 80


def test_an_acceptance_that_rises_or_falls_is_noticed() -> None:
    for sequences, least in ((1, 2.0), (4, 1.2)):
        load = Load(H100, [0.0] * sequences, tokens=384)
        load.replies()
        load.drafter.chances = [0.8] * sequences
        for _ in range(sequences.bit_length()):
            load.replies()
        assert load.replies() > least
        load.drafter.chances = [0.0] * sequences
        load.replies()
        assert load.replies() > 0.98


def test_one_that_copies_gains_beside_others() -> None:
    load = Load(H100, [0.9, 0.0, 0.0, 0.0], tokens=384)
    load.replies()
    before = load.drafter.asked[:]
    assert load.replies() > 1.2
    own, *others = (after - before for before, after in zip(before, load.drafter.asked, strict=True))
    assert own > 60 and max(others) < 60
