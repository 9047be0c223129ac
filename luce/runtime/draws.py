"""How tokens are drawn: of one text, and of rows of a step. luce.ops.draw draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Draw:
    """How the tokens of a reply are drawn."""

    #: below 2**64
    seed: int
    #: more than 0
    temperature: float
    #: only so many tokens, the likeliest ones; 0 for all
    top_k: int = 0
    #: only the likeliest ones that have this share of the mass
    top_p: float = 1.0
    #: only those with at least this part of the likeliest one's mass
    min_p: float = 0.0


@dataclass(frozen=True)
class RowDraws:
    """The fields of a Draw for each of some rows."""

    #: uint64 [m]
    seed: NDArray[np.uint64]
    #: float64 [m]; 0: the row's token is the likeliest one
    temperature: NDArray[np.float64]
    #: int32 [m]
    top_k: NDArray[np.int32]
    #: float64 [m]
    top_p: NDArray[np.float64]
    #: float64 [m]
    min_p: NDArray[np.float64]

    @classmethod
    def of(cls, draws: Sequence[Draw | None]) -> RowDraws:
        """Of rows that are drawn, and of others (None)."""
        found = [_LIKELIEST if draw is None else draw for draw in draws]
        return cls(
            np.array([draw.seed for draw in found], np.uint64),
            np.array([draw.temperature for draw in found], np.float64),
            np.array([draw.top_k for draw in found], np.int32),
            np.array([draw.top_p for draw in found], np.float64),
            np.array([draw.min_p for draw in found], np.float64),
        )

    @property
    def drawn(self) -> NDArray[np.bool_]:
        """Which rows are drawn, bool [m]."""
        return self.temperature > 0

    def __getitem__(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> RowDraws:
        """Those of some rows."""
        return RowDraws(*(getattr(self, field.name)[rows] for field in fields(self)))


_LIKELIEST = Draw(0, 0.0)
