"""Checks of requests in a daemon. Kernels do not check their arguments again."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from luce.errors import BackendError
from luce.models.spec import ModelSpec
from luce.ops.deltanet import RECURRENT_ROWS
from luce.remote.activation_codec import TYPES
from luce.remote.messages import Load
from luce.runtime.device import Device
from luce.runtime.draws import RowDraws
from luce.runtime.step import MAX_CANDIDATES, PAGE, PageView, Span, Step

#: most rows of a span whose page view says which keys each row sees
_SEEN_ROWS = 64


def load_devices(load: Load, devices: Sequence[Device]) -> Sequence[Device]:
    """The devices that get layers, in their order. Raises BackendError for devices that do not exist."""
    numbers = load.devices or tuple(range(len(devices)))
    if len(set(numbers)) != len(numbers) or not set(numbers) <= set(range(len(devices))):
        raise BackendError(f"layers for devices {load.devices} of {len(devices)}")
    return [devices[number] for number in numbers]


def load_layers(load: Load, devices: int, spec: ModelSpec) -> list[range]:
    """The layers of each device. Raises BackendError unless the load suits the model and the devices."""
    layers = [range(begin, end) for begin, end in load.layers]
    contiguous = all(before.stop == after.start for before, after in pairwise(layers))
    if len(layers) != devices or not contiguous or not all(layers) or layers[-1].stop > len(spec.layers):
        raise BackendError(f"layers {load.layers} for {devices} devices and a model of {len(spec.layers)} layers")
    if len(load.unpack_bytes) != devices:
        raise BackendError(f"unpack_bytes for {len(load.unpack_bytes)} devices, but there are {devices}")
    if (
        layers[0].start < 0
        or not 0 < load.slots <= 1 << 16
        or not 0 <= load.verify_rows <= RECURRENT_ROWS
        or len(load.pages) != len(spec.page_groups)
        or not all(0 < pages < 1 << 24 for pages in load.pages)
        or not 0 < load.rows <= 1 << 20
    ):
        raise BackendError("the fields of the load do not fit the model")
    if sorted(set(load.captured)) != list(load.captured) or not set(load.captured) <= set(range(len(spec.layers))):
        raise BackendError(f"layers {load.captured} of {len(spec.layers)} cannot be captured")
    places = zip(load.offloaded, layers, strict=False)
    if len(load.offloaded) not in (0, devices) or not all(_are_mixtures(own, part, spec) for own, part in places):
        raise BackendError(f"no experts of layers {load.offloaded} can lie on the CPU")
    if load.activations not in TYPES or (load.shared and load.activations != "f32"):
        raise BackendError(f"activations as {load.activations!r}")
    if load.prompt_precision not in ("fp16", "int8"):
        raise BackendError(f"prompts in {load.prompt_precision!r}")
    return layers


def _are_mixtures(offloaded: Sequence[int], layers: range, spec: ModelSpec) -> bool:
    """Whether these are layers of a device, ascending, that have experts."""
    ascending = all(a < b for a, b in pairwise(offloaded))
    return ascending and all(layer in layers and spec.mixture(layer) is not None for layer in offloaded)


def check_step(step: Step, vocab: int, load: Load) -> None:
    """Raises BackendError unless the arrays of a step fit each other, and their tokens, rows and pages exist."""
    if not (_arrays_fit(step, load) and _spans_fit(step, load)):
        raise BackendError("the fields of the step do not fit each other")
    inside = within(step.tokens, vocab) and within(step.output_rows, len(step.tokens))
    ids = step.positions if step.position_ids is None else step.position_ids
    inside = inside and bool((step.positions >= 0).all() and (ids >= 0).all())
    for view, pages in zip(step.views, load.pages, strict=True):
        _check_view_shapes(view, step)
        inside = inside and _is_inside(view, pages)
    if not inside:
        raise BackendError("the step refers to a token, a row or a page that does not exist")


def _arrays_fit(step: Step, load: Load) -> bool:
    """Whether the arrays of a step have the shapes that belong together."""
    rows = len(step.tokens)
    return (
        step.tokens.shape == step.positions.shape == (rows,)
        and (step.position_ids is None or step.position_ids.shape == (rows,))
        and rows > 0
        and step.output_rows.ndim == 1
        and (step.needs_candidates is None or step.needs_candidates.shape == step.output_rows.shape)
        and (step.draws is None or _draws_fit(step.draws, len(step.output_rows)))
        and step.needs_logits.shape == step.output_rows.shape
        and len(step.views) == len(load.pages)
    )


def _draws_fit(draws: RowDraws, rows: int) -> bool:
    """Whether the tokens of so many output rows can be drawn so from their candidates."""
    if any(getattr(draws, field.name).shape != (rows,) for field in fields(draws)):
        return False
    own = draws[draws.drawn]
    within_one = (own.top_p > 0) & (own.top_p <= 1) & (own.min_p >= 0) & (own.min_p <= 1)
    few = (own.top_k > 0) & (own.top_k <= MAX_CANDIDATES)
    return bool((draws.temperature >= 0).all() and (within_one & few & np.isfinite(own.temperature)).all())


def _spans_fit(step: Step, load: Load) -> bool:
    """Whether the spans divide the rows of a step among them, and the branches of trees follow their roots."""
    at = 0
    root: Span | None = None
    for span in step.spans:
        if span.start != at or not _is_span(span, load):
            return False
        if not span.ancestors:
            root = span
        elif root is None or not _is_branch(span, root, load.verify_rows):
            return False
        at += span.rows
    return at == len(step.tokens)


def _is_span(span: Span, load: Load) -> bool:
    """Whether the fields of a span fit each other and the load."""
    return (
        span.rows > 0
        and span.position >= 0
        and 0 <= span.slot < load.slots
        and 0 <= span.accepted <= load.verify_rows
        and (not span.speculative or span.rows <= load.verify_rows)
        and (span.position > 0 or not (span.accepted or span.speculative))
        and (not span.path or (len(span.path) == span.accepted and is_path(span.path, load.verify_rows)))
    )


def is_path(rows: Sequence[int], most: int) -> bool:
    """Whether rows of a tree can be accepted: the first one, and later ones in ascending order, all below `most`."""
    return len(rows) > 0 and rows[0] == 0 and rows[-1] < most and all(a < b for a, b in pairwise(rows))


def _is_branch(span: Span, root: Span, most: int) -> bool:
    """Whether a span is a branch of the tree that begins with the span `root`."""
    rows, first = [row - root.start for row in span.ancestors], span.start - root.start
    same = (
        span.slot == root.slot and span.position == root.position + len(rows) and span.speculative and root.speculative
    )
    return same and first + span.rows <= most and is_path([*rows, first], most)


def _check_view_shapes(view: PageView, step: Step) -> None:
    """Raises BackendError unless the arrays of a page view fit each other and the step."""
    rows, spans = len(step.tokens), len(step.spans)
    width = view.table.shape[-1] if view.table.ndim == 2 else -1
    if view.table.shape != (spans, width) or view.first.shape != (spans, width):
        raise BackendError(f"a page table of {view.table.shape} for {spans} spans")
    copies = view.copies is None or (view.copies.ndim == 2 and view.copies.shape[1] == 2)
    seen = view.seen is None or (view.seen.shape == (rows, 2) and all(span.rows <= _SEEN_ROWS for span in step.spans))
    if view.count.shape != (spans,) or view.dest.shape != (rows,) or not copies or not seen:
        raise BackendError("the arrays of the page table do not fit each other")


def _is_inside(view: PageView, pages: int) -> bool:
    """Whether the pages and rows that a page view refers to exist, in a group of so many pages."""
    inside = within(view.table, pages) and within(view.dest, pages * PAGE)
    inside = inside and within(view.count, view.table.shape[1] + 1)
    if view.copies is None:
        return inside
    copied = view.copies[:, 0] >= 0
    unused = bool((view.copies[~copied] == -1).all())
    return inside and within(view.copies[copied], pages * PAGE) and unused


def check_pages(load: Load, slot: int | None, pages: Sequence[Sequence[int]] | None = None) -> None:
    """Raises BackendError unless the slot and the pages of each group exist. None: the request has none."""
    if slot is not None and not 0 <= slot < load.slots:
        raise BackendError(f"slot {slot} is outside 0..{load.slots - 1}")
    if pages is None:
        return
    if len(pages) != len(load.pages):
        raise BackendError(f"pages of {len(pages)} groups, but the model has {len(load.pages)}")
    for own, count in zip(pages, load.pages, strict=True):
        if not all(0 <= page < count for page in own):
            raise BackendError(f"a page is outside 0..{count - 1}")


def within(values: NDArray[np.int32], end: int) -> bool:
    """Whether all values are in 0..end - 1."""
    return not values.size or (int(values.min()) >= 0 and int(values.max()) < end)


def check_descriptor(fd: int, size: int) -> None:
    """Raises BackendError unless the file of `fd` has `size` bytes and cannot shrink.

    An access beyond the end of a file that shrank would end this process.
    """
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if os.fstat(fd).st_size < size or not seals & fcntl.F_SEAL_SHRINK:
        raise BackendError("the shared memory is too small, or can shrink")
