"""What a constraint lets come next, for tests."""

from __future__ import annotations

import numpy as np

from luce.engine.sequence import Constraint


def allowed_ids(constraint: Constraint) -> set[int]:
    """The tokens that may come next."""
    words = constraint.mask(frozenset())
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())
