"""The daemon's side of a drafter that a server has put into another process: luce.draft.remote says what it hears."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from luce.draft.drafter import Draftable, Drafter
from luce.draft.on_demand import OnDemandDrafter
from luce.draft.spec import Target, read_drafter
from luce.draft.target_head import LoadedHead, TargetHead
from luce.errors import BackendError, ModelError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import open_gguf
from luce.ipc.messages import Done, DraftLoaded, LoadDraft, Propose, Proposed, Reply, Request, Rest, Told
from luce.layers.features import FeatureRing
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.remote.daemon import Guest, OpenDraft
from luce.runtime.device import Device
from luce.runtime.step import Int32, Span

#: positions of a text
_MOST = 1 << 30


def opener(path: Path | None = None, draft: Path | None = None) -> OpenDraft:
    """Opens drafters in this process. `path`, `draft`: the model and its draft, if they are not where the server has
    them."""

    def open(message: LoadDraft, devices: Sequence[Device], opened: contextlib.ExitStack) -> Guest:
        return DraftSession(message, devices[0], path, draft, opened)

    return open


class DraftSession:
    """A drafter for one server. Nothing of a message is believed unchecked."""

    def __init__(
        self, load: LoadDraft, device: Device, path: Path | None, draft: Path | None, opened: contextlib.ExitStack
    ) -> None:
        if not 0 < load.slots <= 1 << 16 or not 0 < load.context <= _MOST or load.window < 0:
            raise BackendError("a drafter whose parts do not fit each other")
        file = opened.enter_context(open_gguf(path or Path(load.path)))
        spec = read_spec(Source(str(file.paths[0]), file.metadata, file.tensors))
        self._target = Target(file, spec, load.slots, load.context)
        named = load.draft if load.draft == "mtp" or draft is None else str(draft)
        self._spec = drafter_spec = read_drafter(opened, self._target, named, load.window)
        for found, told, name in (
            (fingerprint(file), load.fingerprint, file.paths[0]),
            (drafter_spec.digest(), load.draft_fingerprint, drafter_spec.path),
        ):
            if found != told:
                raise ModelError(f"{name}: the daemon's file is not the server's: their contents differ")
        self._device = device
        self._ring: FeatureRing | None = None
        self._texts: dict[int, Int32] = {}
        self._keep = load.keep
        self._drafter = OnDemandDrafter(self._make, keep=load.keep, block=drafter_spec.block)
        opened.callback(self._drafter.close)

    def loaded(self) -> DraftLoaded:
        return DraftLoaded(self._spec.kind, self._spec.block, self._spec.layers)

    def handle(self, message: Request) -> Reply:
        if isinstance(message, Rest):
            self._texts.clear()
            self._drafter.idle()
            self._ring = self._ring if self._keep else None
            return Done()
        if not isinstance(message, Propose):
            raise BackendError(f"{type(message).__name__} is for a daemon that holds layers")
        return self._propose(message)

    def _make(self) -> Drafter:
        """With all that it reads: what is released goes together."""
        target, device, layers = self._target, self._device, self._spec.layers
        self._ring = None
        ring = target.ring(device, layers) if layers else None
        end = LoadedHead(target.file, target.spec, device) if self._spec.borrows_head else None
        drafter = self._spec.make(device, ring, None if end is None else TargetHead(device, end, end))
        self._ring = ring
        return drafter

    def _propose(self, message: Propose) -> Proposed:
        self._check(message)
        self._drafter.load()
        at = 0
        for told in message.told:
            self._tell(told)
            if told.rows:
                self._put(told, message.features[at : at + told.rows])
                at += told.rows
        asked = [Draftable(slot, self._texts[slot], most, depth) for slot, most, depth in message.asked]
        proposals = self._drafter.propose(asked)() if asked else []
        return Proposed(
            tuple(np.array(proposal.tokens, np.int32) for proposal in proposals),
            tuple(np.array(proposal.probabilities, np.float64) for proposal in proposals),
            tuple(np.array(proposal.parents, np.int32) for proposal in proposals),
        )

    def _tell(self, told: Told) -> None:
        if told.fresh:
            self._drafter.forget(told.slot)
        known = np.empty(0, np.int32) if told.fresh else self._texts[told.slot]
        self._texts[told.slot] = np.concatenate((known[: told.at], told.tokens))

    def _put(self, told: Told, rows: NDArray[np.uint16]) -> None:
        assert self._ring is not None
        self._ring.write(told.slot, told.begin, rows)
        self._drafter.observe([Span(told.slot, 0, told.rows, told.begin)])

    def _check(self, message: Propose) -> None:
        """Raises BackendError unless all that a message refers to exists."""
        target, slots = self._target, [told.slot for told in message.told]
        width = len(self._spec.layers) * target.spec.hidden
        rows = sum(told.rows for told in message.told)
        fits = message.features.shape == (rows, width) and rows <= _MOST
        fits &= len(set(slots)) == len(slots) and all(0 <= slot < target.slots for slot in slots)
        ends = {slot: len(text) for slot, text in self._texts.items()}
        for told in message.told:
            known = 0 if told.fresh else ends.get(told.slot, 0)
            fits &= told.tokens.ndim == 1 and told.at == known and known + len(told.tokens) > 0
            fits &= bool(((told.tokens >= 0) & (told.tokens < target.spec.vocab)).all())
            ends[told.slot] = known + len(told.tokens)
            fits &= told.rows >= 0 and 0 <= told.begin <= ends[told.slot] - told.rows
        asked = [slot for slot, _, _ in message.asked]
        fits &= len(set(asked)) == len(asked) and all(ends.get(slot, 0) for slot in asked)
        fits &= all(0 < most <= _MOST for _, most, _ in message.asked)
        fits &= all(0 <= depth <= (_MOST if self._spec.trees else 0) for _, _, depth in message.asked)
        if not fits:
            raise BackendError("a message about texts whose parts do not fit each other")
