"""A daemon refuses invalid steps; kernels do not check them again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from luce.engine import draft_tree
from luce.errors import BackendError
from luce.remote.messages import Load
from luce.remote.validate import check_step, is_path, load_layers
from luce.runtime.draws import Draw, RowDraws
from luce.runtime.step import PAGE, PageView, Span, Step
from tests.support.reference import Reference

LOAD = Load(
    path="",
    fingerprint="",
    layers=((0, 4),),
    pages=(9,),
    slots=2,
    kv=("auto", "auto"),
    verify_rows=8,
    captured=(),
    rank_pages=False,
    unpack_bytes=(0,),
    rows=64,
    peer=True,
    arena=0,
    shared=False,
    activations="f32",
)


def step(**changes: Any) -> Step:
    """A tree of five rows: 0-1-2, and 3-4 behind 1."""
    spans = draft_tree.tree_spans((0, 1, 1, 3), Span(1, 0, 5, 7, 2, path=(0, 3)))
    ones = np.zeros((2, 1), np.int32)
    copies = np.array([[1, 70], [-1, -1]], np.int32)
    view = PageView(ones, ones, np.ones(2, np.int32), np.arange(5, dtype=np.int32), copies=copies)
    views = (replace(view, **changes.pop("view", {})),)
    made = Step.of_spans(spans, [0] * 5, views, range(5))
    root, branch = made.spans
    root, branch = replace(root, **changes.get("root", {})), replace(branch, **changes.get("branch", {}))
    return replace(made, spans=(root, branch))


def test_a_tree() -> None:
    check_step(step(), 10, LOAD)


@pytest.mark.parametrize(
    "changes",
    [
        {"branch": {"ancestors": (1,)}},
        {"branch": {"ancestors": (0, 0)}},
        {"branch": {"ancestors": (0, 3)}},
        {"branch": {"ancestors": (0, 1, 2)}},
        {"branch": {"ancestors": (0, -1)}},
        {"branch": {"slot": 0}},
        {"branch": {"position": 8}},
        {"branch": {"speculative": False}},
        {"root": {"speculative": False}},
        {"root": {"path": (0,)}},
        {"root": {"path": (1, 3)}},
        {"root": {"path": (0, 0)}},
        {"root": {"path": (0, 8)}},
        {"root": {"ancestors": (0,)}},
        {"view": {"copies": np.zeros((2, 3), np.int32)}},
        {"view": {"copies": np.array([[1, 9 * PAGE]], np.int32)}},
        {"view": {"copies": np.array([[9 * PAGE, 1]], np.int32)}},
        {"view": {"copies": np.array([[1, -1]], np.int32)}},
        {"view": {"copies": np.array([[-2, -1]], np.int32)}},
    ],
)
def test_invalid_trees(changes: dict[str, Any]) -> None:
    with pytest.raises(BackendError):
        check_step(step(**changes), 10, LOAD)


def test_paths() -> None:
    assert is_path((0,), 1) and is_path((0, 2, 7), 8)
    assert not any(is_path(rows, 8) for rows in ((), (1,), (0, 8), (0, 3, 3), (0, 3, 2), (-1, 0)))


def plain(span: Span, rows: int, **changes: Any) -> Step:
    """A step of one span on page 3, which is not checked yet."""
    ones, wanted = np.ones((1, 1), np.int32), np.array([rows - 1], np.int32)
    dest = np.arange(3 * PAGE, 3 * PAGE + rows, dtype=np.int32)
    view = PageView(3 * ones, 0 * ones, np.ones(1, np.int32), dest)
    made = Step(
        tokens=np.arange(rows, dtype=np.int32),
        positions=np.arange(rows, dtype=np.int32),
        spans=(span,),
        views=(replace(view, **changes.pop("view", {})),),
        output_rows=wanted,
        needs_logits=np.ones(1, np.bool_),
    )
    return replace(made, **changes)


def draws(rows: int = 1, **changes: Any) -> RowDraws:
    """How an output row is drawn."""
    return RowDraws.of([replace(Draw(2**64 - 1, 0.7, 64, 0.9, 0.1), **changes)] * rows)


def ints(*values: Any) -> Any:
    return np.array(values, np.int32)


NONE = ints()
MISFIT, TABLE, MISSING = "fields of the step do not fit", "page table", "does not exist"
SPAN = Span(1, 0, 3, 64)


@pytest.mark.parametrize("span", [SPAN, Span(0, 0, 3, 0), Span(1, 0, 3, 7, 2), Span(1, 0, 3, 7, speculative=True)])
def test_a_span(span: Span) -> None:
    check_step(plain(span, 3), 70, LOAD)


@pytest.mark.parametrize(
    "span",
    [
        replace(SPAN, start=1),
        replace(SPAN, rows=2),
        replace(SPAN, rows=0),
        replace(SPAN, rows=-3),
        replace(SPAN, position=-1),
        replace(SPAN, slot=2),
        replace(SPAN, slot=-1),
        replace(SPAN, accepted=9),
        replace(SPAN, accepted=-1),
        replace(SPAN, position=0, accepted=1),
        replace(SPAN, position=0, speculative=True),
        replace(SPAN, ancestors=(0,)),
    ],
    ids=str,
)
def test_invalid_spans(span: Span) -> None:
    with pytest.raises(BackendError, match=MISFIT):
        check_step(plain(span, 3), 70, LOAD)


def test_more_speculative_rows_than_the_load_allows() -> None:
    check_step(plain(replace(SPAN, rows=8, speculative=True), 8), 70, LOAD)
    with pytest.raises(BackendError, match=MISFIT):
        check_step(plain(replace(SPAN, rows=9, speculative=True), 9), 70, LOAD)


def test_rows_that_are_drawn_and_others() -> None:
    for own in (Draw(2**64 - 1, 1e-30, 1, 1e-9, 1.0), Draw(0, 1e30, 64), None):
        check_step(plain(SPAN, 3, draws=RowDraws.of([own])), 70, LOAD)


def test_a_span_without_rows_beside_another() -> None:
    empty = plain(SPAN, 3, spans=(SPAN, replace(SPAN, slot=0, start=3, rows=0)))
    with pytest.raises(BackendError, match=MISFIT):
        check_step(empty, 70, LOAD)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tokens": NONE, "positions": NONE, "spans": ()}, MISFIT),
        ({"tokens": ints([0, 1, 2])}, MISFIT),
        ({"positions": ints(0, 1)}, MISFIT),
        ({"position_ids": ints(0, 1)}, MISFIT),
        ({"output_rows": ints([2]), "needs_logits": np.ones((1, 1), np.bool_)}, MISFIT),
        ({"needs_logits": np.ones(2, np.bool_)}, MISFIT),
        ({"needs_candidates": np.ones(2, np.bool_)}, MISFIT),
        ({"draws": draws(rows=2)}, MISFIT),
        ({"draws": draws(top_k=0)}, MISFIT),
        ({"draws": draws(top_k=65)}, MISFIT),
        ({"draws": draws(temperature=-1.0)}, MISFIT),
        ({"draws": draws(temperature=np.inf)}, MISFIT),
        ({"draws": draws(temperature=np.nan)}, MISFIT),
        ({"draws": draws(top_p=0.0)}, MISFIT),
        ({"draws": draws(top_p=1.1)}, MISFIT),
        ({"draws": draws(top_p=np.nan)}, MISFIT),
        ({"draws": draws(min_p=-0.1)}, MISFIT),
        ({"draws": draws(min_p=1.1)}, MISFIT),
        ({"draws": replace(draws(), seed=np.zeros((1, 1), np.uint64))}, MISFIT),
        ({"views": ()}, MISFIT),
        ({"view": {"table": ints([3], [3])}}, TABLE),
        ({"view": {"table": ints(3)}}, TABLE),
        ({"view": {"first": ints([0, 0])}}, TABLE),
        ({"view": {"count": ints(1, 1)}}, TABLE),
        ({"view": {"dest": ints(0, 1)}}, TABLE),
        ({"view": {"seen": np.zeros((3, 1), np.int32)}}, TABLE),
        ({"tokens": ints(0, 1, 70)}, MISSING),
        ({"tokens": ints(0, 1, -1)}, MISSING),
        ({"positions": ints(0, 1, -1)}, MISSING),
        ({"position_ids": ints(0, 1, -1)}, MISSING),
        ({"output_rows": ints(3)}, MISSING),
        ({"view": {"table": ints([9])}}, MISSING),
        ({"view": {"count": ints(2)}}, MISSING),
        ({"view": {"dest": ints(0, 1, 9 * PAGE)}}, MISSING),
    ],
    ids=str,
)
def test_invalid_arrays(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(BackendError, match=why):
        check_step(plain(SPAN, 3, **changes), 70, LOAD)


@pytest.mark.parametrize("rows", [64, 65])
def test_seen_rows_of_a_long_span(rows: int) -> None:
    step = plain(replace(SPAN, rows=rows), rows, view={"seen": np.zeros((rows, 2), np.int32)})
    if rows == 64:
        check_step(step, 70, LOAD)
        return
    with pytest.raises(BackendError, match=TABLE):
        check_step(step, 70, LOAD)


@pytest.mark.parametrize(
    ("name", "offloaded", "fits"),
    [
        ("qwen35moe-a-F32", (), True),
        ("qwen35moe-a-F32", ((0, 1), ()), True),
        ("qwen35moe-a-F32", ((1,), (2, 3)), True),
        ("qwen35moe-a-F32", ((1,),), False),
        ("qwen35moe-a-F32", ((1,), (2,), (3,)), False),
        ("qwen35moe-a-F32", ((2,), ()), False),
        ("qwen35moe-a-F32", ((), (99,)), False),
        ("qwen35moe-a-F32", ((-1,), ()), False),
        ("qwen35moe-a-F32", ((1, 0), ()), False),
        ("qwen35moe-a-F32", ((1, 1), ()), False),
        ("qwen35-a-F32", ((1,), ()), False),
    ],
)
def test_layers_whose_experts_lie_on_the_cpu(name: str, offloaded: tuple[tuple[int, ...], ...], fits: bool) -> None:
    spec = Reference(name).spec
    load = msgspec.structs.replace(
        LOAD,
        layers=((0, 2), (2, len(spec.layers))),
        pages=(9,) * len(spec.page_groups),
        unpack_bytes=(0, 0),
        offloaded=offloaded,
    )
    if fits:
        assert load_layers(load, 2, spec) == [range(2), range(2, len(spec.layers))]
        return
    with pytest.raises(BackendError, match="no experts of layers"):
        load_layers(load, 2, spec)
