"""Checks of the mixture-of-experts ops on any device, against float64 formulas and definitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.errors import DeviceError
from luce.models.spec import ExpertGroups, Gating
from luce.ops.matmul import FEW_ROWS, matmul
from luce.ops.moe import (
    Routing,
    RoutingOptions,
    add_expert_bias,
    add_shared,
    combine,
    expert_matmul,
    group,
    route,
)
from luce.ops.moe_int8 import expert_mlp, expert_weights
from luce.ops.moe_router import norm_route, row_router
from luce.ops.moe_rows import expert_mlp_rows
from luce.ops.norm import Unnormed, quantised_rms_norm
from luce.ops.quantise import quantise
from luce.ops.weight import RawTensor, Weight, WeightPart, upload_experts, upload_weight
from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Array, Device
from tests.support.op_checks_matmul import product_limit, rounds_to_fp16
from tests.support.quant_blocks import decoded, random_tensor
from tests.support.quantised import group_for, quantised, seen

Floats = NDArray[np.float32]
#: how each family routes; bare probabilities; everything at once, with negative scores. A bias is drawn from a few
#: values, so that equal logits can still tie
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen35moe": {"gating": "softmax", "normalise": True, "scale": 1.0},
    "gemma4": {"gating": "softmax", "normalise": True, "scale": 1.0, "expert_scale": True},
    "laguna": {"gating": "sigmoid", "normalise": True, "scale": 2.5, "bias": (-0.5, 0, 0.25)},
    "bare": {"gating": "softmax", "normalise": False, "scale": 0.75},
    "all": {"gating": "sigmoid", "normalise": False, "scale": 3.0, "bias": (-2, -1.5, -1.25), "expert_scale": True},
}


def probabilities(logits: NDArray[Any], gating: Gating) -> NDArray[np.float64]:
    """p of the router's formulas in float64."""
    wide = logits.astype(np.float64)
    if gating == "sigmoid":
        # Either form alone overflows on one side.
        small = np.exp(-np.abs(wide))
        return np.where(wide >= 0, 1, small) / (1 + small)
    powers = np.exp(wide - wide.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _route(device: Device, logits: Floats, top_k: int, family: str, seed: int = 0) -> tuple[Routing, dict[str, Any]]:
    """The downloaded routing, and its arguments with the arrays that FAMILIES names."""
    rng = np.random.default_rng(seed)
    experts = logits.shape[1]
    asked = {"bias": None, "expert_scale": None} | FAMILIES[family]
    if asked["bias"]:
        asked["bias"] = rng.choice(np.array(asked["bias"], np.float32), experts)
    if asked["expert_scale"]:
        asked["expert_scale"] = rng.uniform(0.5, 2, experts).astype(np.float32)
    given = {name: device.upload(v) if isinstance(v, np.ndarray) else v for name, v in asked.items()}
    routing = route(device, device.upload(logits), RoutingOptions(top_k, **given))
    return Routing(device.download(routing.ids), device.download(routing.weights), None), asked


def check_route(device: Device, logits: Floats, top_k: int, family: str) -> None:
    """The chosen are the best by the float64 formula, but for rounding, in descending order; so are their weights."""
    n, experts = logits.shape
    routing, asked = _route(device, logits, top_k, family)
    ids, weights = routing.ids, routing.weights
    assert (ids.dtype, weights.dtype) == (np.int32, np.float32)
    assert ids.shape == weights.shape == (n, top_k)
    assert ((ids >= 0) & (ids < experts)).all()
    assert all(len(set(row)) == top_k for row in ids.tolist())
    p = probabilities(logits, asked["gating"])
    score = p if asked["bias"] is None else p + asked["bias"]
    chosen = np.take_along_axis(score, ids, axis=1)
    assert (np.diff(chosen, axis=1) <= 1e-6).all()
    rest = score.copy()
    np.put_along_axis(rest, ids, -np.inf, axis=1)
    assert (rest.max(axis=1) <= chosen[:, -1] + 1e-6).all()
    expected = np.take_along_axis(p, ids, axis=1)
    if asked["normalise"]:
        expected /= expected.sum(axis=1, keepdims=True)
    expected *= asked["scale"]
    if asked["expert_scale"] is not None:
        expected *= asked["expert_scale"][ids]
    np.testing.assert_allclose(weights, expected, rtol=4e-6, atol=1e-30)


def check_random_routes(device: Device, experts: int, top_k: int, family: str, rows: int = 5) -> None:
    """Rows of ordinary logits, wide ones whose tail underflows, and logits that differ in their last bits only."""
    rng = np.random.default_rng(experts + top_k)
    ordinary = rng.standard_normal((rows, experts))
    wide = rng.uniform(-300, 300, (1, experts))
    close = 1 + rng.integers(0, 3, (2, experts)) * 2.0**-23
    check_route(device, np.concatenate([ordinary, wide, close]).astype(np.float32), top_k, family)


def check_ties(device: Device, experts: int, top_k: int, family: str) -> None:
    """With many equal scores the chosen are exactly the first by (score descending, number ascending)."""
    rng = np.random.default_rng(experts)
    logits = rng.integers(0, 3, (6, experts)).astype(np.float32)
    logits[0] = 0
    logits[1] = -80  # a sigmoid that a bias swallows
    routing, asked = _route(device, logits, top_k, family)
    bias = np.zeros(experts) if asked["bias"] is None else asked["bias"]
    score = probabilities(logits, asked["gating"]) + bias
    for ids, row in zip(routing.ids.tolist(), score.tolist(), strict=True):
        best = sorted((-value, expert) for expert, value in enumerate(row))[:top_k]
        assert ids == [expert for _, expert in best]


def check_nan(device: Device, experts: int, top_k: int) -> None:
    """NaN is chosen last, makes no number appear twice, and stays in its row."""
    logits = np.random.default_rng(1).standard_normal((4, experts)).astype(np.float32)
    clean, _ = _route(device, logits, top_k, "laguna")
    spoiled = logits.copy()
    spoiled[1] = np.nan
    spoiled[2, clean.ids[2, 0]] = np.nan
    routing, _ = _route(device, spoiled, top_k, "laguna")
    for row in (0, 3):
        np.testing.assert_array_equal(routing.ids[row], clean.ids[row])
        np.testing.assert_array_equal(routing.weights[row], clean.weights[row])
    np.testing.assert_array_equal(routing.ids[1], np.arange(top_k))
    assert np.isnan(routing.weights[1]).all()
    np.testing.assert_array_equal(routing.ids[2, : top_k - 1], clean.ids[2, 1:])
    assert clean.ids[2, 0] not in routing.ids[2]
    soft, _ = _route(device, spoiled, top_k, "qwen35moe")
    np.testing.assert_array_equal(soft.ids[2], np.arange(top_k))


def check_route_neighbours(device: Device, experts: int, top_k: int, family: str, rows: int) -> None:
    """A row's experts and weights have the same bits alone and in a batch, in a matrix of its own and in a slice."""
    wide = np.random.default_rng(3).standard_normal((rows, experts + 5)).astype(np.float32)
    logits = wide[:, 2 : 2 + experts]
    whole, asked = _route(device, logits.copy(), top_k, family)
    for row in range(rows):
        alone, _ = _route(device, logits[row : row + 1].copy(), top_k, family)
        np.testing.assert_array_equal(alone.ids[0], whole.ids[row])
        np.testing.assert_array_equal(alone.weights[0], whole.weights[row])
    given = {name: device.upload(v) if isinstance(v, np.ndarray) else v for name, v in asked.items()}
    sliced = route(device, device.upload(wide)[:, 2 : 2 + experts], RoutingOptions(top_k, **given))
    np.testing.assert_array_equal(device.download(sliced.ids), whole.ids)
    np.testing.assert_array_equal(device.download(sliced.weights), whole.weights)


#: score of a group, used groups of how many, experts, chosen, whether there is a bias
GROUPED: tuple[tuple[Literal["best", "two best"], int, int, int, int, bool], ...] = (
    ("two best", 2, 4, 8, 2, True),
    ("two best", 4, 8, 256, 8, True),
    ("best", 3, 8, 160, 6, False),
    ("best", 1, 3, 6, 2, False),
    ("two best", 32, 32, 64, 16, True),
)


def check_grouped(
    device: Device,
    score: Literal["best", "two best"],
    used: int,
    count: int,
    experts: int,
    top_k: int,
    rows: int,
    *,
    biased: bool,
) -> None:
    """The chosen are the best ones within the best groups, by a loop over groups and experts in float64; ties of groups
    go to the lowest number."""
    rng = np.random.default_rng(experts)
    # Sigmoids that differ by more than float32 rounds.
    logits = (rng.permuted(np.tile(np.arange(experts), (rows, 1)), axis=1) / experts * 8 - 4).astype(np.float32)
    logits[-1] = 0
    bias = (rng.choice([-0.5, 0, 0.25, 0.5], experts)).astype(np.float32) if biased else None
    own = None if bias is None else device.upload(bias)
    options = RoutingOptions(top_k, "sigmoid", own, scale=2.5, groups=ExpertGroups(count, used, score))
    routing = route(device, device.upload(logits), options)
    ids, weights = device.download(routing.ids), device.download(routing.weights)
    for row, p in enumerate(probabilities(logits, "sigmoid")):
        values = p if bias is None else p + bias
        runs = values.reshape(count, -1)
        totals = [sum(sorted(run.tolist())[-2 if score == "two best" else -1 :]) for run in runs]
        open_groups = sorted(range(count), key=lambda group: (-round(totals[group], 6), group))[:used]
        size = experts // count
        allowed = [expert for expert in range(experts) if expert // size in open_groups]
        best = sorted(allowed, key=lambda expert: (-round(float(values[expert]), 6), expert))[:top_k]
        assert ids[row].tolist() == best
        np.testing.assert_allclose(weights[row], 2.5 * p[best] / p[best].sum(), rtol=4e-6)


def check_expert_bias(device: Device, n: int, k: int, rows: int) -> None:
    """The row of each pair's expert, one rounding per element."""
    rng = np.random.default_rng(rows)
    y, bias = rng.standard_normal((n, k, rows)).astype(np.float32), rng.standard_normal((9, rows)).astype(np.float32)
    ids, on_device = random_ids(n, k, 9), device.upload(y.copy())
    add_expert_bias(device, on_device, device.upload(bias), device.upload(ids))
    np.testing.assert_array_equal(device.download(on_device), y + bias[ids])


def random_ids(n: int, k: int, experts: int, seed: int = 0) -> NDArray[np.int32]:
    """int32 [n, k]: for each row k different experts, some of them far more often than others."""
    rng = np.random.default_rng(seed)
    favour = rng.standard_exponential(experts)
    favour /= favour.sum()
    return np.stack([rng.choice(experts, k, replace=False, p=favour) for _ in range(n)]).astype(np.int32)


def _tensors(parts: Sequence[tuple[str, int]], experts: int, cols: int) -> list[RawTensor]:
    return [random_tensor(name, experts * rows, cols, seed=i + rows) for i, (name, rows) in enumerate(parts)]


def _x(shape: Sequence[int]) -> Floats:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def routed(device: Device, ids: NDArray[np.int32], experts: int) -> Routing:
    """A routing with these ids; expert_matmul does not read its weights."""
    there = device.upload(ids)
    return Routing(there, there, group(device, there, experts))


def _product(device: Device, x: Floats, tensors: Sequence[RawTensor], experts: int, ids: NDArray[np.int32]) -> Floats:
    weight = upload_experts(device, tensors, experts)
    return device.download(expert_matmul(device, device.upload(x), weight, experts, routed(device, ids, experts)))


def _expected(
    device: Device, x: Floats, tensors: Sequence[RawTensor], experts: int, ids: NDArray[np.int32]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The products of the definition in float64, [n, k, rows], and how far the device's may be from them."""
    n, k = ids.shape
    cols = x.shape[-1]
    parts = [decoded(t).reshape(experts, -1, cols) for t in tensors]
    fp16 = [rounds_to_fp16(device, tensor.name, n) for tensor in tensors]
    rows = sum(part.shape[1] for part in parts)
    result, limit = np.empty((n, k, rows)), np.empty((n, k, rows))
    every = np.broadcast_to(x[:, None] if x.ndim == 2 else x, (n, k, cols)).astype(np.float64)
    for expert in np.unique(ids):
        own = ids == expert
        each = [part[expert] for part in parts]
        met = [seen(device, tensor.type.name, every[own]) if device.host else every[own] for tensor in tensors]
        result[own] = np.concatenate([x @ w.T.astype(np.float64) for x, w in zip(met, each, strict=True)], axis=1)
        limits = [product_limit(every[own], w, fp16=half) for w, half in zip(each, fp16, strict=True)]
        limit[own] = np.concatenate(limits, axis=1)
    return result, limit


def check_product(
    device: Device,
    parts: Sequence[tuple[str, int]],
    ids: NDArray[np.int32],
    *,
    experts: int,
    cols: int,
    per_slot: bool = False,
) -> None:
    """Against float64 of gguf's values. Parts: format and rows."""
    n, k = ids.shape
    tensors = _tensors(parts, experts, cols)
    x = _x((n, k, cols) if per_slot else (n, cols))
    actual = _product(device, x, tensors, experts, ids)
    expected, limit = _expected(device, x, tensors, experts, ids)
    assert actual.dtype == np.float32
    assert actual.shape == expected.shape
    error = np.abs(actual - expected)
    assert (error <= limit).all(), f"{(error / limit).max():.1f} times the limit"


def check_product_neighbours(
    device: Device, name: str, counts: Sequence[int], *, experts: int, k: int, cols: int
) -> None:
    """The first rows have the same bits in every batch size of `counts`, and at every place in the batch."""
    n = max(counts)
    tensors = _tensors([(name, 7)], experts, cols)
    ids, x = random_ids(n, k, experts, seed=7), _x((n, cols))
    whole = _product(device, x, tensors, experts, ids)
    for count in counts:
        part = _product(device, x[:count], tensors, experts, ids[:count])
        np.testing.assert_array_equal(part, whole[:count], err_msg=f"{count} rows")
        turned = _product(device, np.roll(x[:count], 1, axis=0), tensors, experts, np.roll(ids[:count], 1, axis=0))
        np.testing.assert_array_equal(turned, np.roll(whole[:count], 1, axis=0), err_msg=f"{count} rows turned")


def check_strides(device: Device, n: int, *, cols: int) -> None:
    """Slices of a wider x, on and off 16-byte boundaries, give the bits of a copy."""
    experts, k = 3, 2
    tensors = _tensors([("F32", 5)], experts, cols)
    weight = upload_experts(device, tensors, experts)
    ids = random_ids(n, k, experts)
    for before, after in ((4, 3), (1, 2), (8, 4)):
        own = slice(before, before + cols)
        for shape in ((n, before + cols + after), (n, k + 1, before + cols + after)):
            wide = _x(shape)
            view = np.s_[:, own] if len(shape) == 2 else np.s_[:, :k, own]
            sliced = expert_matmul(device, device.upload(wide)[view], weight, experts, routed(device, ids, experts))
            expected = _product(device, wide[view].copy(), tensors, experts, ids)
            np.testing.assert_array_equal(device.download(sliced), expected)


def check_infinities(device: Device, n: int) -> None:
    """A NaN and an infinity in the last column stay in their rows: padding makes no NaN of them."""
    experts, k, cols = 3, 2, 13
    tensors = _tensors([("F32", 5)], experts, cols)
    w = decoded(tensors[0]).reshape(experts, 5, cols)
    ids, x = random_ids(n, k, experts), _x((n, cols))
    x[0, 2] = np.nan
    x[-1, -1] = np.inf
    actual = _product(device, x, tensors, experts, ids)
    assert np.isnan(actual[0]).all()
    np.testing.assert_array_equal(actual[-1], np.where(w[ids[-1], :, -1] > 0, np.inf, -np.inf))
    assert np.isfinite(actual[1:-1]).all()


def check_combine(device: Device, n: int, k: int, rows: int) -> None:
    """The weighted sum in float64."""
    rng = np.random.default_rng(k)
    y = rng.standard_normal((n, k, rows)).astype(np.float32)
    weights = rng.uniform(-1, 1, (n, k)).astype(np.float32)
    actual = device.download(combine(device, device.upload(y), device.upload(weights)))
    terms = weights[:, :, None].astype(np.float64) * y
    assert actual.dtype == np.float32
    assert actual.shape == (n, rows)
    assert (np.abs(actual - terms.sum(axis=1)) <= k * 2.0**-24 * np.abs(terms).sum(axis=1)).all()
    shared, gate = device.upload(rng.standard_normal((n, rows)).astype(np.float32)), device.upload(weights)[:, k - 1 :]
    for own in (None, gate):
        # Bits do not depend on whether one launch or two add the shared expert.
        expected = device.upload(actual.copy())
        add_shared(device, expected, shared, own)
        together = combine(device, device.upload(y), device.upload(weights), shared, own)
        np.testing.assert_array_equal(device.download(together), device.download(expected))


def check_combine_order(device: Device) -> None:
    """Slots are added in ascending order: 1e8 + -1e8 + 1 is 1, other orders round the 1 away or lose a part of it."""
    y = np.array([[1e8], [-1e8], [1]], np.float32)
    for order, expected in (([0, 1, 2], 1), ([0, 2, 1], 0), ([2, 0, 1], 0)):
        ones = device.upload(np.ones((1, 3), np.float32))
        assert device.download(combine(device, device.upload(y[None, order]), ones)).tolist() == [[expected]]


def check_layer(device: Device, family: str, n: int) -> None:
    """Router, gated experts and their sum against the model's formula in float64, with the experts it chose."""
    experts, k, hidden, inner = 16, 3, 64, 32
    tensors = _tensors([("Q8_0", inner), ("Q4_0", inner)], experts, hidden)
    down = random_tensor("Q8_0", experts * hidden, inner, seed=99)
    y, logits = _x((n, hidden)), np.random.default_rng(n).standard_normal((n, experts)).astype(np.float32)
    routing, asked = _route(device, logits, k, family)
    chosen_experts = routed(device, routing.ids, experts)
    both = device.download(
        expert_matmul(device, device.upload(y), upload_experts(device, tensors, experts), experts, chosen_experts)
    )
    gated = np.maximum(both[..., :inner], 0) * both[..., inner:]
    each = expert_matmul(device, device.upload(gated), upload_experts(device, [down], experts), experts, chosen_experts)
    actual = device.download(combine(device, each, device.upload(routing.weights)))

    gate, up = (decoded(t).reshape(experts, inner, hidden).astype(np.float64) for t in tensors)
    last = decoded(down).reshape(experts, hidden, inner).astype(np.float64)
    p = probabilities(logits, asked["gating"])
    score = p if asked["bias"] is None else p + asked["bias"]
    expected = np.zeros((n, hidden))
    for row in range(n):
        chosen = np.argsort(-score[row], kind="stable")[:k]
        w = p[row, chosen]
        if asked["normalise"]:
            w = w / w.sum()
        if asked["expert_scale"] is not None:
            w = w * asked["expert_scale"][chosen]
        for expert, share in zip(chosen, asked["scale"] * w, strict=True):
            h = np.maximum(gate[expert] @ y[row], 0) * (up[expert] @ y[row])
            expected[row] += share * (last[expert] @ h)
    # Measured with fp16: 3e-4, with x in int8: 9e-3.
    error = 2e-2 if isinstance(device, CpuDevice) else 1e-3 if rounds_to_fp16(device, "Q8_0", n) else 3e-6
    np.testing.assert_allclose(actual, expected, rtol=0, atol=error * np.abs(expected).max())


def check_empty(device: Device) -> None:
    """No rows in, none out."""
    logits = device.zeros((0, 8))
    routing = route(device, logits, RoutingOptions(2, "softmax"))
    assert routing.ids.shape == routing.weights.shape == (0, 2)
    weight = upload_experts(device, _tensors([("F32", 5)], 8, 12), 8)
    assert expert_matmul(device, device.zeros((0, 12)), weight, 8, routing).shape == (0, 2, 5)
    assert combine(device, device.zeros((0, 2, 5)), routing.weights).shape == (0, 5)


def check_far_expert(device: Device, n: int) -> None:
    """The last expert of weights beyond 2 GiB is found, and the others are zeros."""
    rows, cols = 64, 4096
    tensor = random_tensor("Q8_0", rows, cols, seed=9)
    row_bytes = tensor.raw.shape[1]
    experts = 2**31 // (rows * row_bytes) + 2
    data = device.zeros((experts * rows, row_bytes), np.uint8)
    data[-rows:] = device.upload(tensor.raw)
    weight = Weight(experts * rows, cols, (WeightPart(data, tensor.type, 0, experts * rows),))
    x = _x((n, cols))
    ids = np.array([[experts - 1, 0]] * n, np.int32)
    actual = device.download(expert_matmul(device, device.upload(x), weight, experts, routed(device, ids, experts)))
    w = decoded(tensor).astype(np.float64)
    limit = product_limit(x, w, fp16=rounds_to_fp16(device, "Q8_0", n))
    assert (np.abs(actual[:, 0] - x.astype(np.float64) @ w.T) <= limit).all()
    assert not actual[:, 1].any()


def _mlp(
    rng: np.random.Generator, name: str, down: str, experts: int, inner: int, cols: int, outputs: int
) -> list[RawTensor]:
    """Gates, ups and downs of experts, of a size that keeps results near 1."""
    seeds = rng.integers(1000, size=3)
    return [
        random_tensor(name, experts * inner, cols, int(seeds[0])),
        random_tensor(name, experts * inner, cols, int(seeds[1])),
        random_tensor(down, experts * outputs, inner, int(seeds[2])),
    ]


def _one_mlp(tensors: Sequence[RawTensor], expert: int, row: NDArray[np.float64]) -> NDArray[np.float64]:
    """One expert's float64 result for a quantised row, with its inner row quantised."""
    inner = tensors[2].cols
    gate, up = (decoded(t)[expert * inner : (expert + 1) * inner].astype(np.float64) @ row for t in tensors[:2])
    middle = quantised((gate / (1 + np.exp(-gate)) * up)[None], group_for(tensors[2].type.name)).floats(inner)[0]
    outputs = tensors[2].rows // (tensors[0].rows // inner)
    down = decoded(tensors[2])[expert * outputs : (expert + 1) * outputs].astype(np.float64)
    result: NDArray[np.float64] = down @ middle
    return result


def check_expert_mlp(
    device: Device,
    types: tuple[str, str],
    n: int,
    k: int,
    *,
    experts: int,
    inner: int,
    cols: int,
    shared: str,
    together: bool = False,
    outputs: int = 0,
) -> None:
    """Chosen experts and a shared one ("": none, "plain", "gated") against the formula in float64, and each row alone.

    `together`: gates and ups are one tensor, as some files have them. `outputs`: rows of a down, if not `cols`.
    """
    rng = np.random.default_rng(n + cols)
    outputs = outputs or cols
    chosen, other = (_mlp(rng, *types, count, inner, cols, outputs) for count in (experts, 1))
    x = rng.standard_normal((n, cols)).astype(np.float32) / 4
    ids, weights = random_ids(n, k, experts), rng.random((n, k)).astype(np.float32)
    gate = rng.standard_normal((n, 3)).astype(np.float32)
    first = chosen[:2]
    if together:
        both = [t.raw.reshape(experts, inner, -1) for t in first]
        first = [RawTensor("both", np.concatenate(both, axis=1).reshape(2 * experts * inner, -1), first[0].type, cols)]
    placed = expert_weights(
        upload_experts(device, first, experts), upload_experts(device, chosen[2:], experts), experts
    )
    beside = expert_weights(upload_weight(device, other[:2]), upload_weight(device, other[2:]), 1)
    assert placed is not None
    assert beside is not None
    assert placed.joins(beside)

    def work(rows: slice, to: Array | None = None) -> Floats:
        own, own_ids, own_weights = (device.upload(values[rows]) for values in (x, ids, weights))
        joined, gates = beside if shared else None, None
        if shared == "gated":
            gates = device.upload(gate[rows])[:, 1:2]
        if len(own) > FEW_ROWS:
            return device.download(expert_mlp_rows(device, own, own_ids, own_weights, placed, "silu", joined, gates))
        few = quantise(device, own, group_for(types[0]))
        return device.download(expert_mlp(device, few, own_ids, own_weights, placed, "silu", joined, gates, to))

    actual = work(slice(None))
    assert actual.shape == (n, outputs)
    rows = np.concatenate([seen(device, types[0], row[None]) for row in x])
    expected = np.zeros((n, outputs))
    for row in range(n):
        for slot in range(k):
            expected[row] += weights[row, slot].astype(np.float64) * _one_mlp(chosen, ids[row, slot], rows[row])
        if shared:
            share = 1 / (1 + np.exp(-gate[row, 1].astype(np.float64))) if shared == "gated" else 1.0
            expected[row] += share * _one_mlp(other, 0, rows[row])
    # A value of the inner row that lies between two bytes may fall to either side: 1/127 of its block's largest.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-3 * np.abs(expected).max())
    assert np.median(np.abs(actual - expected)) <= 3e-5 * np.abs(expected).max()
    for row in range(n):
        np.testing.assert_array_equal(work(slice(row, row + 1))[0], actual[row])
    if n <= FEW_ROWS:
        before = rng.standard_normal((n, outputs)).astype(np.float32)
        np.testing.assert_array_equal(work(slice(None), device.upload(before)), before + actual)


def check_norm_route(
    device: Device,
    family: str,
    rows: int,
    cols: int,
    experts: int,
    top_k: int,
    group: int,
    *,
    groups: ExpertGroups | None = None,
    value: float = 1000,
) -> None:
    """One launch has the bits of the norm, the product and the choice, row after row, and leaves its slots empty.
    `value`: of one column of the second row."""
    rng = np.random.default_rng(rows + cols)
    asked = {"bias": None, "expert_scale": None, "groups": groups} | FAMILIES[family]
    if asked["bias"]:
        asked["bias"] = device.upload(rng.choice(np.array(asked["bias"], np.float32), experts))
    if asked["expert_scale"]:
        asked["expert_scale"] = device.upload(rng.uniform(0.5, 2, experts).astype(np.float32))
    parts = [random_tensor("F32", count, cols, seed=count) for count in (experts, rows - experts) if count]
    router = upload_weight(device, parts)
    weight = device.upload(rng.uniform(0.5, 2, cols).astype(np.float32))
    own = row_router(device, router, experts)
    if own is None:
        assert "WGMMA" not in device.products
        return
    for turn in range(2):
        x = rng.standard_normal((1, cols)).astype(np.float32)
        if turn:
            x[0, 3] = value
        stream = device.upload(x)
        normed = quantised_rms_norm(device, stream, None, weight, 1e-6, group)
        logits = matmul(device, normed, router)
        options = RoutingOptions(top_k, **asked)
        expected = route(device, logits[:, :experts], options)
        row, routing, gate = norm_route(device, Unnormed(stream, weight, 1e-6), own, group, options)
        pairs = [(row.data, normed.data), (routing.ids, expected.ids), (routing.weights, expected.weights)]
        assert (gate is None) == (rows == experts)
        if gate is not None:
            pairs.append((gate, logits[:, experts:]))
        for actual, wanted in pairs:
            np.testing.assert_array_equal(device.download(actual), device.download(wanted))
        assert (device.download(own.slots) == -1).all()


def check_slots(device: Device) -> None:
    """An emulated device sees a slot that still holds a number, and one that gets none."""
    router = upload_weight(device, [random_tensor("F32", 6, 64, seed=0)])
    row = Unnormed(device.upload(np.ones((1, 64), np.float32)), device.upload(np.ones(64, np.float32)), 1e-6)
    own = row_router(device, router, 6)
    assert own is not None
    options = RoutingOptions(2, **(FAMILIES["bare"] | {"bias": None, "expert_scale": None}))
    held = device.upload(np.where(np.arange(6) == 4, np.int32(0), np.int32(-1)).astype(np.int32))
    with pytest.raises(DeviceError, match=r"block \(2, 0, 0\), thread \(0, 0, 0\).*from which nobody has taken"):
        norm_route(device, row, replace(own, slots=held), 128, options)
    short = replace(own.part, rows=4)
    with pytest.raises(DeviceError, match="takes a number that no block before its own has posted"):
        norm_route(device, row, replace(own, part=short), 128, options)
