"""Constrained replies: valid, and the same tokens with and without drafting, in a batch and alone, everywhere."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import luce
from luce.api import Generation
from luce.config.sampling import SamplingParams
from luce.engine.admission import SequenceHandle
from luce.engine.events import EventSink, FinishReason
from tests.support.draft_identity import CASES, PACKED, PAIRS, PLACES, TINY, prompts, some

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
#: of a reply each in turn
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logit_bias": {200: 5.0}, "min_tokens": 400},
    # The host masks whole rows for log probabilities.
    {"temperature": 0.8, "top_k": 20, "logprobs": 0},
    {"temperature": 0.8, "top_k": 20},
]


def replies(again: bool = False, **settings: Any) -> list[tuple[list[int], str]]:
    """Ids and text of replies by parameters and seeds of their own; every third one is not constrained. `again`: after
    the same replies, so that the prefix cache restores the prompts."""
    with luce.load(TINY / "target.gguf", **(PACKED | settings)) as model:
        for _ in range(1 + again):
            running = [
                model.generate(
                    prompt,
                    max_tokens=32 if seed % 3 == 2 else 200,
                    seed=seed,
                    response_format=None if seed % 3 == 2 else FORM,
                    ignore_eos=seed % 3 == 2,
                    **SAMPLING[seed % len(SAMPLING)],
                )
                for seed, prompt in enumerate(prompts(model, len(SAMPLING) + 2))
            ]
            found = []
            for number, generation in enumerate(running):
                tokens = list(generation)
                found.append(([token.id for token in tokens], "".join(token.text for token in tokens)))
                assert generation.finish is not None
                if number % 3 != 2:
                    assert generation.finish.reason is FinishReason.EOS
        stats = model.engine.stats()
        if again:
            assert stats.cache.reused_tokens > 0
        if settings.get("draft"):
            # What grammars force, and what they refuse, is part of what is drafted.
            assert stats.draft is not None and stats.draft.refused > 0 and stats.forced[1] > 0
        return found


@pytest.fixture(scope="module")
def plain() -> list[tuple[list[int], str]]:
    return replies(target_devices="cpu:0", parallel=1)


def test_every_constrained_reply_is_valid(plain: list[tuple[list[int], str]]) -> None:
    for number, (_, text) in enumerate(plain):
        if number % 3 != 2:
            value = json.loads(text)
            assert list(value) == ["name", "tags", "size"] and len(value["name"]) <= 12
            assert set(value["tags"]) <= {"red", "green", "blue"} and 0 <= value["size"] <= 999


@pytest.mark.parametrize(
    ("pair", "place"),
    some(case for case in CASES if case[0] in ("trained model", "trained draft's trees", "prompt lookup")),
)
def test_drafting_and_placement_change_no_token(plain: list[tuple[list[int], str]], pair: str, place: str) -> None:
    draft = {"draft": PAIRS[pair].draft, "ddtree": PAIRS[pair].tree}
    assert replies(parallel=4, **draft, **PLACES[place]) == plain


@pytest.mark.parametrize("parallel", [1, 16])
def test_a_restored_prefix_and_company_change_no_token(plain: list[tuple[list[int], str]], parallel: int) -> None:
    place: dict[str, Any] = {"target_devices": "cpu:0,cpu:1", "parallel": parallel, "cache_ram": 64}
    assert replies(again=True, **place) == plain


def triggered(**settings: Any) -> list[list[int]]:
    """Ids of replies that are free until a token that the model is fond of; three capitals and a comma follow it."""
    with luce.load(TINY / "target.gguf", **PACKED, **settings) as model:
        (comma,) = model.tokenize(",")

        def reply(prompt: list[int], seed: int) -> Generation:
            # The most frequent token of the prompt.
            trigger = max(prompt, key=prompt.count)
            lark = f"start: <[{trigger}]> /[A-Z]{{3}}/ <[{comma}]>"
            constraint = model.grammars.grammar(lark, triggers=frozenset({trigger}))
            params = SamplingParams(max_tokens=60, seed=seed, ignore_eos=True, **SAMPLING[seed % 4])

            def submit(sink: EventSink) -> SequenceHandle:
                output = model.reply_text()
                return model.engine.submit(prompt, params, output=output, on_event=sink, constraint=constraint)

            return Generation(submit, None)

        running = [reply(prompt, seed) for seed, prompt in enumerate(prompts(model, 6))]
        return [[token.id for token in generation] for generation in running]


@pytest.fixture(scope="module")
def plainly_triggered() -> list[list[int]]:
    return triggered(target_devices="cpu:0", parallel=1)


def test_the_grammar_begins_at_its_trigger(plainly_triggered: list[list[int]]) -> None:
    with luce.load(TINY / "target.gguf", **PACKED) as model:
        begun = 0
        for prompt, ids in zip(prompts(model, 6), plainly_triggered, strict=True):
            trigger = max(prompt, key=prompt.count)
            for at in [at for at, token in enumerate(ids[:-4]) if token == trigger]:
                assert re.match(r"[A-Z]{3},", model.detokenize(ids[at + 1 : at + 5]))
                begun += 1
        assert begun > 6


@pytest.mark.parametrize("place", ["one", "three"])
@pytest.mark.parametrize("pair", ["trained model", "trained draft's trees"])
def test_drafts_across_a_trigger_change_no_token(plainly_triggered: list[list[int]], pair: str, place: str) -> None:
    draft = {"draft": PAIRS[pair].draft, "ddtree": PAIRS[pair].tree}
    assert triggered(parallel=4, **draft, **PLACES[place]) == plainly_triggered
