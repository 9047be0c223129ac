"""Drafting as a prediction takes it."""

from __future__ import annotations

from dataclasses import dataclass

from luce.gguf.reader import TensorInfo
from luce.planner.draft_time import DraftWork
from luce.runtime.device import Device


@dataclass(frozen=True)
class DraftingDevice:
    """A drafter on its device, before it is loaded."""

    device: Device
    #: bytes that it takes there
    bytes: int
    #: for a proposal
    work: DraftWork
    #: its weights
    tensors: tuple[TensorInfo, ...]


@dataclass(frozen=True)
class DraftLoad:
    """How tokens of a sequence are drafted."""

    #: that a step verifies
    rows: int
    #: that a step gives, as servers have measured; None: none has
    tokens: float | None = None
    #: None for a drafter that computes nothing on a device
    on: DraftingDevice | None = None
