"""Steps split into microbatches, run by the scripted backend, which checks each against the contract of a step."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce.backend.microbatch import max_microbatch_rows, separate_prompts, split_microbatches
from luce.engine.draft_tree import tree_spans
from luce.engine.scheduler import Scheduler
from luce.engine.sequence import Sequence
from luce.kvcache.page_table import PageTables
from luce.runtime.draws import Draw, RowDraws
from luce.runtime.step import PAGE, MadeMasks, Output, RowMasks, Span, Step
from tests.support.scripted_backend import ScriptedBackend

CONTEXT = 2048


def step_of(*spans: tuple[int, int], wanted: tuple[int, ...] = ()) -> Step:
    """A step without pages: (rows, position) of each span."""
    built, start = [], 0
    for slot, (rows, position) in enumerate(spans):
        built.append(Span(slot, start, rows, position))
        start += rows
    return Step.of_spans(built, range(start), (), wanted, needs_logits=[row % 2 == 0 for row in wanted])


def sizes(step: Step, rows: int) -> list[int]:
    return [batch.rows for batch in split_microbatches(step, rows)]


def tree_of(slot: int, start: int, rows: int) -> list[Span]:
    """A root with as many branches as there are other rows."""
    return tree_spans((0,) * (rows - 1), Span(slot, start, rows, 70))


def parts_of(*spans: Span, invariant_rows: int = 16, shared_rows: int = 0, wanted: tuple[int, ...] = ()) -> list[int]:
    """Rows of the parts of a step of these spans."""
    step = step_of(*((span.rows, span.position) for span in spans), wanted=wanted)
    parts = separate_prompts(replace(step, spans=spans), invariant_rows, shared_rows)
    for first, part in zip(itertools.accumulate([part.rows for part in parts], initial=0), parts, strict=False):
        assert all(row >= 0 for span in part.spans for row in span.ancestors)
        np.testing.assert_array_equal(part.tokens, step.tokens[first : first + part.rows])
    assert sum(len(part.spans) for part in parts) == len(spans)
    return [part.rows for part in parts]


def test_replies_share_a_step_of_as_many_rows_as_have_the_bits_of_one() -> None:
    chains = [Span(slot, 8 * slot, 8, 70, speculative=True) for slot in range(8)]
    prompts = [Span(8, 64, 9, 0), Span(9, 73, 40, 0)]
    assert parts_of(*chains, *prompts, invariant_rows=64) == [64, 9, 40]
    assert parts_of(*chains, *prompts, invariant_rows=32) == [32, 32, 9, 40]
    assert parts_of(*chains, *prompts, invariant_rows=16) == [16, 16, 16, 16, 9, 40]
    # What a daemon does not say.
    assert parts_of(*chains, *prompts, invariant_rows=0) == [16, 16, 16, 16, 9, 40]
    # A tree is one sequence's.
    trees = [span for slot in range(3) for span in tree_of(slot, 16 * slot, 16)]
    assert parts_of(*trees, invariant_rows=40) == [32, 16]


def test_short_prompts_share_a_step() -> None:
    def spans_of(*rows: int) -> list[Span]:
        starts = itertools.accumulate(rows, initial=0)
        return [Span(slot, start, count, 0) for slot, (start, count) in enumerate(zip(starts, rows, strict=False))]

    several = spans_of(9, 7, 17, 143, 60, 144, 20, 30)
    assert parts_of(*several, shared_rows=1000) == [16, 220, 144, 50]
    assert parts_of(*several, shared_rows=160) == [16, 160, 60, 144, 50]
    assert parts_of(*several) == [16, 17, 143, 60, 144, 20, 30]
    # Behind short ones, and behind replies that leave room for few rows.
    assert parts_of(*spans_of(20, 16), shared_rows=1000) == [20, 16]
    assert parts_of(*spans_of(1, 1, 20, 30), shared_rows=1000) == [2, 50]
    # A product of the head has the bits of one row for 16 rows.
    ends = spans_of(*[20] * 17)
    outputs = tuple(20 * number + 19 for number in range(17))
    assert parts_of(*ends, shared_rows=1000, wanted=outputs) == [320, 20]
    assert parts_of(*ends, shared_rows=1000, wanted=outputs[1:]) == [340]
    assert parts_of(*spans_of(20, 30), shared_rows=1000, wanted=tuple(range(20))) == [20, 30]


def test_replies_run_apart_from_prompts() -> None:
    prompt = Span(9, 16, 40, 0)
    # Single rows, chains and trees of as many rows as have the bits of one.
    singles = [Span(slot, slot, 1, 70) for slot in range(3)]
    chain = Span(3, 3, 5, 70, speculative=True)
    tree = tree_of(4, 8, 8)
    assert parts_of(*singles, chain, *tree, prompt) == [16, 40]
    assert parts_of(*tree_of(0, 0, 16), Span(9, 16, 40, 0)) == [16, 40]
    # The last row of a prompt is as good as another single row if there is room for it.
    assert parts_of(*tree_of(0, 0, 15), Span(1, 15, 1, 30)) == [16]
    assert parts_of(*tree_of(0, 0, 16), Span(1, 16, 1, 30)) == [16, 1]
    # No kernel makes a difference between these rows,
    assert parts_of(*singles, Span(9, 3, 13, 0)) == [16]
    # nor between those of more replies.
    many = [Span(slot, slot, 1, 70) for slot in range(20)]
    assert parts_of(*many, Span(20, 20, 40, 0)) == [20, 40]
    assert parts_of(*many) == [20]


def test_prompts_run_apart_from_each_other() -> None:
    """But for those of few rows, up to as many as have the bits of one."""
    reply = Span(0, 0, 1, 70)
    assert parts_of(Span(0, 0, 40, 0), Span(1, 40, 17, 0), Span(2, 57, 200, 64)) == [40, 17, 200]
    assert parts_of(reply, Span(1, 1, 40, 0), Span(2, 41, 5, 0), Span(3, 46, 11, 9), Span(4, 57, 1, 9)) == [
        1,
        40,
        16,
        1,
    ]
    assert parts_of(reply, Span(1, 1, 15, 0), Span(2, 16, 40, 0)) == [16, 40]
    assert parts_of(reply, Span(1, 1, 16, 0), Span(2, 17, 2, 0)) == [1, 16, 2]


def test_short_steps_stay_whole() -> None:
    for rows in (1, 100, 191):
        step = step_of((rows, 0))
        assert split_microbatches(step, 128)[0] is step


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (512, [128] * 4),
        (520, [128, 128, 128, 136]),
        # A microbatch of a span begins after whole pages of its rows,
        (700, [128, 128, 128, 128, 188]),
        # and the last one is not so short that kernels treat it as single steps.
        (256 + 16, [128, 144]),
        (192, [64, 128]),
        (192 + 16, [64, 144]),
    ],
)
def test_cuts_after_pages(rows: int, expected: list[int]) -> None:
    assert sizes(step_of((rows, 300)), 128) == expected


@pytest.mark.parametrize("before", [50, 56, 60])
def test_trees_stay_together(before: int) -> None:
    """Two trees of ten rows behind a prompt's: none is cut, and the ancestors of a branch are in its own microbatch."""
    prompt = step_of((before, 0), (20, 70), (100, 0))
    trees = [
        span
        for slot, start in ((1, before), (3, before + 10))
        for span in tree_spans((0, 1, 2, 1, 4, 5, 0, 7, 8), Span(slot, start, 10, 70))
    ]
    step = replace(prompt, spans=(prompt.spans[0], *trees, prompt.spans[2]))
    batches = split_microbatches(step, 60)
    assert len(batches) > 1
    at, found = 0, []
    for batch in batches:
        for span in batch.spans:
            behind = tuple(row + at for row in span.ancestors)
            found += [replace(span, start=span.start + at, ancestors=behind)] if span.speculative else []
            assert all(row >= 0 for row in span.ancestors)
        at += batch.rows
    assert found == trees


def test_cuts_keep_single_rows_with_others() -> None:
    # Three sequences decode beside a prompt: pages count from the prompt's first row of the step.
    batches = split_microbatches(step_of((1, 9), (1, 70), (1, 0), (512, 64), wanted=(0, 1, 2, 514)), 256)
    assert [batch.rows for batch in batches] == [3 + 192, 320]
    assert [batch.spans for batch in batches] == [
        (Span(0, 0, 1, 9), Span(1, 1, 1, 70), Span(2, 2, 1, 0), Span(3, 3, 192, 64)),
        (Span(3, 0, 320, 256),),
    ]
    assert [batch.output_rows.tolist() for batch in batches] == [[0, 1, 2], [319]]
    assert [batch.needs_logits.tolist() for batch in batches] == [[True, False, True], [True]]


@given(st.lists(st.integers(1, 700), min_size=1, max_size=12), st.integers(1, 5))
def test_sizes(spans: list[int], pages: int) -> None:
    step, rows = step_of(*((size, 0) for size in spans)), pages * PAGE
    batches = split_microbatches(step, rows)
    assert sum(batch.rows for batch in batches) == step.rows
    assert max(batch.rows for batch in batches) <= max_microbatch_rows(rows)
    np.testing.assert_array_equal(np.concatenate([batch.tokens for batch in batches]), step.tokens)
    np.testing.assert_array_equal(np.concatenate([batch.positions for batch in batches]), step.positions)
    for batch in batches[:-1]:
        last = batch.spans[-1]
        ends = last.position + last.rows
        assert ends == spans[last.slot] or (ends % PAGE == 0 and spans[last.slot] - ends > 16)


@settings(max_examples=40)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 6), st.booleans()), min_size=1, max_size=4),
    pages=st.integers(1, 3),
    window=st.sampled_from([None, 1, 32, 100]),
)
def test_microbatches_give_the_replies_of_whole_steps(
    prompts: list[tuple[int, int, bool]], pages: int, window: int | None
) -> None:
    chunk, rows = 512, pages * PAGE
    backend = ScriptedBackend(slots=4, chunk=chunk, context=CONTEXT, windows=(None, window))
    own = PageTables(backend.capacity.pages, backend.capacity.windows, slots=4, context=CONTEXT, chunk=chunk)
    scheduler = Scheduler(own, slots=4, chunk=chunk, max_scored_rows=chunk)
    sequences = [
        Sequence(prompt=((np.arange(n) * (i + 3)) % 97).astype(np.int32), max_new_tokens=room, needs_logits=full)
        for i, (n, room, full) in enumerate(prompts)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    list(scheduler.admit())
    while (plan := scheduler.schedule()) is not None:
        parts = separate_prompts(plan.step)
        replying = sum(part.rows for part in plan.sequences if part.position >= len(part.sequence.prompt))
        if plan.step.rows > 16 and replying:
            # And with them prompts of which few rows are left.
            assert replying <= parts[0].rows <= 16
        outputs = [backend.forward(batch) for part in parts for batch in split_microbatches(part, rows)]
        output = Output(*(np.concatenate([getattr(o, part) for o in outputs]) for part in ("ids", "logits")))
        scheduler.advance(plan)
        for part in plan.sequences:
            one = part.sequence
            if not one.prompt_remaining:
                (token,) = output.ids[part.ids]
                if one.needs_logits:
                    assert output.logits[part.logits].argmax() == token
                one.reply.append(int(token))
                if len(one.reply) == one.max_new_tokens:
                    scheduler.remove(one)
    for sequence in sequences:
        assert sequence.reply == backend.reply(sequence.prompt.tolist(), sequence.max_new_tokens)


def test_position_ids_follow_their_rows() -> None:
    step = step_of((1, 70), (1, 71), (40, 0), (50, 0), wanted=(0, 91))
    step = replace(step, position_ids=step.positions + 5 * step.tokens)
    batches = [batch for part in separate_prompts(step) for batch in split_microbatches(part, 24)]
    assert len(batches) > 2
    for batch in batches:
        assert batch.position_ids is not None
        np.testing.assert_array_equal(batch.position_ids, batch.positions + 5 * batch.tokens)


def test_draws_follow_their_rows() -> None:
    step = step_of((1, 70), (1, 71), (40, 0), (50, 0), wanted=(0, 1, 41, 91))
    step = replace(step, draws=RowDraws.of([Draw(7, 1.0, 40), None, Draw(8, 0.5, 3, 0.9, 0.1), Draw(9, 2.0, 64)]))
    found = {}
    for part in separate_prompts(step):
        for batch in split_microbatches(part, 24):
            assert batch.draws is not None
            seeds = batch.draws.seed * batch.draws.drawn
            found.update(zip(batch.tokens[batch.output_rows].tolist(), seeds.tolist(), strict=True))
            tops = dict(zip(batch.draws.seed.tolist(), batch.draws.top_k.tolist(), strict=True))
            assert tops.items() <= {0: 0, 7: 40, 8: 3, 9: 64}.items()
    outputs = step.tokens[step.output_rows].tolist()
    assert found == dict(zip(outputs, (7, 0, 8, 9), strict=True))


def test_masks_follow_their_rows() -> None:
    step = step_of((1, 70), (1, 71), (40, 0), (50, 0), wanted=(0, 1, 41, 91))
    words = np.arange(6, dtype=np.uint32).reshape(3, 2)
    step = replace(step, masks=MadeMasks(RowMasks(np.array([1, 2, 3], np.int32), words)))
    found = []
    for part in separate_prompts(step):
        for batch in split_microbatches(part, 24):
            if batch.masks is None:
                assert not len(batch.output_rows)
                continue
            masks = batch.masks.wait()
            found += [
                (int(batch.tokens[batch.output_rows[row]]), own.tolist())
                for row, own in zip(masks.rows.tolist(), masks.words, strict=True)
            ]
    assert found == [(1, [0, 1]), (41, [2, 3]), (91, [4, 5])]
    assert all(part.masks is None for part in separate_prompts(replace(step, masks=None)))
