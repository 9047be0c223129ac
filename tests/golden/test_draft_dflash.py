"""The DFlash drafter on reference drafts: blocks of whole runs, holes, rewinds, several sequences, released memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.backend.layersplit import LayerSplitBackend
from luce.backend.serving_options import ServingOptions
from luce.draft.dflash.drafter import DFlashDrafter
from luce.draft.dflash.model import DFlashModel
from luce.draft.drafter import Draftable
from luce.draft.target_head import TargetHead
from luce.gguf.reader import open_gguf
from luce.layers.features import FeatureRing
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from luce.runtime.step import Span
from tests.support.drafts import F32, DraftReference, bfloat16, open_draft, spec_of
from tests.support.emulated import EmulatedDevice

FIT = DraftReference("qwen35-a-draft-fit-F32")


class Drafted:
    """A drafter with its target's head, and texts whose captured rows are known."""

    def __init__(
        self,
        stack: ExitStack,
        reference: DraftReference,
        device: Device,
        *,
        capacity: int = 512,
        slots: int = 2,
    ) -> None:
        file = stack.enter_context(open_draft(reference.path))
        target = stack.enter_context(open_gguf(reference.target.path))
        backend = LayerSplitBackend(
            target, reference.target.spec, [HostDevice(0), HostDevice(1)], ServingOptions(slots=1, context=64)
        )
        stack.callback(backend.close)
        self.spec = spec_of(file, reference.path)
        self.ring = FeatureRing(
            device, self.spec.captured(reference.target.spec), self.spec.hidden, slots=slots, capacity=capacity
        )
        head = TargetHead(device, backend.shards[0].ends, backend.shards[-1].ends)
        assert self.spec.mask_token is not None
        mask = device.download(head.embed(np.array([self.spec.mask_token], np.int32)))[0]
        self.model = DFlashModel(file, self.spec, device, slots=slots, context=256, rows=self.ring.rows, mask=mask)
        self.drafter = DFlashDrafter(self.model, self.ring, head)
        stack.callback(self.drafter.close)

    def observe(self, slot: int, captured: F32, at: int, to: int, **verified: Any) -> None:
        """Rows of a text are in the target's cache, and their features in the ring. `verified`: as a Span says it."""
        rows = slot * self.ring.capacity + np.arange(at, to) % self.ring.capacity
        values = self.ring.device.download(self.ring.rows).copy()
        values[rows[-self.ring.capacity :]] = bfloat16(captured[at:to])[-self.ring.capacity :]
        self.ring.device.write(self.ring.rows, values)
        self.drafter.observe([Span(slot, 0, to - at, at, **verified)])

    def propose(self, slot: int, tokens: NDArray[np.int32], most: int = 99) -> list[int]:
        """The tokens behind the last of `tokens`."""
        (proposal,) = self.drafter.propose([Draftable(slot, tokens, most)])()
        assert len(proposal.probabilities) == len(proposal.tokens)
        assert all(0 < chance <= 1 for chance in proposal.probabilities)
        return list(proposal.tokens)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def text(reference: DraftReference, prompt: str = "17") -> tuple[NDArray[np.int32], F32]:
    """Prompt and reply of the reference's run, and the captured rows of all but the last."""
    expected = reference.expected
    tokens = np.concatenate([expected[f"prompt_{prompt}"], expected[f"spec_{prompt}_tokens"]])
    return tokens, reference.captured(tokens[:-1])


DRAFTS = ("qwen35-a-draft-fit-F32", "qwen35-a-draft-var-F32", "qwen35-b-draft-BF16")


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "host") for name in DRAFTS),
        (DRAFTS[0], "emulated"),
        *(pytest.param(name, "gpu", marks=pytest.mark.gpu) for name in DRAFTS),
    ],
)
def test_blocks_of_a_run(name: str, device: str, stack: ExitStack, request: pytest.FixtureRequest) -> None:
    reference = DraftReference(name)
    own: Device = HostDevice(0) if device == "host" else EmulatedDevice()
    if device == "gpu":
        own = request.getfixturevalue("gpu")
    drafted, (tokens, captured) = Drafted(stack, reference, own), text(reference)
    expected = {
        part: reference.expected[f"spec_17_{part}"] for part in ("committed", "block", "accept", "draft_margin")
    }
    observed = compared = 0
    # The emulated device is slow.
    steps = 5 if device == "emulated" else len(expected["committed"])
    for step, committed in enumerate(expected["committed"][:steps].tolist()):
        # The target computed all rows of the last verification, whether they count or not. GPUs read them at once.
        end = min(committed + 3, len(captured))
        drafted.observe(0, captured, observed, end, speculative=observed > 0)
        assert drafted.model.context.cached(0).stop == (observed if own.host or not observed else end)
        observed = committed
        block = drafted.propose(0, tokens[: committed + 1])
        if expected["draft_margin"][step] > 0.05:
            compared += 1
            assert block == expected["block"][step, 1:].tolist()
    assert compared > 3


@pytest.mark.emulated
def test_what_is_not_read_before_it_counts(stack: ExitStack) -> None:
    drafted, (tokens, captured) = Drafted(stack, FIT, EmulatedDevice(), capacity=64), text(FIT)
    drafted.observe(0, captured, 0, 17)
    drafted.propose(0, tokens[:18])
    context = drafted.model.context
    # A tree, whose rows lie elsewhere; and rows behind a gap.
    drafted.observe(0, captured, 17, 22, speculative=True, ancestors=(0,))
    assert context.cached(0) == range(17)
    drafted.observe(0, captured, 19, 22, speculative=True)
    assert context.cached(0) == range(17)
    # Those that fit are read, and go when other rows take their places.
    drafted.observe(0, captured, 17, 25, speculative=True)
    assert context.cached(0) == range(25)
    drafted.observe(0, captured, 20, 24, speculative=True)
    assert context.cached(0) == range(24)


def test_most(stack: ExitStack) -> None:
    drafted, (tokens, captured) = Drafted(stack, FIT, HostDevice(0)), text(FIT)
    drafted.observe(0, captured, 0, 17)
    whole = drafted.propose(0, tokens[:18])
    assert len(whole) == drafted.drafter.block == 7
    assert drafted.propose(0, tokens[:18], most=3) == whole[:3]


def test_without_features_there_is_no_proposal(stack: ExitStack) -> None:
    drafted, (tokens, captured) = Drafted(stack, FIT, HostDevice(0)), text(FIT)
    assert drafted.propose(0, tokens[:18]) == []
    drafted.observe(0, captured, 0, 16)
    assert drafted.propose(0, tokens[:18]) == []
    drafted.observe(0, captured, 16, 17)
    assert len(drafted.propose(0, tokens[:18])) == 7
    drafted.drafter.forget(0)
    assert drafted.propose(0, tokens[:18]) == []


def test_a_hole_leaves_what_lies_behind_it(stack: ExitStack) -> None:
    # Restored without a tail, or drafting was off: what follows is the context, as if the text began there.
    drafted, (tokens, captured) = Drafted(stack, FIT, HostDevice(0)), text(FIT)
    drafted.observe(0, captured, 0, 10)
    drafted.propose(0, tokens[:11])
    drafted.observe(0, captured, 20, 40)
    drafted.observe(1, captured, 20, 40)
    assert drafted.propose(0, tokens[:41]) == drafted.propose(1, tokens[:41])


def test_rewound_and_told_anew(stack: ExitStack) -> None:
    drafted, (tokens, captured) = Drafted(stack, FIT, HostDevice(0)), text(FIT)
    drafted.observe(0, captured, 0, 40)
    drafted.propose(0, tokens[:41])
    # Another text from position 12 on.
    drafted.observe(0, captured[::-1], 12, 30)
    both = np.concatenate([captured[:12], captured[::-1][12:30]])
    drafted.observe(1, both, 0, 30)
    assert drafted.propose(0, tokens[:31]) == drafted.propose(1, tokens[:31])


def test_several_sequences_at_once(stack: ExitStack) -> None:
    drafted, (tokens, captured) = Drafted(stack, FIT, HostDevice(0)), text(FIT)
    long = text(FIT, "long")
    drafted.observe(0, captured, 0, 25)
    drafted.observe(1, long[1], 0, 160)
    asked = [Draftable(0, tokens[:26], 9), Draftable(1, long[0][:161], 2)]
    both = [list(proposal.tokens) for proposal in drafted.drafter.propose(asked)()]
    alone = Drafted(stack, FIT, HostDevice(0))
    alone.observe(0, captured, 0, 25)
    alone.observe(1, long[1], 0, 160)
    assert both == [alone.propose(0, tokens[:26]), alone.propose(1, long[0][:161], 2)]


def test_a_ring_shorter_than_the_text(stack: ExitStack) -> None:
    # Both have the last 64 rows; one observed them at once, the other step by step.
    tokens, captured = text(FIT, "long")
    drafted = Drafted(stack, FIT, HostDevice(0), capacity=64)
    drafted.observe(0, captured, 0, 160)
    for at in range(96, 160, 16):
        drafted.observe(1, captured, at, at + 16)
    assert drafted.propose(0, tokens[:161]) == drafted.propose(1, tokens[:161])
