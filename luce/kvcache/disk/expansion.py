"""How much a snapshot of a model can hold: a small file may expand to more than the machine has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from luce.backend.backend import Capacity
from luce.kvcache.disk.manifest import FEATURES, LOGITS, PROMPT_END, RESIDENCY, Manifest
from luce.kvcache.disk.part import DamagedError, Frame
from luce.runtime.step import PAGE

#: the devices that wrote a snapshot may have a type of twice the bytes
_WIDER = 2


@dataclass(frozen=True)
class SnapshotLimits:
    """Sizes of a loaded model, in bytes before compression."""

    #: a page in all layers
    page: int
    #: the rest of a checkpoint: recurrent states, windows and the page that is not full
    state: int
    #: float32 logits of a row
    logits: int
    #: features of the last tokens, as many as the drafter can use; 0: nothing reads them
    features: int

    @classmethod
    def of(cls, capacity: Capacity, features: int = 0) -> SnapshotLimits:
        """The sizes of a model. `features`: bytes that its drafter can use."""
        return cls(capacity.page_bytes, capacity.checkpoint_bytes, 4 * capacity.vocab, features)

    def check(self, manifest: Manifest, frames: Iterable[Frame]) -> None:
        """Raises DamagedError if the frames of a snapshot's pages and state expand to more than this model can have
        written for as many tokens. Features do not count: who reads them looks at their size."""
        found: Counter[str] = Counter()
        for frame in frames:
            found[_kind(frame)] += frame.nbytes
        pages = manifest.length // PAGE
        most = {
            "pages": _WIDER * self.page * (pages - manifest.first_page),
            "state": _WIDER * self.state,
            LOGITS: self.logits,
            PROMPT_END: self.logits,
            RESIDENCY: 3 * 4 * (pages + 2),
        }
        for kind, limit in most.items():
            if found[kind] > limit:
                raise DamagedError(
                    f"{manifest.id}: its {kind} expand to {found[kind]} bytes; of {manifest.length} tokens this model "
                    f"has at most {limit}"
                )


def check_tokens(manifest: Manifest, frames: Iterable[Frame]) -> None:
    """Raises DamagedError unless a snapshot stores exactly its own tokens: int32 or int64 in one frame."""
    expected = manifest.length - manifest.first_page * PAGE
    found = [(frame.dtype, frame.shape) for frame in frames]
    if found not in ([("<i4", (expected,))], [("<i8", (expected,))]):
        raise DamagedError(f"{manifest.id}: tokens of {found[:3]} instead of {expected} int32 or int64")


def _kind(frame: Frame) -> str:
    if frame.page >= 0:
        return "pages"
    first = frame.name.partition(".")[0]
    return first if first in (LOGITS, PROMPT_END, RESIDENCY, FEATURES) else "state"
