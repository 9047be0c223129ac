"""Splits a step into replies and prompts, which run one after the other, and these into microbatches for the pipeline.

Pure.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from luce.ops.matmul import FEW_ROWS, MANY_ROWS
from luce.runtime.step import PAGE, PageView, Span, Step

#: most rows of prompts that share a step where shards follow each other, so that all of them work: by the times of its
#: kernels on an H200, a 27B model on two of them would take 155, 125, 118, 118 ms for 800 rows in 1, 2, 3, 4 steps
PIPELINED_ROWS = 2 * MANY_ROWS
# The fewest rows of a span on either side of a cut: more rows than kernels treat as single steps.
_MIN_SPAN_ROWS = FEW_ROWS + 1


def separate_prompts(step: Step, invariant_rows: int = FEW_ROWS, shared_rows: int = 0) -> list[Step]:
    """The step as several steps: the rows that continue replies, and then each prompt in a step of its own.

    Up to `invariant_rows` rows of replies and drafts have the bits of one and share a step. So do prompts of up to
    FEW_ROWS rows in all, and prompts of FEW_ROWS + 1 to MANY_ROWS rows each, of up to `shared_rows` rows and FEW_ROWS
    output rows in all.

    Products of more than FEW_ROWS rows round in another way, and a BLAS library's rounding depends on their number. So
    a reply, drafted or not, and a prompt have the same bits whatever other prompts are in the step. More than FEW_ROWS
    replies have the bits of one only where their products add up like those of one (luce.ops.matmul).
    """
    if step.rows <= FEW_ROWS or len({span.slot for span in step.spans}) == step.rows:
        # A row of each sequence continues its reply.
        return [step]
    begun = itertools.takewhile(lambda span: span.speculative or span.rows == 1, step.spans)
    replies = len({span.slot for span in begun})
    edges = [0]
    before = 0  # rows of the sequence before
    for number, (_, group) in enumerate(itertools.groupby(step.spans, lambda span: span.slot)):
        spans = list(group)
        begin, end = spans[0].start, spans[-1].start + spans[-1].rows
        most = max(FEW_ROWS, invariant_rows, replies) if number < replies else FEW_ROWS
        if number > replies and _is_short(before) and _is_short(end - begin):
            outputs = np.count_nonzero((step.output_rows >= edges[-1]) & (step.output_rows < end))
            most = shared_rows if outputs <= FEW_ROWS else 0
        if end - edges[-1] > most and begin > edges[-1]:
            edges.append(begin)
        before = end - begin
    return [step] if len(edges) == 1 else [_part(step, a, b) for a, b in itertools.pairwise([*edges, step.rows])]


def _is_short(rows: int) -> bool:
    """Whether a prompt of so many rows may share a step with others that are alike."""
    return FEW_ROWS < rows <= MANY_ROWS


def default_microbatch_rows(shards: int) -> int:
    """The default rows of a microbatch. More rows take fewer launches; fewer rows fill and drain the pipeline sooner.

    Measured with a 27B model and prompts of 8192 tokens, in microbatches of 512, 683 and 1024 rows: 18900, 18350 and
    19190 tok/s on two H200s, by an earlier build 28200, 26570 and 26290 tok/s on four.
    """
    return 1024 if shards <= 2 else 512


def max_microbatch_rows(rows: int) -> int:
    """The most rows of a microbatch of `split_microbatches(step, rows)`."""
    return 3 * rows // 2 + 2 * PAGE


def split_microbatches(step: Step, rows: int) -> list[Step]:
    """The step as microbatches of about `rows` rows; one microbatch if it has fewer than 1.5 * `rows`.

    A span is cut after whole pages of its rows, where chunked kernels begin a chunk anyway, and keeps at least
    _MIN_SPAN_ROWS rows after the cut. So kernels whose bits do not depend on the number of rows give the same bits.
    """
    count = max(1, (2 * step.rows + rows) // (2 * rows))
    cuts = [_near(step, step.rows * number // count) for number in range(1, count)]
    edges = sorted({0, *cuts, step.rows})
    return [step] if len(edges) == 2 else [_part(step, a, b) for a, b in itertools.pairwise(edges)]


def _near(step: Step, row: int) -> int:
    """The last row at or before `row` where the step may be cut."""
    span = next(s for s in step.spans if row < s.start + s.rows)
    if span.ancestors:
        # A draft tree stays in one microbatch.
        return span.ancestors[0]
    offset = (row - span.start) // PAGE * PAGE
    if offset and span.rows - offset < _MIN_SPAN_ROWS:
        offset -= PAGE
    return span.start + offset


def _part(step: Step, begin: int, end: int) -> Step:
    """Rows [begin, end) of the step as a step."""
    picked = [i for i, s in enumerate(step.spans) if s.start < end and begin < s.start + s.rows]
    spans = tuple(_clip(step.spans[i], begin, end) for i in picked)
    of_part = (step.output_rows >= begin) & (step.output_rows < end)
    part = Step.of_spans(
        spans,
        step.tokens[begin:end],
        tuple(_view(view, picked, spans, begin, end) for view in step.views),
        step.output_rows[of_part] - np.int32(begin),
        needs_logits=step.needs_logits[of_part],
        needs_candidates=False if step.needs_candidates is None else step.needs_candidates[of_part],
    )
    ids = None if step.position_ids is None else step.position_ids[begin:end]
    masks = None if step.masks is None or not of_part.any() else step.masks.part(of_part)
    draws = None if step.draws is None else step.draws[of_part]
    if ids is None and masks is None and draws is None:
        return part
    return replace(part, position_ids=ids, draws=draws, masks=masks)


def _clip(span: Span, begin: int, end: int) -> Span:
    first, last = max(span.start, begin), min(span.start + span.rows, end)
    if span.speculative:
        return replace(span, start=span.start - begin, ancestors=tuple(row - begin for row in span.ancestors))
    begins = first == span.start
    accepted, path = (span.accepted, span.path) if begins else (0, ())
    return Span(span.slot, first - begin, last - first, span.position + first - span.start, accepted, path=path)


def _view(view: PageView, picked: list[int], spans: tuple[Span, ...], begin: int, end: int) -> PageView:
    """The pages that the part's spans see: pages that begin at or before a span's last row."""
    first, last = view.first[picked], np.array([s.position + s.rows for s in spans])
    known = np.arange(first.shape[1]) < view.count[picked, None]
    count = np.count_nonzero(known & (first < last[:, None]), axis=1).astype(np.int32)
    width = int(count.max(initial=0))
    return PageView(
        np.ascontiguousarray(view.table[picked, :width]),
        np.ascontiguousarray(first[:, :width]),
        count,
        view.dest[begin:end],
        # A span with a mask of seen rows is too short to be cut.
        None if view.seen is None else view.seen[begin:end],
        # Copies for branches in other parts are made here too, and again by those parts.
        view.copies if any(span.ancestors for span in spans) else None,
    )
