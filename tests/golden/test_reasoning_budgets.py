"""Budgets of the reasoning on models: the same tokens with and without drafting, in a batch and alone, everywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import luce
from luce.api import Generation
from luce.config.sampling import SamplingParams
from luce.engine.admission import SequenceHandle
from luce.engine.events import EventSink
from luce.engine.reasoning_limit import ReasoningLimit
from luce.text.reasoning import ReasoningTokens
from tests.support.draft_identity import PACKED, PAIRS, PLACES, TINY, prompts
from tests.support.reference import Reference

#: of a reply each in turn: budget, reserve, sampling
CASES: list[tuple[int | None, int, dict[str, Any]]] = [
    (0, 0, {"temperature": 0.0}),
    (1, 0, {"temperature": 1.0}),
    (8, 0, {"temperature": 0.0}),
    (None, 40, {"temperature": 1.0, "top_k": 5}),
    (13, 20, {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2}),
    (30, 0, {"temperature": 0.0}),
    (None, 0, {"temperature": 0.0}),
]
MOST = 56
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
FORM = {"type": "json_schema", "json_schema": {"schema": {**SCHEMA, "additionalProperties": False}}}


def limit(model: luce.Model) -> ReasoningLimit:
    """Ordinary tokens of a model without markers as if they were some."""
    (close,), (line,) = model.tokenize("}"), model.tokenize("\n")
    lead = tuple(model.tokenize(" so it is"))
    return ReasoningLimit((line,), frozenset({close}), (close, line), lead_in=lead[:4], inside=True)


Made = tuple[list[int], str | None]


def replies(*, form: bool = False, **settings: Any) -> list[Made]:
    """Ids of replies, and how their reasoning ended; `form`: each has JSON behind its reasoning."""
    with luce.load(TINY / "target.gguf", **PACKED, **settings) as model:
        plain = limit(model)

        def reply(prompt: Sequence[int], seed: int) -> Generation:
            budget, reserve, sampling = CASES[seed % len(CASES)]
            own = replace(plain, budget=budget, reply_reserve=reserve)
            params = SamplingParams(max_tokens=MOST, seed=seed, ignore_eos=not form, **sampling)
            marks = ReasoningTokens(plain.opening[0], plain.closing[0], inside=True)
            constraint = model.grammars.constraint(FORM, marks) if form else None

            def submit(sink: EventSink) -> SequenceHandle:
                output = model.reply_text()
                return model.engine.submit(
                    prompt, params, output=output, on_event=sink, reasoning=own, constraint=constraint
                )

            return Generation(submit, None)

        running = [reply(prompt, seed) for seed, prompt in enumerate(prompts(model, 14))]
        return [([token.id for token in one], one.finish.close_kind if one.finish else None) for one in running]


@pytest.fixture(scope="module")
def plain() -> list[Made]:
    return replies(target_devices="cpu:0", parallel=1)


@pytest.fixture(scope="module")
def plain_forms() -> list[Made]:
    return replies(target_devices="cpu:0", parallel=1, form=True)


def test_every_budget_is_kept_to_the_token(plain: list[Made]) -> None:
    with luce.load(TINY / "target.gguf", **PACKED) as model:
        marks = limit(model)
    hard = 0
    for seed, (ids, kind) in enumerate(plain):
        budget, reserve, _ = CASES[seed % len(CASES)]
        room = min(MOST if budget is None else budget, MOST - reserve - 2 if budget is not None or reserve else MOST)
        thought = next((at for at, token in enumerate(ids) if token in marks.closers), MOST)
        assert thought <= room and (kind == "hard") <= (thought == room)
        if kind == "hard":
            assert tuple(ids[thought : thought + 2]) == marks.closing
            lead = len(marks.lead_in) if room >= len(marks.lead_in) else 0
            assert ids[thought - lead : thought] == [*marks.lead_in][:lead]
            hard += 1
    assert hard > len(plain) // 2


@pytest.mark.parametrize(
    ("pair", "place"),
    [
        ("trained model", "three"),
        ("trained model", "draft in a daemon"),
        ("prompt lookup", "one"),
        *(("trained draft's trees", place) for place in PLACES),
    ],
)
def test_drafting_and_placement_change_no_token(plain: list[Made], pair: str, place: str) -> None:
    draft = {"draft": PAIRS[pair].draft, "ddtree": PAIRS[pair].tree}
    assert replies(parallel=4, **draft, **PLACES[place]) == plain


def test_the_grammar_begins_behind_a_forced_end(plain_forms: list[Made]) -> None:
    with luce.load(TINY / "target.gguf", **PACKED) as model:
        marks, whole = limit(model), 0
        for ids, kind in plain_forms:
            if kind is None:
                continue
            body = model.detokenize(ids[ids.index(marks.closing[0]) + 1 :])
            if len(ids) < MOST:
                assert list(json.loads(body)) == ["name"]
                whole += 1
            else:
                assert not body.strip() or body.strip().startswith("{")
    assert whole > 4


@pytest.mark.parametrize("place", ["one", "three"])
@pytest.mark.parametrize("pair", ["trained model", "trained draft's trees"])
def test_a_forced_end_before_a_grammar_changes_no_token(plain_forms: list[Made], pair: str, place: str) -> None:
    draft = {"draft": PAIRS[pair].draft, "ddtree": PAIRS[pair].tree}
    assert replies(parallel=4, form=True, **draft, **PLACES[place]) == plain_forms


@pytest.mark.parametrize("name", ["qwen3-a-F32", "qwen35-a-F32", "gemma4-e-F32", "laguna-a-F32"])
def test_families_end_their_reasoning_as_they_write_it(name: str) -> None:
    reference = Reference(name)
    with luce.load(reference.path, max_ctx=512, kv_cache_dir="off") as model:
        dialect = model.spec.dialect
        assert dialect.reasoning is not None
        opened = [*model.tokenize("a"), *model.tokenizer.encode(dialect.reasoning.open, specials=True)]
        for budget in (0, 5, 60):
            made = model.generate(opened, max_tokens=200, temperature=0.0, reasoning_budget=budget, ignore_eos=True)
            ids = [token.id for token in made]
            assert made.finish is not None and made.finish.close_kind == "hard"
            closing = model.tokenizer.encode(dialect.reasoning.close, specials=True)
            at = ids.index(closing[0])
            assert at == budget
            tail = [*closing, *model.tokenizer.encode(dialect.budget.lead_out, specials=True)]
            assert ids[at : at + len(tail)] == tail
            lead = model.tokenizer.encode(dialect.budget.lead_in, specials=False)
            if lead and len(lead) <= budget:
                assert ids[at - len(lead) : at] == lead
