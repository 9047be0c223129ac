"""What the shape of a step says of its rows' positions."""

from __future__ import annotations

import numpy as np
import pytest

from luce.runtime.step import PAGE, Span, Step, StepShape


@pytest.mark.parametrize(
    ("positions", "pages"),
    [
        ([0], 8),
        ([8 * PAGE - 1], 8),
        ([8 * PAGE], 16),
        ([3, 16 * PAGE, 7], 32),
        ([32 * PAGE - 1], 32),
        ([32 * PAGE, 0], 0),
    ],
)
def test_pages_of_a_shape(positions: list[int], pages: int) -> None:
    """Positions are below them; where all of a row's splits may be needed there is no limit."""
    spans = [Span(slot, slot, 1, position) for slot, position in enumerate(positions)]
    step = Step.of_spans(spans, np.zeros(len(spans), np.int32), ())
    assert StepShape.of(step).pages == pages
