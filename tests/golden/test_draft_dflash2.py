"""DFlash2 reference drafts: blocks, candidates, the selector's walk and its lattice, against the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.draft.dflash.correction import corrected, lattice_scores
from luce.draft.dflash.drafter import DFlashDrafter
from luce.draft.drafter import Draftable
from luce.draft.probabilities import log_probabilities
from luce.draft.target_head import TargetHead
from luce.layers import dynamic_conv as convolutions
from luce.layers.dynamic_conv import DynamicConvLayer
from luce.layers.features import FeatureRing
from luce.models.spec import Attention
from luce.ops.matmul import matmul
from luce.ops.sample import find_candidates
from luce.runtime.device import Array, Device
from luce.runtime.host import HostDevice
from luce.runtime.step import Candidates, Int32, Output, Span
from luce.shard.shard import Pending
from tests.support.drafts import F32, DraftedText, DraftReference, bfloat16, open_draft, spec_of
from tests.support.emulated import EmulatedDevice

NAMES = ("qwen35-a-draft2-hf", "qwen35-a-draft2-var-hf")
CASES = ("17", "long", "at1", "at5", "at31", "at33", "at100", "rows16", "rows4")
each_draft = pytest.mark.parametrize("name", NAMES)


class Opened:
    """A reference draft and the oracle's numbers."""

    def __init__(self, stack: ExitStack, name: str) -> None:
        self.reference = DraftReference(name)
        self.file = stack.enter_context(open_draft(self.reference.path))
        self.spec = spec_of(self.file, self.reference.path)
        self.expected = self.reference.expected
        self.table, self.head = self.reference.table_and_head
        self.limits = self.reference.limits["from_given_captures"]["f32"]

    def captured(self, case: str) -> F32:
        """The captured rows of a case."""
        prompt = "17" if case in ("17", "rows16", "rows4") else "long"
        rows: F32 = self.expected[f"captured_{prompt}"][: int(self.expected[f"committed_{case}"])]
        return np.ascontiguousarray(rows, np.float32)

    def drafting(self, device: Device, *cases: str, floats: bool = True) -> DraftedText:
        """A draft of these cases, each in its slot, with all of their context."""
        rows = np.concatenate([self.captured(case) for case in cases])
        block = len(self.expected[f"z_{cases[0]}"])
        assert self.spec.mask_token is not None
        found = DraftedText(
            self.file,
            replace(self.spec, block=block),
            device,
            rows if floats else bfloat16(rows),
            self.table[self.spec.mask_token],
            slots=len(cases),
        )
        begin = 0
        for slot, case in enumerate(cases):
            count = len(self.captured(case))
            for at in range(begin, begin + count, 50):
                part = np.arange(at, min(at + 50, begin + count), dtype=np.int32)
                found.model.append_context([slot], [len(part)], part)
            begin += count
        return found

    def block(self, drafting: DraftedText, *cases: str) -> list[F32]:
        """The rows behind the seed of each case."""
        seeds = [self.table[int(self.expected[f"seed_{case}"])] for case in cases]
        rows = drafting.draft_block(*seeds, slots=tuple(range(len(cases))))
        return np.split(rows, len(cases))

    def candidates(self, z: F32) -> tuple[Int32, NDArray[np.float64], NDArray[np.float64]]:
        """Ids, log probabilities and factored logits of the best candidates."""
        assert self.spec.correction is not None
        logits = (z @ self.head.T).astype(np.float32)
        scaled = self._factored(logits.astype(np.float64))
        ids = np.argsort(-logits, axis=1, kind="stable")[:, : self.spec.correction.top].astype(np.int32)
        norms = np.log(np.exp(scaled).sum(axis=1)).astype(np.float32)
        top = Candidates(ids, np.take_along_axis(logits, ids, axis=1), norms)
        scores = log_probabilities(top, scale=self.spec.logit_scale, softcap=self.spec.logit_softcap)
        return ids, scores, np.take_along_axis(scaled, ids, axis=1)

    def _factored(self, logits: NDArray[np.float64]) -> NDArray[np.float64]:
        logits = logits * self.spec.logit_scale
        cap = self.spec.logit_softcap
        return cap * np.tanh(logits / cap) if cap else logits

    def check(self, drafting: DraftedText, z: F32, case: str, change: Callable[[Any], Any] = lambda head: head) -> None:
        """Rows, candidates, and the walk, within the oracle's limits, with a changed selector."""
        expected, head = self.expected, change(drafting.model.correction)
        assert head is not None
        assert np.abs(z - expected[f"z_{case}"][1:]).max() <= self.limits["z_max_abs"]
        if f"draft_logits_{case}" in expected:
            logits, own = expected[f"draft_logits_{case}"], self._factored((z @ self.head.T).astype(np.float64))
            assert ((own - logits) ** 2).mean() / logits.var() <= self.limits["logits_nmse"]
        ids, scores, unary = self.candidates(z)
        np.testing.assert_array_equal(ids, expected[f"candidates_{case}"])
        np.testing.assert_allclose(unary, expected[f"unary_{case}"], rtol=0, atol=self.limits["edge_scores_max_abs"])
        device = drafting.device
        read = device.download(head.read(device.upload(z)))
        seed = int(expected[f"seed_{case}"])
        walked, _, _ = corrected(head, np.array([seed], np.int32), read[None], ids[None], scores[None], device.upload)
        np.testing.assert_array_equal(walked[0, :, 0], expected[f"draft_tokens_{case}"])
        if f"lattice_{case}" in expected:
            self._check_lattice(lattice_scores(head, seed, read, ids, scores), scores, case)

    def _check_lattice(self, found: NDArray[np.float64] | None, scores: NDArray[np.float64], case: str) -> None:
        assert found is not None
        # A row of the lattice has the mass of its candidates; the oracle's rows are not normed.
        mass = np.exp(scores).sum(axis=1)[:, None]
        np.testing.assert_allclose(np.exp(found).sum(axis=-1), np.broadcast_to(mass, found.shape[:2]), rtol=1e-6)
        expected = self.expected[f"lattice_{case}"]
        differences = [x - x[..., :1] for x in (found, expected)]
        np.testing.assert_allclose(*differences, rtol=0, atol=self.limits["edge_scores_max_abs"])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@each_draft
@pytest.mark.parametrize("case", CASES)
def test_every_case(name: str, case: str, stack: ExitStack) -> None:
    opened = Opened(stack, name)
    drafting = opened.drafting(HostDevice(), case)
    (z,) = opened.block(drafting, case)
    opened.check(drafting, z, case)


@each_draft
@pytest.mark.emulated
def test_on_a_device(name: str, emulated: Device, stack: ExitStack) -> None:
    opened = Opened(stack, name)
    drafting = opened.drafting(emulated, "17")
    (z,) = opened.block(drafting, "17")
    # Keys and values are fp16, and rows of the context are multiplied as fp16 where there are more than 16.
    assert ((z - opened.expected["z_17"][1:]) ** 2).mean() / z.var() <= 1e-5


@pytest.mark.gpu
@each_draft
def test_on_a_gpu(name: str, gpu: Device, stack: ExitStack) -> None:
    opened = Opened(stack, name)
    for case in ("17", "long"):
        (z,) = opened.block(opened.drafting(gpu, case), case)
        assert ((z - opened.expected[f"z_{case}"][1:]) ** 2).mean() / z.var() <= 1e-3


@each_draft
@pytest.mark.parametrize("cases", [("17", "long"), ("at31", "at100"), ("at100", "17", "at31")])
def test_several_sequences_in_one_pass(name: str, cases: tuple[str, ...], stack: ExitStack) -> None:
    opened = Opened(stack, name)
    drafting = opened.drafting(HostDevice(), *cases)
    for case, z in zip(cases, opened.block(drafting, *cases), strict=True):
        opened.check(drafting, z, case)
    # The other sequences' seeds change nothing of the first one.
    seeds = [opened.table[int(opened.expected[f"seed_{cases[0]}"])], *(opened.table[9] for _ in cases[1:])]
    again = np.split(drafting.draft_block(*seeds, slots=tuple(range(len(cases)))), len(cases))
    np.testing.assert_array_equal(again[0], opened.block(drafting, *cases)[0])


@each_draft
def test_features_rounded_to_bfloat16(name: str, stack: ExitStack) -> None:
    opened = Opened(stack, name)
    (z,) = opened.block(opened.drafting(HostDevice(), "long", floats=False), "long")
    expected = opened.expected["z_long"][1:]
    limit = opened.reference.limits["from_given_captures"]["bf16_features"]["logits_nmse"]
    assert ((z - expected) ** 2).mean() / expected.var() <= limit


@dataclass
class Ends:
    """The target's embedding and head, on a device of their own."""

    device: Device
    table: F32
    head: F32
    embedding = None

    def embed(self, tokens: Int32) -> Array:
        return self.device.upload(self.table[tokens])

    def project(self, hidden: Array, *, top: int = 0, scale: float = 0.0, softcap: float = 0.0) -> Pending:
        rows = self.device.upload(self.device.download(hidden) @ self.head.T)
        found = find_candidates(self.device, rows, top, scale, softcap)

        def wait() -> Output:
            ids, best = found()
            return Output(ids, np.empty((0, rows.shape[1]), np.float32), best)

        return wait


@each_draft
@pytest.mark.parametrize("kind", ["host", pytest.param("emulated", marks=pytest.mark.emulated)])
def test_the_drafter_proposes_the_walk_and_pairwise_trees(name: str, kind: str, stack: ExitStack) -> None:
    opened = Opened(stack, name)
    device: Device = HostDevice() if kind == "host" else EmulatedDevice()
    expected, captured = opened.expected, opened.captured("at5")
    ring = FeatureRing(device, opened.spec.captures or (), opened.spec.hidden, slots=1, capacity=64)
    values = device.download(ring.rows).copy()
    values[: len(captured)] = bfloat16(captured)
    device.write(ring.rows, values)
    assert opened.spec.mask_token is not None
    drafting = DraftedText(opened.file, opened.spec, device, values, opened.table[opened.spec.mask_token])
    ends = Ends(device, opened.table, opened.head)
    drafter = DFlashDrafter(drafting.model, ring, TargetHead(device, ends, ends))
    drafter.observe([Span(0, 0, len(captured), 0)])
    tokens = np.array([*expected["prompt_long"][: len(captured)], expected["seed_at5"]], np.int32)
    (chain,) = drafter.propose([Draftable(0, tokens, 99)])()
    sure = expected["draft_margin_at5"] > 0.02
    assert sure.all()
    assert list(chain.tokens) == expected["draft_tokens_at5"].tolist()
    (tree,) = drafter.propose([Draftable(0, tokens, 15, max_depth=15)])()
    reach: list[float] = []
    for token, chance, parent in zip(tree.tokens, tree.probabilities, tree.parents, strict=True):
        reach.append(chance * (reach[parent] if parent >= 0 else 1.0))
        assert token in range(len(opened.table))
    # The likeliest first; the children of one node have at most all of the probability.
    assert reach == sorted(reach, reverse=True)
    for parent in range(-1, len(reach)):
        own = [chance for chance, of in zip(tree.probabilities, tree.parents, strict=True) if of == parent]
        assert sum(own) <= 1 + 1e-9
    assert tree.tokens[0] == chain.tokens[0]
    assert tree.probabilities[0] == pytest.approx(chain.probabilities[0])


def convolved(x: F32, base: F32, coefficients: F32, spans: Any, *, first: int = 0, interleaved: bool = False) -> F32:
    """luce.ops.dynamic_conv for one block, with mistakes: `first` times the first row stands before it; channels of a
    group are not beside each other."""
    out, times = np.zeros_like(x), x.shape[1] // coefficients.shape[2]
    for tap in range(len(base)):
        own = coefficients[:, tap]
        weights = base[tap] + (np.tile(own, (1, times)) if interleaved else np.repeat(own, times, axis=1))
        out += weights * np.concatenate((np.repeat(first * x[:1], tap, axis=0), x[: len(x) - tap]))
    return out


#: instead of luce.ops.dynamic_conv.dynamic_conv behind the device: mistakes that the oracle must see
CONVOLUTIONS: dict[str, Callable[..., Any]] = {
    "no convolution": lambda x, base, c, spans: x.copy(),
    "base only": lambda x, base, c, spans: convolved(x, base, 0 * c, spans),
    "coefficients only": lambda x, base, c, spans: convolved(x, 0 * base, c, spans),
    "taps reversed": lambda x, base, c, spans: convolved(x, base[::-1], c[:, ::-1], spans),
    "groups interleaved": lambda x, base, c, spans: convolved(x, base, c, spans, interleaved=True),
    "row before the block repeated": lambda x, base, c, spans: convolved(x, base, c, spans, first=1),
}


def _transposed(self: DynamicConvLayer, y: Any) -> F32:
    found = matmul(HostDevice(), y, self.input_weight)
    taps = len(found[0]) // (2 * GROUPS)
    return np.ascontiguousarray(found.reshape(len(found), taps, 2, GROUPS).transpose(0, 2, 1, 3))


GROUPS = 4
LAYERS: dict[str, dict[str, Any]] = {
    "no input side": {"prepare": lambda self, y, c, step: y},
    "no output side": {"finish": lambda self, out, c, step: out},
    "sides swapped": {"prepare": DynamicConvLayer.finish, "finish": DynamicConvLayer.prepare},
    "projection read tap before side": {"coefficients": _transposed},
}
MIXERS: dict[str, Callable[[Attention], Attention]] = {
    "causal block rows": lambda mixer: replace(mixer, bidirectional=False),
    "window one too wide": lambda mixer: replace(mixer, window=mixer.window and mixer.window + 1),
    "window one too narrow": lambda mixer: replace(mixer, window=mixer.window and mixer.window - 1),
}


class Changed:
    """A selector with a mistake in its steps."""

    def __init__(self, head: Any, **changes: Callable[..., Any]) -> None:
        self._head, self._changes, self._seed = head, changes, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def step(self, state: F32, before: Int32, z: F32, ids: Int32, embedded: Any) -> Any:
        if self._seed is None:
            self._seed = before
        before = self._changes.get("before", lambda before, seed: before)(before, self._seed)
        z = self._changes.get("z", lambda z: z)(z)
        state, bias, sure = self._head.step(state, before, z, ids, embedded)
        return state, self._changes.get("bias", lambda bias: bias)(bias), sure


SELECTORS: dict[str, dict[str, Callable[..., Any]]] = {
    "selector left out": {"bias": lambda bias: 0 * bias},
    "without g": {"z": np.ones_like},
    "seed as every predecessor": {"before": lambda before, seed: seed},
}


@pytest.mark.parametrize("mistake", [*CONVOLUTIONS, *LAYERS, *MIXERS, *SELECTORS])
def test_mistakes_are_seen(mistake: str, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, change = Opened(stack, NAMES[0]), SELECTORS.get(mistake)
    if mistake in CONVOLUTIONS:
        wrong = CONVOLUTIONS[mistake]
        monkeypatch.setattr(convolutions, "dynamic_conv", lambda device, *given: wrong(*given))
    for name, method in LAYERS.get(mistake, {}).items():
        monkeypatch.setattr(DynamicConvLayer, name, method)
    if mistake in MIXERS:
        layers = [replace(layer, mixer=MIXERS[mistake](layer.mixer)) for layer in opened.spec.layers]
        opened.spec = replace(opened.spec, layers=tuple(layers))
    drafting = opened.drafting(HostDevice(), "long")
    (z,) = opened.block(drafting, "long")
    with pytest.raises(AssertionError):
        opened.check(drafting, z, "long", (lambda head: Changed(head, **change)) if change else lambda head: head)


def test_a_convolution_without_a_mistake_is_right(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the mistakes are made in gives the oracle's numbers."""
    monkeypatch.setattr(convolutions, "dynamic_conv", lambda device, *given: convolved(*given))
    opened = Opened(stack, NAMES[0])
    drafting = opened.drafting(HostDevice(), "long")
    (z,) = opened.block(drafting, "long")
    opened.check(drafting, z, "long", Changed)
