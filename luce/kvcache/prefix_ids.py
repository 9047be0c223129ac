"""What the prefix cache knows a text by: its tokens, and where their positions are not counted from the text's begin.

Keys are rotated to their positions when they are written. So texts of the same tokens at other positions, as
compression leaves them with --prefill-positions original, share only the tokens before the first gap.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from luce.runtime.step import Int32

#: tokens int32 [n]; or int64 [n]: token + 2^32 times the gap, by which the token's position exceeds its number
PrefixIds = NDArray[np.signedinteger[Any]]

_GAP = np.int64(32)


def prefix_ids(tokens: Int32, position_ids: Int32) -> PrefixIds:
    """Of tokens int32 [n] at ascending positions int32 [n], none of which is less than its number."""
    gaps = position_ids - np.arange(len(tokens), dtype=np.int64)
    return tokens + (gaps << _GAP) if gaps.any() else tokens


def tokens_of(ids: PrefixIds) -> Int32:
    """The tokens: int32 [n]."""
    return (ids & 0x7FFFFFFF).astype(np.int32)


def stored(ids: PrefixIds) -> PrefixIds:
    """As they are stored: little-endian, int32 if no token is behind a gap."""
    return ids.astype("<i8" if _gaps(ids).any() else "<i4")


def key_bytes(ids: PrefixIds) -> bytes:
    """What keys are digests of: each token as int32, little-endian, and before a token behind a gap the negative gap.

    Equal for equal ids only, and what several parts of ids give in turn is what they give together.
    """
    gaps = _gaps(ids)
    if not gaps.any():
        return ids.astype("<i4").tobytes()
    pairs = np.stack([-gaps, tokens_of(ids)], axis=1).astype("<i4")
    written = np.ones(pairs.shape, np.bool_)
    written[:, 0] = gaps > 0
    return pairs[written].tobytes()


def _gaps(ids: PrefixIds) -> NDArray[np.int64]:
    return ids.astype(np.int64, copy=False) >> _GAP
