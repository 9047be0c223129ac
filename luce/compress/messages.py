"""The messages about a scorer of texts in a daemon. The daemon responds to requests in order.

    LoadScorer  -> ScorerLoaded  load a small model that scores texts
    Score       -> Scored        score a text; loads the weights again if they were released
    CancelScore                  no response: end the Score that runs before its next layer, with the response Failed
    Release     -> Done          release the weights

Every request may have the response Failed instead. luce.ipc.lifecycle has the messages that come before these, and the
heartbeat.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from luce.ipc.lifecycle import Failed, Hello
from luce.remote.messages import Done
from luce.shard.layerwise import Reading


class LoadScorer(msgspec.Struct, tag=True):
    """Load the small model at `path` on the daemon's first device."""

    path: str
    #: fingerprint of the file as the server sees it
    fingerprint: str
    reading: Reading
    #: most tokens of a segment
    longest: int


class ScorerLoaded(msgspec.Struct, tag=True):
    """The response to LoadScorer."""

    #: most tokens of a segment, which may be fewer than asked for: the model's context
    segment: int


class Score(msgspec.Struct, tag=True):
    """Score the tokens of a text, as luce.compress.scorer.Scorer."""

    checksummed: ClassVar[bool] = False

    #: of the small model's vocabulary, int32 [n], n > 0
    tokens: NDArray[np.int32]
    segment: int
    rotated: bool


class Scored(msgspec.Struct, tag=True):
    """The response to Score."""

    checksummed: ClassVar[bool] = False

    #: float64 [n]
    scores: NDArray[np.float64]


class CancelScore(msgspec.Struct, tag=True):
    """Nobody waits for the scores any more."""


class Release(msgspec.Struct, tag=True):
    """The weights are not needed until the next Score."""


Request = LoadScorer | Score | CancelScore | Release
Response = Hello | ScorerLoaded | Scored | Done | Failed
