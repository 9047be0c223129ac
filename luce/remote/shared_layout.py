"""The layout of the memory that a server and a daemon share, behind the arena's two flags.

Buffers for input activations, buffers for output activations, and one for the Output of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luce.errors import BackendError
from luce.ipc.arena import arena_size
from luce.ops.draw import with_drawn
from luce.ops.sample import unpack_candidates
from luce.runtime.step import MAX_CANDIDATES, Output, Step
from luce.runtime.transfer import DEPTH

#: Buffers for output activations, one more than a link has: when a step is requested, the copy of the output of the
#: step before the last one may still run.
OUTPUT_BUFFERS = DEPTH + 1
#: bytes for an Output: the candidates of many rows, or the logits of one row
OUTPUT_BYTES = 1 << 20
#: fields of a step that OutputLayout knows; a step that sets others may have an Output with more arrays
_KNOWN_FIELDS = {
    "tokens",
    "positions",
    "position_ids",
    "spans",
    "views",
    "output_rows",
    "needs_logits",
    "needs_candidates",
    "draws",
    "masks",
}
_OTHER_FIELDS = [field for field in fields(Step) if field.name not in _KNOWN_FIELDS]


def shared_size(rows: int, input_widths: Sequence[int], output_widths: Sequence[int]) -> int:
    """Bytes of shared memory for steps of `rows` rows, whose activations have so many columns."""
    inputs = [4 * rows * sum(input_widths)] * DEPTH
    outputs = [4 * rows * sum(output_widths)] * OUTPUT_BUFFERS
    return arena_size([*inputs, *outputs, OUTPUT_BYTES])


class OutputLayout:
    """The Output of a step in `memory`, uint8: ids, full logits, keys of candidates, drawn tokens, each aligned to 64
    bytes.

    Raises BackendError if the Output has other arrays, or does not fit.
    """

    def __init__(self, step: Step, vocab: int, memory: NDArray[np.uint8]) -> None:
        if any(getattr(step, field.name) is not field.default for field in _OTHER_FIELDS):
            raise BackendError("the output of this step has arrays that are not in the layout of shared memory")
        candidate_rows = 0 if step.needs_candidates is None else int(np.count_nonzero(step.needs_candidates))
        drawn_rows = 0 if step.draws is None else int(np.count_nonzero(step.draws.drawn))
        self._with_candidates, self._draws = candidate_rows > 0, step.draws
        #: the arrays in the memory
        self.arrays: list[NDArray[Any]] = []
        at = 0
        for rows, columns, dtype in (
            (len(step.output_rows), (), np.int32),
            (int(np.count_nonzero(step.needs_logits)), (vocab,), np.float32),
            *([(candidate_rows, (min(MAX_CANDIDATES, vocab),), np.uint64)] if candidate_rows else ()),
            *([] if step.draws is None else [(drawn_rows, (), np.int32)]),
        ):
            size = rows * math.prod(columns) * np.dtype(dtype).itemsize
            if at + size > len(memory):
                raise BackendError(f"the output of {len(step.output_rows)} rows does not fit into {len(memory)} bytes")
            self.arrays.append(memory[at : at + size].view(dtype).reshape(rows, *columns))
            at += -(-size // 64) * 64
        #: bytes from the beginning of the first array to the end of the last one
        self.size = at

    def output(self) -> Output:
        """A copy of the Output."""
        ids, logits, *others = self.arrays
        found = unpack_candidates(others.pop(0)) if self._with_candidates else None
        ids = ids.copy() if self._draws is None else with_drawn(ids, self._draws, others[0])
        return Output(ids, logits.copy(), found)
