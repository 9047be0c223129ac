"""What the engine needs of a backend. `LayerSplitBackend` is the only one that serves; tests script another."""

from __future__ import annotations

from typing import Protocol

from luce.runtime.step import Output, Step


class Backend(Protocol):
    """Runs steps. One thread calls it."""

    @property
    def vocab(self) -> int:
        """Logits per row."""

    @property
    def context(self) -> int:
        """Most positions of one sequence."""

    @property
    def slots(self) -> int:
        """Most sequences at once: recurrent states exist for slots 0..slots-1."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each page group, None for full attention, in the order of Step.views."""

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages that exist in each page group: numbers 0..pages-1."""

    def lost(self) -> bool:
        """Whether all that sequences keep in the backend has been lost since the last call."""

    def forward(self, step: Step) -> Output:
        """Run one step. Raises BackendError or DeviceError: the step's sequences are lost, later steps work.

        ShardLostError: so is every other sequence that has run a step, and steps fail until `lost` has told.
        """

    def close(self) -> None:
        """Release weights and states. Idempotent."""
