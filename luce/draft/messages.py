"""The messages about a drafter in a daemon. The daemon responds to each request, in order.

    LoadDraft -> DraftLoaded  load a drafter for a model
    Propose   -> Proposed     how texts continue; which proposals are wanted
    Idle      -> Done         no sequence runs: the drafter may release memory

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
from luce.runtime.draws import Draw


class LoadDraft(msgspec.Struct, tag=True):
    """Load a drafter for the model at `path` on the daemon's first device."""

    path: str
    #: fingerprint of the model's file as the server sees it
    fingerprint: str
    #: as --draft: a path or mtp
    draft: str
    #: fingerprint of the draft's file as the server sees it; empty for mtp, which is in the model's file
    draft_fingerprint: str
    #: most texts at a time
    slots: int
    #: most positions that the drafter sees
    context: int
    #: as --draft-swa
    window: int
    #: whether it stays loaded while no sequence runs
    keep: bool


class DraftLoaded(msgspec.Struct, tag=True):
    """The response to LoadDraft."""

    kind: str
    #: most tokens of a proposal
    block: int
    #: the target's layers whose outputs it reads
    layers: tuple[int, ...]


class TextUpdate(msgspec.Struct):
    """How the text of a slot continues, and which of its positions have new features."""

    slot: int
    #: whether another text than before begins in the slot
    fresh: bool
    #: the position of the first of `tokens`
    at: int
    tokens: NDArray[np.int32]
    #: the position of the first row of features
    begin: int
    #: rows of Propose.features that belong to this text
    rows: int


class Propose(msgspec.Struct, tag=True):
    """Update texts, and propose continuations of some of them."""

    checksummed: ClassVar[bool] = False

    updates: tuple[TextUpdate, ...]
    #: bfloat16 as uint16 [rows, layers * H]: the rows of all updates, one after another
    features: NDArray[np.uint16]
    #: (slot, most tokens, depth of a tree or 0), each slot once. The target has computed all tokens of these texts but
    #: the last.
    wanted: tuple[tuple[int, int, int], ...]
    #: how the tokens of these texts are drawn, None if they are not
    draws: tuple[Draw | None, ...]


class Proposed(msgspec.Struct, tag=True):
    """The response to Propose: for each text that was wanted the fields of luce.draft.drafter.Proposal."""

    tokens: tuple[NDArray[np.int32], ...]
    #: one for each token, or none at all
    probabilities: tuple[NDArray[np.float64], ...]
    #: of a tree each token's parent, otherwise none
    parents: tuple[NDArray[np.int32], ...]


class Idle(msgspec.Struct, tag=True):
    """No sequence runs or waits."""


Request = LoadDraft | Propose | Idle
Response = Hello | DraftLoaded | Proposed | Done | Failed
