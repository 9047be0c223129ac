"""The target's own block for multi-token prediction: the reference's logits, and what the drafter makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.backend.layersplit import LayerSplitBackend
from luce.backend.serving_options import ServingOptions
from luce.draft.drafter import Draftable
from luce.draft.mtp import MTPDrafter, MTPModel, captured
from luce.draft.target_head import TargetHead
from luce.errors import UnsupportedError
from luce.gguf.reader import GGUFFile, open_gguf
from luce.layers.features import FeatureRing
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from luce.runtime.step import Span
from tests.support.drafts import F32, bfloat16, matrix
from tests.support.emulated import EmulatedDevice
from tests.support.reference import Reference

REFERENCE = Reference("qwen35-b-Q4_K_M")
PROMPT: NDArray[np.int32] = REFERENCE.expected["prompt_17"]
LOGITS: F32 = REFERENCE.expected["mtp_logits_17"]


class Drafted:
    """The block on a device, with the reference's states in its ring."""

    def __init__(self, stack: ExitStack, device: Device, slots: int = 2) -> None:
        self.file: GGUFFile = stack.enter_context(open_gguf(REFERENCE.path))
        spec = REFERENCE.spec
        backend = LayerSplitBackend(
            self.file, spec, [HostDevice(0), HostDevice(1)], ServingOptions(slots=1, context=64)
        )
        stack.callback(backend.close)
        assert captured(spec) == (5,)
        self.device = device
        self.ring = FeatureRing(device, captured(spec), spec.hidden, slots=slots, capacity=64)
        rows = np.zeros(self.ring.rows.shape, np.uint16)
        for slot in range(slots):
            rows[slot * 64 : slot * 64 + 17] = bfloat16(REFERENCE.expected["hidden_17"][-1])
        device.write(self.ring.rows, rows)
        self.head = TargetHead(device, backend.shards[0].ends, backend.shards[-1].ends)
        self.model = MTPModel(self.file, spec, device, slots=slots, context=64, rows=self.ring.rows)
        self.drafter = MTPDrafter(self.model, self.ring, self.head)
        stack.callback(self.drafter.close)
        if device.host:
            # As a GPU does it before the first step: nothing attends, so layers compute with whatever lay in memory.
            with np.errstate(all="ignore"):
                self.model.warm_up(spec.hidden)

    def row(self, t: int, states: F32) -> F32:
        """Logits of row t of slot 0, after the rows before it."""
        rows = range(self.model.context.cached(0).stop, t)
        if len(rows):
            tokens = self.head.embed(PROMPT[rows.start + 1 : rows.stop + 1])
            self.model.append_context([0], [len(rows)], tokens, self.device.upload(states[rows.start : rows.stop]))
        last = self.model.predict([0], self.head.embed(PROMPT[t + 1 : t + 2]), self.device.upload(states[t : t + 1]))
        output = self.head.last.project(self.device.download(last), logits=True)()
        return output.logits[0]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    found: Device = request.getfixturevalue("gpu") if request.param == "gpu" else HostDevice(0)
    return found


@pytest.mark.parametrize("rounded", [False, True])
def test_logits(rounded: bool, device: Device, stack: ExitStack) -> None:
    drafted = Drafted(stack, device)
    hidden = REFERENCE.expected["hidden_17"][-1]
    if rounded:
        states = device.download(drafted.model.states(np.arange(17, dtype=np.int32)))
    else:
        norm = matrix(drafted.file, "output_norm.weight")[0]
        states = hidden / np.sqrt((hidden**2).mean(axis=1, keepdims=True) + REFERENCE.spec.norm_eps) * norm
    logits = np.stack([drafted.row(t, states) for t in range(len(LOGITS))])
    error = ((logits - LOGITS) ** 2).mean(axis=1) / LOGITS.var()
    assert np.median(error) <= (1e-3 if not device.host else 1e-4 if rounded else 1e-9)
    if device.host:
        assert (logits.argmax(axis=1) == LOGITS.argmax(axis=1)).all()


@pytest.mark.parametrize("at", [2, 9, 17])
def test_first_token_is_the_reference_s(at: int, device: Device, stack: ExitStack) -> None:
    check_first_token(at, device, stack)


@pytest.mark.emulated
def test_first_token_by_the_kernels_of_gpus(stack: ExitStack) -> None:
    check_first_token(9, EmulatedDevice(), stack)


def check_first_token(at: int, device: Device, stack: ExitStack) -> None:
    drafted = Drafted(stack, device)
    drafted.drafter.observe([Span(0, 0, at - 1, 0)])
    (proposal,) = drafted.drafter.propose([Draftable(0, PROMPT[:at], 9)])()
    assert 1 <= len(proposal.tokens) == len(proposal.probabilities) <= drafted.drafter.block
    weights = np.exp(LOGITS[at - 2] - LOGITS[at - 2].max())
    margin = np.diff(np.sort(LOGITS[at - 2])[-2:])[0]
    if device.host or margin > 0.1:
        assert proposal.tokens[0] == LOGITS[at - 2].argmax()
    # Among 64 of 768 nearly flat candidates.
    assert proposal.probabilities[0] >= 0.8 * weights.max() / weights.sum()


def test_rows_of_drafts_are_forgotten(device: Device, stack: ExitStack) -> None:
    # Tokens drafted beyond the text leave no trace in later proposals.
    drafted = Drafted(stack, device)
    observed = 0
    for at in (6, 7, 12):
        drafted.drafter.observe([Span(0, 0, at - 1 - observed, observed)])
        stepwise = drafted.drafter.propose([Draftable(0, PROMPT[:at], 9)])()
        observed = at - 1
    drafted.drafter.observe([Span(1, 0, 11, 0)])
    assert drafted.drafter.propose([Draftable(1, PROMPT[:12], 9)])()[0].tokens == stepwise[0].tokens


def test_several_sequences(device: Device, stack: ExitStack) -> None:
    drafted = Drafted(stack, device)
    drafted.drafter.observe([Span(0, 0, 16, 0), Span(1, 16, 8, 0)])
    asked = [Draftable(1, PROMPT[:9], 2), Draftable(0, PROMPT[:17], 4)]
    both = drafted.drafter.propose(asked)()
    assert len(both[0].tokens) <= 2
    alone = Drafted(stack, device)
    alone.drafter.observe([Span(0, 0, 16, 0), Span(1, 16, 8, 0)])
    assert [alone.drafter.propose([one])()[0].tokens[:1] for one in asked] == [one.tokens[:1] for one in both]


def test_without_states_there_is_no_proposal(stack: ExitStack) -> None:
    drafted = Drafted(stack, HostDevice(0))
    assert drafted.drafter.propose([Draftable(0, PROMPT[:9], 9)])()[0].tokens == ()
    drafted.drafter.observe([Span(0, 0, 8, 0)])
    assert drafted.drafter.propose([Draftable(0, PROMPT[:9], 9)])()[0].tokens
    drafted.drafter.forget(0)
    assert drafted.drafter.propose([Draftable(0, PROMPT[:9], 9)])()[0].tokens == ()


def test_files_without_the_block() -> None:
    other = Reference("qwen35-a-F32")
    rows = np.zeros((64, other.spec.hidden), np.uint16)
    with open_gguf(other.path) as file, pytest.raises(UnsupportedError, match="no layer for multi-token prediction"):
        MTPModel(file, other.spec, HostDevice(), slots=1, context=64, rows=rows)
