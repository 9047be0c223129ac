"""What a daemon refuses of trees: kernels look at nothing twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from luce.engine import draft_tree
from luce.errors import BackendError
from luce.remote.messages import Load
from luce.remote.validate import check_step, is_path
from luce.runtime.step import PAGE, PageView, Span, Step

LOAD = Load(
    path="",
    fingerprint="",
    layers=((0, 4),),
    pages=(9,),
    slots=2,
    kv=("auto", "auto"),
    verify=8,
    captured=(),
    ranked=False,
    spare=(0,),
    rows=64,
    peer=True,
    arena=0,
    shared=False,
    activations="f32",
)


def step(**changes: Any) -> Step:
    """A tree of five rows: 0-1-2, and 3-4 behind 1."""
    spans = draft_tree.spans((0, 1, 1, 3), Span(1, 0, 5, 7, 2, path=(0, 3)))
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
def test_what_is_no_tree(changes: dict[str, Any]) -> None:
    with pytest.raises(BackendError):
        check_step(step(**changes), 10, LOAD)


def test_paths() -> None:
    assert is_path((0,), 1) and is_path((0, 2, 7), 8)
    assert not any(is_path(rows, 8) for rows in ((), (1,), (0, 8), (0, 3, 3), (0, 3, 2), (-1, 0)))
