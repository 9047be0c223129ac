"""Scores of pages by a drafter: the trained one of models/tiny, and one with other tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from luce.compress.scorer import TextScorer
from luce.gguf.reader import open_gguf
from luce.kvcache.draft_scorer import DraftScorer
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.runtime.host import HostDevice
from luce.runtime.step import PAGE
from luce.text.retokenize import Retokenizer
from luce.text.tokenizer import Tokenizer
from tests.support.reference import Reference

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trained() -> Iterator[tuple[DraftScorer, Tokenizer]]:
    path = ROOT / "models" / "tiny" / "drafter.gguf"
    with open_gguf(path) as file:
        spec = read_spec(Source(str(path), file.metadata, file.tensors))
        scorer = DraftScorer(TextScorer(file, spec, HostDevice()))
        yield scorer, Tokenizer(file.metadata, nfc=spec.nfc, eos_texts=spec.eos)
        scorer.close()
        scorer.close()


@pytest.mark.parametrize(("length", "at"), [(1500, 700), (2500, 1), (2500, 30)])
def test_the_page_with_the_answer_scores_highest(trained: tuple[DraftScorer, Tokenizer], length: int, at: int) -> None:
    """Also in a text of several segments, in the first one or the last."""
    scorer, tokenizer = trained
    filler = tokenizer.encode((ROOT / "LICENSE").read_text(), specials=False)
    statement = tokenizer.encode("\nThe pass key is 71432. Remember it. 71432 is the pass key.\n", specials=False)
    question = tokenizer.encode("\nWhat is the pass key? The pass key is", specials=False)
    place = at if at > 100 else at * PAGE
    tokens = np.array([*filler[:place], *statement, *filler[place:length], *question], np.int32)
    scores = scorer(tokens)
    assert scores.dtype == np.float32 and len(scores) == len(tokens) // PAGE and (scores >= 0).all()
    tail = (len(tokens) - len(question)) // PAGE
    # The question attends to itself as well.
    assert place // PAGE <= scores[:tail].argmax() <= (place + len(statement)) // PAGE


def test_texts_of_any_length(trained: tuple[DraftScorer, Tokenizer]) -> None:
    scorer, _ = trained
    for length in (0, 1, 63, 64, 65, 130):
        scores = scorer(np.arange(length, dtype=np.int32))
        assert scores.shape == (length // PAGE,) and np.isfinite(scores).all()


def test_scores_of_a_text_do_not_depend_on_those_before(trained: tuple[DraftScorer, Tokenizer]) -> None:
    scorer, _ = trained
    text = np.random.default_rng(0).integers(0, 4000, 400).astype(np.int32)
    first = scorer(text)
    scorer(text[::-1].copy())
    np.testing.assert_array_equal(scorer(text), first)


def test_a_page_has_the_mean_of_its_tokens() -> None:
    """Also of tokens of another vocabulary."""
    small, large = Reference("qwen3-a-F32"), Reference("gemma4-e-F32")
    with ExitStack() as stack:
        files = [stack.enter_context(open_gguf(reference.path)) for reference in (small, large)]
        theirs, ours = (Tokenizer(file.metadata, nfc=file is files[0]) for file in files)
        ids = np.array(ours.encode((ROOT / "LICENSE").read_text()[:700], specials=False), np.int32)
        tokens = TextScorer(files[0], small.spec, HostDevice(), Retokenizer(ours, theirs))
        scorer = DraftScorer(tokens)
        stack.callback(scorer.close)
        scores, each = scorer(ids), tokens(ids, rotated=True)
        assert len(scores) == len(ids) // PAGE > 1
        for page, score in enumerate(scores):
            assert score == pytest.approx(each[page * PAGE : (page + 1) * PAGE].mean(), rel=1e-6)
