"""Correction heads against their formulas in float64 (the GRU against PyTorch's where that is installed), and drafts
that have one in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import luce
from luce.draft.dflash.correction import DOMINO, DSPARK, CorrectionSpec, corrected, open_correction
from luce.draft.dflash.model import draft_bytes
from luce.draft.dflash.spec import DFlashSpec
from luce.draft.probabilities import log_probabilities
from luce.errors import LuceError, UnsupportedError
from luce.gguf.reader import open_gguf
from luce.layers.weights import WeightLoader
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from luce.runtime.step import Candidates
from tests.support.drafts import DraftedText, DraftReference, open_draft, spec_of
from tests.support.made_drafts import MadeDraft
from tests.support.proposals import recorded
from tests.support.reference import Reference

VOCAB, HIDDEN, WIDTH, INNER, RANK = 40, 32, 12, 10, 6
TARGET = Reference("qwen35-a-F32")
Tensors = dict[str, NDArray[np.float64]]


def small() -> MadeDraft:
    return MadeDraft.random(vocab_size=VOCAB, dflash__mask_token_id=5)


HEADS: dict[str, MadeDraft] = {
    "domino": small().with_domino(VOCAB, width=WIDTH, inner=INNER),
    "dspark": small().with_dspark(VOCAB, rank=RANK),
    "sure by its row": small().with_dspark(VOCAB, rank=RANK, confidence=HIDDEN),
    "sure by both": small().with_dspark(VOCAB, rank=RANK, confidence=HIDDEN + RANK),
}


def sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(1 / (1 + np.exp(-x)))


def gru(t: Tensors, x: NDArray[np.float64], h: NDArray[np.float64]) -> NDArray[np.float64]:
    """PyTorch's documentation of GRUCell."""
    inputs = (t[f"{DOMINO}gru.weight_ih"] @ x + t[f"{DOMINO}gru.bias_ih"]).reshape(3, -1)
    states = (t[f"{DOMINO}gru.weight_hh"] @ h + t[f"{DOMINO}gru.bias_hh"]).reshape(3, -1)
    r, z = sigmoid(inputs[0] + states[0]), sigmoid(inputs[1] + states[1])
    return np.asarray((1 - z) * np.tanh(inputs[2] + r * states[2]) + z * h)


def chain(
    t: Tensors, table: NDArray[np.float64], seed: int, z: NDArray[np.float64], logits: NDArray[np.float64]
) -> tuple[list[int], list[float]]:
    """A block corrected by the formulas of the heads: rows z [positions, hidden] and logits [positions, vocab] behind a
    seed -> the tokens, and the probability of each, or the head's own estimate of it."""
    before, h, tokens, sure = seed, t.get(f"{DOMINO}start"), [], []
    for row, own in zip(z, logits, strict=True):
        if h is not None:
            h = gru(t, table[before], h)
            inner = t[f"{DOMINO}head.w1"] @ np.concatenate((row, h)) + t[f"{DOMINO}head.b1"]
            own = own + t[f"{DOMINO}head.w2"] @ (inner * sigmoid(inner)) + t[f"{DOMINO}head.b2"]
        else:
            own = own + t[f"{DSPARK}markov.w2"] @ t[f"{DSPARK}markov.w1"][before]
        mass = np.exp(own - own.max())
        chance = mass.max() / mass.sum()
        if f"{DSPARK}confidence.weight" in t:
            weight = t[f"{DSPARK}confidence.weight"][0]
            seen = np.concatenate((row, t[f"{DSPARK}markov.w1"][before]))[: len(weight)]
            chance = sigmoid(weight @ seen + t[f"{DSPARK}confidence.bias"][0])
        before = int(own.argmax())
        tokens.append(before)
        sure.append(float(chance))
    return tokens, sure


@pytest.mark.parametrize("name", HEADS)
def test_blocks_are_those_of_the_formula(name: str, tmp_path: Path) -> None:
    check_blocks(name, HostDevice(), tmp_path)


def test_blocks_on_a_device(emulated: Device, tmp_path: Path) -> None:
    """The head whose matrices go there."""
    check_blocks("domino", emulated, tmp_path)


def check_blocks(name: str, device: Device, path: Path) -> None:
    rng, texts, places = np.random.default_rng(3), 3, 7
    table = rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    z = rng.standard_normal((texts, places, HIDDEN)).astype(np.float32)
    logits = rng.standard_normal((texts, places, VOCAB)).astype(np.float32)
    seeds = np.array([3, 17, 39], np.int32)
    order = np.argsort(-logits, axis=-1, kind="stable").astype(np.int32)
    norms = np.log(np.exp(logits.astype(np.float64)).sum(axis=-1)).astype(np.float32)
    flat = Candidates(
        order.reshape(-1, VOCAB), np.take_along_axis(logits, order, -1).reshape(-1, VOCAB), norms.reshape(-1)
    )
    with open_gguf(HEADS[name].write(path / "draft.gguf")) as file:
        spec = spec_of(file, path)
        assert spec.correction is not None
        head = open_correction(file, spec.correction, HIDDEN, WeightLoader(file, device), device)
        ids, scores, sure = corrected(
            head, seeds, z, order, log_probabilities(flat).reshape(order.shape), lambda ids: device.upload(table[ids])
        )
    assert (np.diff(scores, axis=-1) <= 0).all()
    np.testing.assert_allclose(np.exp(scores).sum(axis=-1), 1, atol=1e-5)
    tensors = {key: tensor.astype(np.float64) for key, tensor in HEADS[name].tensors.items()}
    moved = 0
    for text in range(texts):
        expected, probabilities = chain(
            tensors, table.astype(np.float64), int(seeds[text]), z[text].astype(np.float64), logits[text]
        )
        assert ids[text, :, 0].tolist() == expected
        found_probabilities = np.exp(scores[text, :, 0]) if sure is None else sure[text]
        np.testing.assert_allclose(found_probabilities, probabilities, atol=1e-5)
        moved += int((ids[text, :, 0] != order[text, :, 0]).sum())
    assert moved > texts * places // 2


def test_what_is_no_candidate_keeps_its_part() -> None:
    class Doubling:
        keeps_mass = False

        def begin(self, texts: int) -> NDArray[np.float32]:
            return np.zeros((texts, 0), np.float32)

        def step(self, state: Any, before: Any, z: Any, ids: Any, embedded: Any) -> Any:
            return state, np.log(np.array([[1.0, 4.0]])), None

    scores = np.log(np.array([[[0.5, 0.2]]]))
    ids, found, _ = corrected(
        Doubling(), np.array([1], np.int32), np.zeros((1, 1, 1)), np.array([[[8, 9]]]), scores, lambda ids: ids
    )
    assert ids.tolist() == [[[9, 8]]]
    # Of 0.5, 4 * 0.2 and the 0.3 of all others.
    np.testing.assert_allclose(np.exp(found[0, 0]), [0.8 / 1.6, 0.5 / 1.6])


@pytest.mark.oracle
def test_the_gru_is_pytorch_s() -> None:
    torch = pytest.importorskip("torch")
    tensors = {key: tensor.astype(np.float64) for key, tensor in HEADS["domino"].tensors.items()}
    cell = torch.nn.GRUCell(HIDDEN, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(cell, name).copy_(torch.from_numpy(tensors[f"{DOMINO}gru.{name}"]))
        x, h = np.random.default_rng(0).standard_normal((2, 32))
        expected = cell(torch.from_numpy(x)[None], torch.from_numpy(h[:WIDTH])[None])[0].numpy()
    np.testing.assert_allclose(gru(tensors, x, h[:WIDTH]), expected, atol=1e-12)


def read(path: Path, made: MadeDraft) -> DFlashSpec:
    with open_gguf(made.write(path / "draft.gguf")) as file:
        return spec_of(file, path)


def test_keys(tmp_path: Path) -> None:
    found = [read(tmp_path, made).correction for made in HEADS.values()]
    assert found == [
        CorrectionSpec("domino", VOCAB, WIDTH, INNER),
        CorrectionSpec("dspark", VOCAB, RANK),
        CorrectionSpec("dspark", VOCAB, RANK, confidence=HIDDEN),
        CorrectionSpec("dspark", VOCAB, RANK, confidence=HIDDEN + RANK),
    ]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dflash__dspark__enabled": 1}, "dflash.dspark.enabled is set, and so is dflash.domino.enabled"),
        ({"dflash__domino__emb_dim": None}, "dflash.domino.emb_dim' is missing"),
        ({"dflash__domino__gru_hidden_dim": 0}, "dflash.domino.gru_hidden_dim is 0"),
        ({"dflash__domino__vocab_size": 1 << 25}, "dflash.domino.vocab_size is 33554432"),
        ({"dflash__domino__rank": 4}, "dflash.domino.rank is unknown"),
    ],
)
def test_keys_that_are_wrong(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(LuceError, match=message):
        read(tmp_path, small().with_domino(VOCAB).with_keys(**keys))


def test_a_confidence_of_another_width(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="confidence_dim is 33, expected 32 or 38"):
        read(tmp_path, small().with_dspark(VOCAB, rank=RANK, confidence=33))


SETTINGS: dict[str, Any] = {"target_devices": "cpu:0", "max_ctx": 256, "verify_width": 8}


def made(kind: str, vocab: int = 768, **head: int) -> MadeDraft:
    own = MadeDraft.random(0, hidden=64, vocab_size=768, dflash__mask_token_id=5)
    return own.with_domino(vocab, **head) if kind == "domino" else own.with_dspark(vocab, **head)


def proposed(path: Path, **settings: Any) -> tuple[list[tuple[int, list[int]]], str]:
    """The proposals behind a prompt, whose reply is the expected one, and the drafter's state."""
    with luce.load(TARGET.path, draft=str(path), **SETTINGS, **settings) as model:
        prompt = TARGET.expected["prompt_17"].tolist()
        with recorded(model) as found:
            reply = list(model.generate(prompt, max_tokens=16, temperature=0, ignore_eos=True))
        assert [token.id for token in reply] == TARGET.expected["greedy_17"][:16].tolist()
        stats = model.engine.stats().draft
    assert stats is not None
    return found, stats.state


@pytest.mark.parametrize("kind", ["domino", "dspark"])
def test_a_draft_with_a_head(kind: str, tmp_path: Path) -> None:
    draft = made(kind, **({"confidence": 64 + RANK} if kind == "dspark" else {}))
    path = draft.write(tmp_path / "draft.gguf")
    found, state = proposed(path)
    assert state == "on" and len(found) > 2
    # A tree's first chain is the corrected one.
    trees, _ = proposed(path, ddtree=True)
    assert {tokens[0] for _, tokens in trees[:1]} == {found[0][1][0]}
    off = made(kind)
    off.keys[f"dflash.{kind}.enabled"] = 0
    plain, state = proposed(off.write(tmp_path / "off.gguf"))
    assert state == "on" and plain != found


def test_a_head_for_other_tokens_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found, state = proposed(made("dspark", vocab=700).write(tmp_path / "draft.gguf"))
    assert state == "on" and "its dspark head is for 700 tokens, but the model has 768" in caplog.text
    off = made("dspark")
    off.keys["dflash.dspark.enabled"] = 0
    assert proposed(off.write(tmp_path / "off.gguf"))[0] == found


@pytest.mark.parametrize("name", ["gru.weight_hh", "head.w2", "head.b1"])
def test_tensors_that_are_missing_or_of_another_shape(name: str, tmp_path: Path) -> None:
    draft = made("domino")
    for change, message in ((None, "is missing"), (np.zeros((3, 5), np.float32), r"has shape \[5, 3\]")):
        draft.tensors.pop(f"{DOMINO}{name}")
        if change is not None:
            draft.tensors[f"{DOMINO}{name}"] = change
        with (
            open_gguf(draft.write(tmp_path / "draft.gguf")) as file,
            pytest.raises(UnsupportedError, match=f"tensor {DOMINO}{name} {message}"),
        ):
            DraftedText(file, spec_of(file, tmp_path), HostDevice(), np.zeros((1, 128)), np.zeros(64))
        draft.tensors[f"{DOMINO}{name}"] = np.zeros(0, np.float32)


def test_sizes_are_those_of_the_load(tmp_path: Path) -> None:
    """The matrices of which rows are looked up stay in the file."""
    for kind in ("domino", "dspark"):
        with open_gguf(made(kind).write(tmp_path / f"{kind}.gguf")) as file:
            spec = spec_of(file, tmp_path)
            model = DraftedText(
                file, spec, HostDevice(), np.zeros((1, 128), np.float32), np.zeros(64, np.float32)
            ).model
            assert draft_bytes(file, spec, HostDevice(), slots=1, context=4096) == (model.weights, model.state)


def test_sizes_of_a_draft_with_a_selector() -> None:
    reference = DraftReference("qwen35-a-draft2-hf")
    with open_draft(reference.path) as file:
        spec = spec_of(file, reference.path)
        model = DraftedText(file, spec, HostDevice(), np.zeros((1, 192), np.float32), np.zeros(64, np.float32)).model
        assert draft_bytes(file, spec, HostDevice(), slots=1, context=4096) == (model.weights, model.state)
