"""Every reference draft: features, hidden states, logits and blocks, on the NumPy device and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from luce.draft.dflash.spec import DFlashSpec
from luce.gguf.reader import GGUFFile
from luce.ops.matmul_int8 import INT8_TYPES
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support.drafts import (
    F32,
    DraftedText,
    DraftReference,
    bfloat16,
    open_draft,
    references,
    spec_of,
    with_flavour,
)

each_draft = pytest.mark.parametrize("reference", references(), ids=lambda r: r.name)
#: drafts with the flag that says whether layers are causal; for the causal draft the reference knows no other flavour
each_flavour = pytest.mark.parametrize(
    ("reference", "flavour"),
    [
        pytest.param(reference, flavour, id=f"{reference.name}-{flavour}")
        for reference in references()
        for flavour in ("causal", "bidir")
        if flavour == "causal" or "-draft-var-" not in reference.name
    ],
)
each_prompt = pytest.mark.parametrize("prompt", ["17", "long"])


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    found: Device = request.getfixturevalue("gpu") if request.param == "gpu" else HostDevice()
    return found


class Opened:
    """A reference draft, and drafts of it on a device."""

    def __init__(self, reference: DraftReference, device: Device, file: GGUFFile) -> None:
        self.reference = reference
        self.device = device
        self.file = file
        self.spec = spec_of(file, reference.path)
        self.expected = reference.expected
        self.table, self.head = reference.table_and_head

    @property
    def coarse(self) -> float:
        """The factor of the limits on a GPU, where int8 products round in a way that the references do not."""
        types = {tensor.type for tensor in self.file.tensors.values()}
        return 4.0 if not self.device.host and types & INT8_TYPES else 1.0

    def on(self, captured: F32, spec: DFlashSpec | None = None, *, floats: bool = False) -> DraftedText:
        """A draft with these captured rows in its ring, rounded unless `floats`."""
        assert self.spec.mask_token is not None
        rows = captured if floats else bfloat16(captured)
        return DraftedText(self.file, spec or self.spec, self.device, rows, self.table[self.spec.mask_token])

    def captured(self, prompt: str) -> F32:
        """The captured rows of a prompt that the reference gives, or where it gives only some, of this target."""
        given = self.expected[f"captured_{prompt}"]
        tokens = self.expected[f"prompt_{prompt}"]
        return given if len(given) == len(tokens) else self.reference.captured(tokens)

    def check_logits(self, z: F32, prompt: str, limit: float) -> None:
        """Rows behind the seed against the expected logits and tokens."""
        logits, expected = z @ self.head.T, self.expected[f"draft_logits_{prompt}"]
        assert ((logits - expected) ** 2).mean() / expected.var() <= limit
        sure = self.expected[f"draft_margin_{prompt}"] > 5 * np.sqrt(((logits - expected) ** 2).mean())
        # The limit is of squares, a margin is none.
        assert sure.mean() > 0.5 / np.sqrt(self.coarse)
        assert (logits.argmax(axis=1) == self.expected[f"draft_tokens_{prompt}"])[sure].all()


@pytest.fixture
def opened(reference: DraftReference, device: Device) -> Iterator[Opened]:
    with ExitStack() as stack:
        yield Opened(reference, device, stack.enter_context(open_draft(reference.path)))


@each_draft
def test_captured_layers(opened: Opened) -> None:
    assert opened.spec.captured(opened.reference.target.spec) == tuple(opened.expected["target_layer_ids"].tolist())


@each_draft
@each_prompt
def test_features(opened: Opened, prompt: str) -> None:
    captured = opened.captured(prompt)
    features = opened.device.download(opened.on(captured).model.fuse(opened.device.upload(captured.copy())))
    given = len(opened.expected[f"captured_{prompt}"]) == len(captured)
    limit = 2e-2 if not opened.device.host else 2e-5 if given else 1e-4
    assert np.abs(features - opened.expected[f"f_{prompt}"]).max() <= limit


@each_draft
@each_prompt
@pytest.mark.parametrize("floats", [True, False], ids=["float32", "bfloat16"])
def test_block(opened: Opened, prompt: str, floats: bool) -> None:
    drafting = opened.on(opened.captured(prompt), floats=floats)
    drafting.append_context(len(opened.expected[f"prompt_{prompt}"]), chunk=50)
    z = drafting.draft_block(opened.table[opened.expected[f"seed_{prompt}"]])
    limits = opened.reference.limits["from_given_captures"]
    if opened.device.host and floats:
        assert np.abs(z - opened.expected[f"z_{prompt}"][1:]).max() <= limits["f32"]["z_max_abs"]
        opened.check_logits(z, prompt, limits["f32"]["logits_nmse"])
    else:
        kind = "bf16_features" if opened.device.host else "bf16_features_bf16_products"
        opened.check_logits(z, prompt, limits[kind]["logits_nmse"] * opened.coarse)


@each_flavour
@each_prompt
def test_explicit_flag(opened: Opened, prompt: str, flavour: str) -> None:
    key = f"z_{prompt}_{flavour}"
    # Not there where the flag changes nothing.
    key = key if key in opened.expected else f"z_{prompt}"
    drafting = opened.on(opened.captured(prompt), with_flavour(opened.spec, flavour == "causal"), floats=True)
    drafting.append_context(len(opened.expected[f"prompt_{prompt}"]))
    z, expected = drafting.draft_block(opened.table[opened.expected[f"seed_{prompt}"]]), opened.expected[key][1:]
    if opened.device.host:
        assert np.abs(z - expected).max() <= opened.reference.limits["from_given_captures"]["f32"]["z_max_abs"]
    assert ((z - expected) ** 2).mean() / expected.var() <= (1e-9 if opened.device.host else 1e-3 * opened.coarse)


@each_draft
@each_prompt
def test_run(opened: Opened, prompt: str) -> None:
    # The context grows by what each step of the expected run accepted; rows of blocks are overwritten.
    expected = {name: opened.expected[f"spec_{prompt}_{name}"] for name in ("committed", "seed", "block", "tokens")}
    text = np.concatenate([opened.expected[f"prompt_{prompt}"], expected["tokens"]])
    drafting = opened.on(opened.reference.captured(text[: expected["committed"][-1]]), floats=True)
    kept = dict(
        zip(opened.expected[f"spec_{prompt}_z_steps"].tolist(), opened.expected[f"spec_{prompt}_z"], strict=True)
    )
    margins = opened.expected[f"spec_{prompt}_draft_margin"]
    for step, (committed, seed) in enumerate(zip(expected["committed"].tolist(), expected["seed"], strict=True)):
        drafting.append_context(committed)
        z = drafting.draft_block(opened.table[seed])
        if step in kept:
            error = ((z - kept[step][1:]) ** 2).mean() / kept[step].var()
            assert error <= (1e-7 if opened.device.host else 2e-3 * opened.coarse)
        if opened.device.host or margins[step] > 0.2:
            np.testing.assert_array_equal((z @ opened.head.T).argmax(axis=1), expected["block"][step, 1:])
    assert step > 10
