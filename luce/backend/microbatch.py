"""Cutting a step into replies and prompts, which run one after the other, and those into pieces that follow each other
through the shards. Pure."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from luce.ops.matmul import FEW_ROWS
from luce.runtime.step import PAGE, PageView, Span, Step

#: the fewest rows that a cut leaves of a span: more than kernels treat as single steps
_LEAST = FEW_ROWS + 1


def separate(step: Step) -> list[Step]:
    """The rows that go on with replies, and then the prompts that are read beside them, each by itself; those of few
    rows stay together as long as they are few.

    Products round more than FEW_ROWS rows in another way, and a library rounds them by their number: a reply, drafted
    or not, shall have the same bits whatever is read meanwhile, and so shall a prompt. Rows of more than FEW_ROWS
    replies have other bits by themselves.
    """
    if step.rows <= FEW_ROWS:
        return [step]
    begun = itertools.takewhile(lambda span: span.speculative or span.rows == 1, step.spans)
    replies = len({span.slot for span in begun})
    edges = [0]
    for number, (_, group) in enumerate(itertools.groupby(step.spans, lambda span: span.slot)):
        spans = list(group)
        begin, end = spans[0].start, spans[-1].start + spans[-1].rows
        most = max(FEW_ROWS, replies) if number < replies else FEW_ROWS
        if end - edges[-1] > most and begin > edges[-1]:
            edges.append(begin)
    return [step] if len(edges) == 1 else [_part(step, a, b) for a, b in itertools.pairwise([*edges, step.rows])]


def usual_piece(shards: int) -> int:
    """Rows of a piece when nothing else is asked for. More take fewer launches, fewer fill and drain the shards sooner.

    A 27B model on H200s, prompts of 8192 in pieces of 512, 683 and 1024: on two 15520, 15080 and 15790 tok/s, on four
    28200, 26570 and 26290.
    """
    return 1024 if shards <= 2 else 512


def largest_piece(rows: int) -> int:
    """Most rows of a piece when pieces of about `rows` are asked for."""
    return 3 * rows // 2 + 2 * PAGE


def cut(step: Step, rows: int) -> list[Step]:
    """The step in pieces of about `rows` rows, one after another; whole if it has less than one and a half times that.

    A span is cut after whole pages of its rows, where chunked kernels begin a chunk anyway, and keeps enough rows for
    them on the other side: no kernel that treats rows alike whatever their number gives them other bits.
    """
    count = max(1, (2 * step.rows + rows) // (2 * rows))
    cuts = [_near(step, step.rows * number // count) for number in range(1, count)]
    edges = sorted({0, *cuts, step.rows})
    return [step] if len(edges) == 2 else [_part(step, a, b) for a, b in itertools.pairwise(edges)]


def _near(step: Step, row: int) -> int:
    """The place at or before a row where the step may be cut."""
    span = next(s for s in step.spans if row < s.start + s.rows)
    if span.ancestors:
        # A tree stays together.
        return span.ancestors[0]
    offset = (row - span.start) // PAGE * PAGE
    if offset and span.rows - offset < _LEAST:
        offset -= PAGE
    return span.start + offset


def _part(step: Step, begin: int, end: int) -> Step:
    """Rows [begin, end) as a step."""
    picked = [i for i, s in enumerate(step.spans) if s.start < end and begin < s.start + s.rows]
    spans = tuple(_clip(step.spans[i], begin, end) for i in picked)
    of_part = (step.output_rows >= begin) & (step.output_rows < end)
    return Step.of_spans(
        spans,
        step.tokens[begin:end],
        tuple(_view(view, picked, spans, begin, end) for view in step.views),
        step.output_rows[of_part] - np.int32(begin),
        needs_logits=step.needs_logits[of_part],
        needs_candidates=False if step.needs_candidates is None else step.needs_candidates[of_part],
    )


def _clip(span: Span, begin: int, end: int) -> Span:
    first, last = max(span.start, begin), min(span.start + span.rows, end)
    if span.speculative:
        return replace(span, start=span.start - begin, ancestors=tuple(row - begin for row in span.ancestors))
    begins = first == span.start
    accepted, path = (span.accepted, span.path) if begins else (0, ())
    return Span(span.slot, first - begin, last - first, span.position + first - span.start, accepted, path=path)


def _view(view: PageView, picked: list[int], spans: tuple[Span, ...], begin: int, end: int) -> PageView:
    """The pages as the part's spans see them: none that begins behind their last row."""
    first, last = view.first[picked], np.array([s.position + s.rows for s in spans])
    known = np.arange(first.shape[1]) < view.count[picked, None]
    count = np.count_nonzero(known & (first < last[:, None]), axis=1).astype(np.int32)
    width = int(count.max(initial=0))
    return PageView(
        np.ascontiguousarray(view.table[picked, :width]),
        np.ascontiguousarray(first[:, :width]),
        count,
        view.dest[begin:end],
        # A span of which rows see others is too short to be cut.
        None if view.seen is None else view.seen[begin:end],
        # Those of other parts' branches come too early here, and again in time there.
        view.copies if any(span.ancestors for span in spans) else None,
    )
