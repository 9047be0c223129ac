"""What a server and a daemon find in the memory that they share, beside the arena's two words.

Places for what is handed over, places for what is handed on, and one for the output of a step.
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
from luce.ops.sample import unpack_candidates
from luce.runtime.step import MAX_CANDIDATES, Output, Step
from luce.runtime.transfer import DEPTH

#: Places for what is handed on. One more than a link has: when a step is asked for, the copy of what the one before the
#: last handed on may still run.
OUTPUTS = DEPTH + 1
#: bytes for an output in shared memory: the candidates of many rows, or the logits of one
ANSWER = 1 << 20
#: fields of a step that Answer knows: an output has more if a step has others
_ANSWERED = {"tokens", "positions", "spans", "views", "output_rows", "needs_logits", "needs_candidates"}
_UNANSWERED = [field for field in fields(Step) if field.name not in _ANSWERED]


def shared_size(rows: int, takes: Sequence[int], gives: Sequence[int]) -> int:
    """Bytes of shared memory for steps of `rows` rows, whose activations have so many columns."""
    return arena_size([4 * rows * sum(takes)] * DEPTH + [4 * rows * sum(gives)] * OUTPUTS + [ANSWER])


class Answer:
    """How the output of a step lies in `memory`, uint8: ids, whole logits, keys of candidates, each in lines of 64.

    `size`: the bytes from its beginning to its end.

    Raises BackendError if it has something else, or does not fit.
    """

    def __init__(self, step: Step, vocab: int, memory: NDArray[np.uint8]) -> None:
        if any(getattr(step, field.name) is not field.default for field in _UNANSWERED):
            raise BackendError("the output of this step has parts that have no place in shared memory")
        asked = 0 if step.needs_candidates is None else int(np.count_nonzero(step.needs_candidates))
        self.parts: list[NDArray[Any]] = []
        at = 0
        for rows, columns, dtype in (
            (len(step.output_rows), (), np.int32),
            (int(np.count_nonzero(step.needs_logits)), (vocab,), np.float32),
            *([(asked, (min(MAX_CANDIDATES, vocab),), np.uint64)] if asked else ()),
        ):
            size = rows * math.prod(columns) * np.dtype(dtype).itemsize
            if at + size > len(memory):
                raise BackendError(f"the output of {len(step.output_rows)} rows does not fit into {len(memory)} bytes")
            self.parts.append(memory[at : at + size].view(dtype).reshape(rows, *columns))
            at += -(-size // 64) * 64
        self.size = at

    def output(self) -> Output:
        """What lies there, in fresh arrays."""
        ids, logits, *keys = self.parts
        return Output(ids.copy(), logits.copy(), unpack_candidates(keys[0]) if keys else None)
