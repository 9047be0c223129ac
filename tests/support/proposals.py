"""The proposals of a loaded model, and its drafter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from luce.api import Model
from luce.draft.drafter import Draftable, Drafter, PendingProposals, Proposal
from luce.draft.on_demand import OnDemandDrafter


def drafter_of(model: Model) -> Drafter:
    """The drafter."""
    speculator = model.engine.parts.speculator
    assert speculator is not None
    return speculator.drafter


def loaded_drafter(model: Model) -> Any:
    """The drafter in this process that is loaded, None if it is not."""
    drafter = drafter_of(model)
    assert isinstance(drafter, OnDemandDrafter)
    return drafter.loaded


@contextmanager
def recorded(model: Model) -> Iterator[list[tuple[int, list[int]]]]:
    """The proposals made meanwhile: length of the text, tokens."""
    drafter, found = drafter_of(model), []

    def propose(asked: Sequence[Draftable]) -> PendingProposals:
        begun = type(drafter).propose(drafter, asked)

        def wait() -> Sequence[Proposal]:
            given = begun()
            found.extend((len(one.tokens), list(p.tokens)) for one, p in zip(asked, given, strict=True))
            return given

        return wait

    drafter.propose = propose  # type: ignore[method-assign]
    yield found
    assert model.engine.wait_idle(30)
    del drafter.propose
