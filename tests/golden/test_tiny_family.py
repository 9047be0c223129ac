"""The trained tiny family in models/tiny: it loads, writes what PyTorch wrote, and finds passkeys.

`expected.json` there was made by `python -m tools.train_tiny expected`, in float32, from the same files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import luce
from tests.support.proposals import recorded

FOLDER = Path(__file__).resolve().parents[2] / "models" / "tiny"
CASES: list[dict[str, Any]] = json.loads((FOLDER / "expected.json").read_text())
CONTEXT = 2304


@pytest.fixture(scope="module", params=["target", "drafter"])
def model(request: pytest.FixtureRequest) -> Iterator[tuple[str, luce.Model]]:
    with luce.load(FOLDER / f"{request.param}.gguf", target_devices="cpu:0", max_ctx=CONTEXT, parallel=1) as model:
        yield request.param, model


def tokens(model: luce.Model, prompt: list[int], count: int) -> list[int]:
    return [t.id for t in model.generate(prompt, max_tokens=count, temperature=0, ignore_eos=True)]


def test_files_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.glob("*.gguf")) < 19e6


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["prompt"][:12])
def test_greedy_text_equals_pytorch(model: tuple[str, luce.Model], case: dict[str, Any]) -> None:
    name, runs = model
    assert runs.tokenize(case["prompt"]) == case["ids"]
    assert tokens(runs, case["ids"], len(case[name])) == case[name]


@pytest.mark.parametrize("draft", ["draft", "draft2"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["prompt"][:12])
def test_the_draft_s_block_equals_pytorch(case: dict[str, Any], draft: str) -> None:
    """Its first proposal behind the prompt and the target's first token, which all count or are taken back."""
    settings = {"max_ctx": CONTEXT, "draft": str(FOLDER / f"{draft}.gguf"), "verify_width": 16}
    with luce.load(FOLDER / "target.gguf", target_devices="cpu:0", **settings) as model, recorded(model) as proposed:
        assert tokens(model, case["ids"], 32) == case["target"][:32]
    assert proposed[0] == (len(case["ids"]) + 1, case[draft])


@pytest.mark.parametrize("length", [1024, 2048])
def test_finds_passkeys(model: tuple[str, luce.Model], length: int) -> None:
    """A number that the text states once is repeated on request, from any position."""
    name, runs = model
    random = np.random.default_rng(length)
    filler = runs.tokenize((FOLDER.parents[1] / "LICENSE").read_text())[: length - 64]
    assert len(filler) == length - 64
    found = []
    depths = np.linspace(0, 1, 4)
    for depth in depths:
        key = str(random.integers(10_000, 1_000_000))
        statement = runs.tokenize(f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n")
        question = runs.tokenize("\nWhat is the pass key? The pass key is")
        cut = round(depth * len(filler))
        prompt = [*filler[:cut], *statement, *filler[cut:], *question]
        found.append(runs.detokenize(tokens(runs, prompt, 8)).partition(".")[0] == f" {key}")
    assert sum(found) >= (4 if name == "target" else 3)
