"""A model of every family drafts by a small model and, where its file has them, by its own layers for further tokens:
replies are those of plain decoding. tests/golden/test_speculative.py has drafts that are right and wrong on purpose."""

from __future__ import annotations

import pytest

import luce
from luce.gguf.reader import open_gguf
from tests.support.reference import Reference, references

#: one file of each family
FILES = list({reference.spec.family: reference for reference in references()}.values())
SETTINGS = {"target_devices": "cpu:0", "max_ctx": 512, "cache_ram": 0}


def predicts_further(reference: Reference) -> bool:
    with open_gguf(reference.path) as file:
        return any(".nextn." in name for name in file.tensors)


def reply(model: luce.Model, ids: list[int]) -> list[int]:
    return [token.id for token in model.generate(ids, max_tokens=24, temperature=0, ignore_eos=True)]


@pytest.mark.parametrize("reference", FILES, ids=lambda r: r.spec.family)
def test_a_small_model_drafts(reference: Reference) -> None:
    """The small model is the model itself."""
    with luce.load(reference.path, draft=str(reference.path), verify_width=6, **SETTINGS) as model:
        tokens = reply(model, reference.expected["prompt_long"].tolist())
        stats = model.engine.stats().draft
    assert tokens == reference.expected["greedy_long"].tolist()[: len(tokens)]
    assert len(tokens) == 24
    assert stats is not None and stats.proposed > 0
    # Besides its own proposals, texts that repeat are proposed, right or not.
    assert stats.accepted > 8


@pytest.mark.parametrize(
    "reference", [each for each in references() if predicts_further(each)], ids=lambda reference: reference.name
)
def test_layers_for_further_tokens_draft(reference: Reference) -> None:
    ids = reference.expected["prompt_long"].tolist()
    with luce.load(reference.path, **SETTINGS) as model:
        plain = reply(model, ids)
    with luce.load(reference.path, draft="mtp", verify_width=5, **SETTINGS) as model:
        assert reply(model, ids) == plain
        stats = model.engine.stats().draft
    assert stats is not None and stats.proposed > 0
