"""A drafter in a daemon, on the daemon's side. luce.draft.remote is the server's side."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from luce.draft.drafter import Draftable, Drafter
from luce.draft.messages import DraftLoaded, Idle, LoadDraft, Propose, Proposed, Request, TextUpdate
from luce.draft.on_demand import OnDemandDrafter
from luce.draft.spec import Target, read_drafter
from luce.draft.target_head import LoadedHead, TargetHead
from luce.errors import BackendError, ModelError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import open_gguf
from luce.layers.features import FeatureRing
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.remote.messages import Done
from luce.remote.service import Loader, Service
from luce.runtime.device import Device
from luce.runtime.draws import Draw
from luce.runtime.step import Int32, Span

#: most positions of a text
_MAX_POSITIONS = 1 << 30


def draft_loader(path: Path | None = None, draft: Path | None = None) -> Loader:
    """Loads drafters into a daemon. `path`, `draft`: the files of model and draft, if they differ from the server's."""

    def load(message: LoadDraft, devices: Sequence[Device], opened: contextlib.ExitStack) -> Service:
        return DraftSession(message, devices[0], path, draft, opened)

    return Loader(LoadDraft, Request, load)


class DraftSession(Service):
    """A drafter for one server. Checks everything in a message before it uses it."""

    holds = "a drafter"

    def __init__(
        self, load: LoadDraft, device: Device, path: Path | None, draft: Path | None, opened: contextlib.ExitStack
    ) -> None:
        super().__init__()
        self.handlers = {Propose: self.propose, Idle: self.idle}
        if not 0 < load.slots <= 1 << 16 or not 0 < load.context <= _MAX_POSITIONS or load.window < 0:
            raise BackendError("the limits of the drafter do not fit each other")
        file = opened.enter_context(open_gguf(path or Path(load.path)))
        spec = read_spec(Source(str(file.paths[0]), file.metadata, file.tensors))
        self._target = Target(file, spec, load.slots, load.context)
        named = load.draft if load.draft == "mtp" or draft is None else str(draft)
        self._spec = drafter_spec = read_drafter(opened, self._target, named, load.window)
        for found, expected, name in (
            (fingerprint(file), load.fingerprint, file.paths[0]),
            (drafter_spec.digest(), load.draft_fingerprint, drafter_spec.path),
        ):
            if found != expected:
                raise ModelError(f"{name}: the daemon's file is not the server's: their contents differ")
        self._device = device
        #: the target's features; None while the drafter is released
        self.ring: FeatureRing | None = None
        #: by slot
        self._texts: dict[int, Int32] = {}
        self._keep = load.keep
        self.drafter = OnDemandDrafter(self._make, keep=load.keep, block=drafter_spec.block)
        opened.callback(self.drafter.close)

    def loaded(self) -> DraftLoaded:
        return DraftLoaded(self._spec.kind, self._spec.block, self._spec.layers)

    def idle(self, message: Idle) -> Done:
        """Release the drafter's memory, unless it is to be kept."""
        self._texts.clear()
        self.drafter.idle()
        self.ring = self.ring if self._keep else None
        return Done()

    def propose(self, message: Propose) -> Proposed:
        """Update texts and features, and propose continuations."""
        self._check(message)
        self.drafter.load()
        at = 0
        for update in message.updates:
            self._update_text(update)
            if update.rows:
                self._write_features(update, message.features[at : at + update.rows])
                at += update.rows
        wanted = [
            Draftable(slot, self._texts[slot], most, depth, draw=draw)
            for (slot, most, depth), draw in zip(message.wanted, message.draws, strict=True)
        ]
        proposals = self.drafter.propose(wanted)() if wanted else []
        return Proposed(
            tuple(np.array(proposal.tokens, np.int32) for proposal in proposals),
            tuple(np.array(proposal.probabilities, np.float64) for proposal in proposals),
            tuple(np.array(proposal.parents, np.int32) for proposal in proposals),
        )

    def _make(self) -> Drafter:
        """The drafter with the ring that it reads: both are released at the same time."""
        target, device, layers = self._target, self._device, self._spec.layers
        self.ring = None
        ring = target.ring(device, layers) if layers else None
        head = LoadedHead(target.file, target.spec, device) if self._spec.borrows_head else None
        drafter = self._spec.make(device, ring, None if head is None else TargetHead(device, head, head))
        self.ring = ring
        return drafter

    def _update_text(self, update: TextUpdate) -> None:
        if update.fresh:
            self.drafter.forget(update.slot)
        known = np.empty(0, np.int32) if update.fresh else self._texts[update.slot]
        self._texts[update.slot] = np.concatenate((known[: update.at], update.tokens))

    def _write_features(self, update: TextUpdate, rows: NDArray[np.uint16]) -> None:
        assert self.ring is not None
        self.ring.write(update.slot, update.begin, rows)
        self.drafter.observe([Span(update.slot, 0, update.rows, update.begin)])

    def _check(self, message: Propose) -> None:
        """Raises BackendError unless the fields of a message fit each other and what is known of the texts."""
        ends = {slot: len(text) for slot, text in self._texts.items()}
        slots = [update.slot for update in message.updates]
        width = len(self._spec.layers) * self._target.spec.hidden
        rows = sum(update.rows for update in message.updates)
        valid = message.features.shape == (rows, width) and rows <= _MAX_POSITIONS
        valid &= len(set(slots)) == len(slots) and all(0 <= slot < self._target.slots for slot in slots)
        valid &= all(self._fits(update, ends) for update in message.updates)
        valid &= len(message.draws) == len(message.wanted)
        valid &= all(draw is None or _usable(draw) for draw in message.draws)
        if not (valid and self._are_known(message.wanted, ends)):
            raise BackendError("the texts and features of the message do not fit each other")

    def _fits(self, update: TextUpdate, ends: dict[int, int]) -> bool:
        """Whether an update continues the text of its slot. Keeps `ends`, the lengths of texts by slot, up to date."""
        tokens, vocab = update.tokens, self._target.spec.vocab
        known = 0 if update.fresh else ends.get(update.slot, 0)
        valid = tokens.ndim == 1 and update.at == known and known + len(tokens) > 0
        valid &= bool(((tokens >= 0) & (tokens < vocab)).all())
        end = ends[update.slot] = known + len(tokens)
        return valid and update.rows >= 0 and 0 <= update.begin <= end - update.rows

    def _are_known(self, wanted: Sequence[tuple[int, int, int]], ends: dict[int, int]) -> bool:
        """Whether there are texts for the proposals that are wanted, and their limits are valid."""
        slots = [slot for slot, _, _ in wanted]
        valid = len(set(slots)) == len(slots) and all(ends.get(slot, 0) for slot in slots)
        max_depth = _MAX_POSITIONS if self._spec.trees else 0
        return valid and all(0 < most <= _MAX_POSITIONS and 0 <= depth <= max_depth for _, most, depth in wanted)


def _usable(draw: Draw) -> bool:
    """Whether tokens can be drawn so."""
    numbers = 0 < draw.temperature < math.inf and 0 < draw.top_p <= 1 and 0 <= draw.min_p <= 1
    return numbers and 0 <= draw.seed < 1 << 64 and 0 <= draw.top_k < 1 << 31
