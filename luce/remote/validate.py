"""What a server asks a daemon for is looked at before anything is done: kernels look at nothing twice."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from luce.errors import BackendError
from luce.ipc.messages import Load
from luce.models.spec import ModelSpec
from luce.ops.deltanet import RECURRENT_ROWS
from luce.remote.activation_codec import WIRES
from luce.runtime.step import PAGE, Span, Step


def load_layers(load: Load, devices: int, spec: ModelSpec) -> list[range]:
    """The layers of each device. Raises BackendError unless all that a load names exists, and its parts fit."""
    layers = [range(begin, end) for begin, end in load.layers]
    tiled = all(before.stop == after.start for before, after in pairwise(layers))
    if len(layers) != devices or not tiled or not all(layers) or layers[-1].stop > len(spec.layers):
        raise BackendError(f"layers {load.layers} for {devices} devices and a model of {len(spec.layers)} layers")
    if len(load.spare) != devices:
        raise BackendError(f"spare memory of {len(load.spare)} devices, there are {devices}")
    if (
        layers[0].start < 0
        or not 0 < load.slots <= 1 << 16
        or not 0 <= load.verify <= RECURRENT_ROWS
        or len(load.pages) != len(spec.page_groups)
    ):
        raise BackendError("a load whose parts do not fit the model")
    if sorted(set(load.captured)) != list(load.captured) or not set(load.captured) <= set(range(len(spec.layers))):
        raise BackendError(f"layers {load.captured} cannot be captured of {len(spec.layers)}")
    if load.wire not in WIRES or (load.shared and load.wire != "f32"):
        raise BackendError(f"activations as {load.wire!r}")
    if not all(0 < pages < 1 << 24 for pages in load.pages) or not 0 < load.rows <= 1 << 20:
        raise BackendError("a load whose parts do not fit the model")
    return layers


def check_step(step: Step, vocab: int, load: Load) -> None:
    """Raises BackendError unless all that a step refers to exists."""
    rows = len(step.tokens)
    shapes = [step.tokens.shape == step.positions.shape == (rows,), rows > 0, step.output_rows.ndim == 1]
    shapes += [step.needs_candidates is None or step.needs_candidates.shape == step.output_rows.shape]
    shapes += [step.needs_logits.shape == step.output_rows.shape, len(step.views) == len(load.pages)]
    at = 0
    root: Span | None = None
    for span in step.spans:
        shapes += [span.start == at, span.rows > 0, span.position >= 0, 0 <= span.slot < load.slots]
        shapes += [0 <= span.accepted <= load.verify, not span.speculative or span.rows <= load.verify]
        shapes += [span.position > 0 or not (span.accepted or span.speculative)]
        shapes += [not span.path or (len(span.path) == span.accepted and is_path(span.path, load.verify))]
        root = root if span.ancestors else span
        if span.ancestors:
            shapes.append(root is not None and _hangs_on(span, root, load.verify))
        at += span.rows
    if not all(shapes) or at != rows:
        raise BackendError("a step whose parts do not fit each other")
    inside = [within(step.tokens, vocab), within(step.output_rows, rows), bool((step.positions >= 0).all())]
    for view, pages in zip(step.views, load.pages, strict=True):
        spans, width = len(step.spans), view.table.shape[-1] if view.table.ndim == 2 else -1
        if view.table.shape != (spans, width) or view.first.shape != (spans, width):
            raise BackendError(f"a page table of {view.table.shape} for {spans} spans")
        if view.copies is not None:
            if view.copies.ndim != 2 or view.copies.shape[1] != 2:
                raise BackendError("a page table whose parts do not fit each other")
            some = view.copies[:, 0] >= 0
            inside += [within(view.copies[some], pages * PAGE), bool((view.copies[~some] == -1).all())]
        seen = view.seen is None or (view.seen.shape == (rows, 2) and all(span.rows <= 64 for span in step.spans))
        if view.count.shape != (spans,) or view.dest.shape != (rows,) or not seen:
            raise BackendError("a page table whose parts do not fit each other")
        inside += [within(view.table, pages), within(view.dest, pages * PAGE), within(view.count, width + 1)]
    if not all(inside):
        raise BackendError("a step refers to something that does not exist")


def is_path(rows: Sequence[int], most: int) -> bool:
    """Whether rows of a tree can be accepted: the first one, and others in order, all below `most`."""
    return len(rows) > 0 and rows[0] == 0 and rows[-1] < most and all(a < b for a, b in pairwise(rows))


def _hangs_on(span: Span, root: Span, most: int) -> bool:
    """Whether a branch belongs to the tree that begins with another span."""
    rows, first = [row - root.start for row in span.ancestors], span.start - root.start
    same = (
        span.slot == root.slot and span.position == root.position + len(rows) and span.speculative and root.speculative
    )
    return same and first + span.rows <= most and is_path([*rows, first], most)


def check_pages(load: Load, slot: int | None, pages: Sequence[Sequence[int]] | None = None) -> None:
    """Raises BackendError unless the slot and the pages of each group exist. None: there is no need of them."""
    if slot is not None and not 0 <= slot < load.slots:
        raise BackendError(f"slot {slot} is outside 0..{load.slots - 1}")
    if pages is None:
        return
    if len(pages) != len(load.pages):
        raise BackendError(f"pages of {len(pages)} groups, the model has {len(load.pages)}")
    for own, count in zip(pages, load.pages, strict=True):
        if not all(0 <= page < count for page in own):
            raise BackendError(f"a page is outside 0..{count - 1}")


def within(values: NDArray[np.int32], end: int) -> bool:
    """Whether all values are in 0..end - 1."""
    return not values.size or (int(values.min()) >= 0 and int(values.max()) < end)


def check_descriptor(fd: int, size: int) -> None:
    """Raises BackendError unless the memory of `fd` has `size` bytes for good.

    A file that shrinks would end this process when it looks at the memory.
    """
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if os.fstat(fd).st_size < size or not seals & fcntl.F_SEAL_SHRINK:
        raise BackendError("the shared memory is too small, or can become so")
