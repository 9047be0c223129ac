"""Checks of luce.ops.deltanet over any device, against float64 formulas written from the paper (arXiv 2412.06464)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.engine.draft_tree import tree_spans
from luce.ops.deltanet import RECURRENT_ROWS, DeltaWeights, RecurrentState, gated_delta_net
from luce.ops.fp16 import TOP, Halves
from luce.ops.int8_rows import Int8Sums
from luce.runtime.device import Device
from luce.runtime.step import Span, SpanArrays, branches_of
from tests.support.op_checks_attention import same_output
from tests.support.quantised import same_halves

Floats = NDArray[np.floating[Any]]
#: slot, start, rows, position, and where anything is pending: accepted, speculative
SpanRow = tuple[int, ...]
#: most rows of a speculative span
MOST = 16
#: What a token multiplies the state by: a trained model's range; all of it; nearly none; either, row by row.
Decay = Literal["model", "none", "strong", "mixed"]

#: Limit of relative_error. Measured: up to 1.5e-5, where the norm makes a small output large; mistakes are far larger.
TOLERANCE = 5e-5
EPS = 1e-6


def span_arrays(device: Device, spans: Sequence[SpanRow | Span]) -> SpanArrays:
    """Spans as a step uploads them."""
    whole = [span if isinstance(span, Span) else _span(*span) for span in spans]
    table = np.array([(s.slot, s.start, s.rows, s.position) for s in whole], np.int32).reshape(-1, 4)
    pending = np.array([(s.accepted, s.speculative) for s in whole], np.int32).reshape(-1, 2)
    return SpanArrays(
        table=device.upload(table),
        row_span=device.upload(np.repeat(np.arange(len(table), dtype=np.int32), table[:, 2])),
        count=len(table),
        longest=int(table[:, 2].max(initial=0)),
        pending=device.upload(pending) if pending.any() else None,
        branches=device.upload(branches_of(whole)) if any(s.path or s.ancestors for s in whole) else None,
    )


def _span(slot: int, start: int, rows: int, position: int, accepted: int = 0, speculative: int = 0) -> Span:
    return Span(slot, start, rows, position, accepted, bool(speculative))


def laid_out(*spans: tuple[int, int, int]) -> list[SpanRow]:
    """(slot, rows, position) one after the other, from row 0."""
    starts = np.cumsum([0, *(rows for _, rows, _ in spans)]).tolist()
    return [(slot, start, rows, position) for (slot, rows, position), start in zip(spans, starts, strict=False)]


def spread_spans(slots: int, lengths: Sequence[int]) -> list[SpanRow]:
    """Spans of these lengths in slots from the last to the first, every third of them new."""
    return laid_out(*((slots - 1 - i, rows, 0 if i % 3 == 2 else 7 * i + 1) for i, rows in enumerate(lengths)))


@dataclass(frozen=True)
class State:
    """The states of slots, as in luce.ops.deltanet.RecurrentState."""

    memory: Floats
    past: Floats
    #: of earlier speculative spans; None: NaN
    speculative_rows: Floats | None = None
    speculative_decays: Floats | None = None

    def __getitem__(self, own: slice) -> State:
        return State(self.memory[own], self.past[own])


@dataclass(frozen=True)
class Case:
    """Inputs of gated_delta_net for the rows of one step, and the states before it."""

    m: Floats  #: [rows, channels]
    z: Floats  #: [rows, heads * d]
    alpha: Floats  #: [rows, heads]
    beta: Floats
    conv: Floats  #: [channels, taps]
    decay: Floats  #: [heads]
    dt_bias: Floats
    norm: Floats  #: [d]
    state: State
    key_heads: int

    def rows(self, own: slice) -> Case:
        """The same with some of the rows."""
        return replace(self, m=self.m[own], z=self.z[own], alpha=self.alpha[own], beta=self.beta[own])


def make_case(
    rows: int,
    *,
    key_heads: int,
    heads: int,
    d: int,
    taps: int = 4,
    slots: int = 1,
    decay: Decay = "model",
    seed: int = 0,
) -> Case:
    """Random inputs; g = decay softplus(alpha + dt_bias) is about -20 per row where the decay is strong."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Floats:
        return rng.standard_normal(shape).astype(np.float32)

    channels = (2 * key_heads + heads) * d
    alpha = normal(rows, heads)
    if decay == "strong":
        alpha += 10
    elif decay == "none":
        alpha -= 30
    elif decay == "mixed":
        alpha += np.where(rng.random((rows, heads)) < 0.3, 10, -8).astype(np.float32)
    past = normal(slots, taps - 1, channels)
    return Case(
        m=normal(rows, channels),
        z=normal(rows, heads * d),
        alpha=alpha,
        beta=normal(rows, heads) + 1,
        conv=normal(channels, taps),
        decay=np.full(heads, -2, np.float32) + normal(heads) * np.float32(0.1),
        dt_bias=normal(heads) * np.float32(0.1),
        norm=normal(d),
        state=State(normal(slots, heads, d, d), past_of_heads(past, key_heads, heads)),
        key_heads=key_heads,
    )


def past_of_heads(inputs: Floats, key_heads: int, heads: int) -> Floats:
    """[..., taps - 1, channels] in the layout of the op: [..., heads, taps - 1, 3, d], the inputs of each head."""
    d = inputs.shape[-1] // (2 * key_heads + heads)
    vectors = inputs.reshape(*inputs.shape[:-1], -1, d)
    of_head = [vectors[..., [h % key_heads, key_heads + h % key_heads, 2 * key_heads + h], :] for h in range(heads)]
    return np.stack(of_head, axis=-4)


def inputs_of_past(past: Floats, key_heads: int) -> Floats:
    """The reverse, for one slot: [heads, taps - 1, 3, d] -> [taps - 1, channels]."""
    vectors = [past[h, :, kind] for kind in (0, 1) for h in range(key_heads)] + [head[:, 2] for head in past]
    return np.concatenate(vectors, axis=-1)


def conv_formula(m: Floats, weight: Floats, past: Floats) -> Floats:
    """silu(sum over tap of weight[:, tap] * input[t - (K-1) + tap]) in float64."""
    taps = weight.shape[1]
    inputs = np.concatenate((past, m)).astype(np.float64)
    sums = np.array([np.einsum("kc,ck->c", inputs[t : t + taps], weight.astype(np.float64)) for t in range(len(m))])
    with np.errstate(over="ignore"):
        return sums / (1 + np.exp(-sums))


def delta_formula(case: Case, state: State) -> tuple[Floats, State]:
    """One sequence's rows, token by token and head by head in float64: outputs [n, heads * d], the state after them."""
    n, heads = case.alpha.shape
    d = len(case.norm)
    inputs = inputs_of_past(state.past, case.key_heads)
    c = conv_formula(case.m, case.conv, inputs)
    q_all, k_all, v_all = np.split(c, (case.key_heads * d, 2 * case.key_heads * d), axis=1)
    memory = state.memory.astype(np.float64)
    out = np.empty((n, heads, d))
    for h in range(heads):
        s = memory[h].T
        kh = h % case.key_heads
        for t in range(n):
            q, k = (x[t, kh * d : (kh + 1) * d] for x in (q_all, k_all))
            q = q / np.sqrt(np.sum(q * q) + 1e-6) / np.sqrt(d)
            k = k / np.sqrt(np.sum(k * k) + 1e-6)
            v = v_all[t, h * d : (h + 1) * d]
            with np.errstate(over="ignore"):
                rate = 1 / (1 + np.exp(-float(case.beta[t, h])))
            g = float(case.decay[h]) * np.logaddexp(0, float(case.alpha[t, h]) + float(case.dt_bias[h]))
            s *= np.exp(g)
            s += np.outer(k, rate * (v - k @ s))
            o = q @ s
            z = case.z[t, h * d : (h + 1) * d].astype(np.float64)
            out[t, h] = o / np.sqrt(np.mean(o * o) + EPS) * case.norm * z / (1 + np.exp(-z))
    after = np.concatenate((inputs, case.m))[n:]
    return out.reshape(n, -1), State(memory, past_of_heads(after, case.key_heads, heads))


def run(device: Device, case: Case, spans: Sequence[SpanRow], state: State | None = None) -> tuple[Floats, State]:
    """The op's outputs and states after it, on the host; its input is a part of wider rows."""
    out, after = queue(device, case, spans, state)
    return device.download(out), after


def queue(
    device: Device,
    case: Case,
    spans: Sequence[SpanRow | Span],
    state: State | None = None,
    products: Int8Sums | Halves | None = None,
    **named: int,
) -> tuple[Any, State]:
    """`run`, with the outputs on the device; of products with scales, if given, instead of the case's rows."""
    state = state or case.state
    wide = np.concatenate((case.m, case.z, case.alpha, case.beta, case.beta[:, :1]), axis=1)
    slots, heads, _, _, d = state.past.shape
    rows, decays = state.speculative_rows, state.speculative_decays
    rows = np.full((slots, heads, MOST, 5, d), np.nan, np.float32) if rows is None else rows
    decays = np.full((slots, heads, MOST), np.nan, np.float32) if decays is None else decays
    arrays = [device.upload(array.copy()) for array in (state.memory, state.past, rows, decays)]
    weights = DeltaWeights(
        conv=device.upload(case.conv),
        decay=device.upload(case.decay),
        dt_bias=device.upload(case.dt_bias),
        norm=device.upload(case.norm),
        eps=EPS,
        key_heads=case.key_heads,
    )
    x = device.upload(wide)[:, :-1] if products is None else products
    out = gated_delta_net(device, x, weights, RecurrentState(*arrays), span_arrays(device, spans), **named)
    return out, State(*(device.download(array) for array in arrays))


def relative_error(got: Floats, expected: Floats) -> float:
    """The largest difference, relative to the root mean square of `expected`."""
    scale = float(np.sqrt(np.mean(np.square(expected, dtype=np.float64))))
    return float(np.max(np.abs(got - expected))) / scale


def agree(got: State, expected: State) -> None:
    """The memory agrees up to rounding, the past exactly: it holds inputs."""
    assert relative_error(got.memory, expected.memory) < TOLERANCE
    np.testing.assert_array_equal(got.past, expected.past)


def check_formula(
    device: Device,
    lengths: Sequence[int],
    *,
    key_heads: int,
    heads: int,
    d: int,
    taps: int = 4,
    decay: Decay = "model",
) -> None:
    """Outputs and states of one step against the formula; new spans in slots of NaN, a slot that no span has."""
    slots = len(lengths) + 1
    case = make_case(sum(lengths), key_heads=key_heads, heads=heads, d=d, taps=taps, slots=slots, decay=decay)
    spans = spread_spans(slots, lengths)
    before = State(case.state.memory.copy(), case.state.past.copy())
    for slot, _, _, position in spans:
        if not position:
            before.memory[slot] = before.past[slot] = np.nan
    out, after = run(device, case, spans, before)
    np.testing.assert_array_equal(after.memory[0], before.memory[0])
    np.testing.assert_array_equal(after.past[0], before.past[0])
    for slot, start, rows, position in spans:
        own = slice(start, start + rows)
        old = State(*((x[slot] if position else np.zeros_like(x[slot])) for x in (before.memory, before.past)))
        expected, state = delta_formula(case.rows(own), old)
        assert relative_error(out[own], expected) < TOLERANCE, (rows, position)
        agree(State(after.memory[slot], after.past[slot]), state)


def check_quantised_output(device: Device, lengths: Sequence[int], *, key_heads: int, heads: int, d: int) -> None:
    """The int8 rows of quantise of the outputs, and the same states."""
    case = make_case(sum(lengths), key_heads=key_heads, heads=heads, d=d, slots=len(lengths))
    spans = spread_spans(len(lengths), lengths)
    floats, state = queue(device, case, spans)
    for group in (32, 128):
        bytes, after = queue(device, case, spans, int8_group=group)
        same_output(device, bytes, floats, group if d % 128 == 0 else 0)
        np.testing.assert_array_equal(after.memory, state.memory)


def check_many_spans(
    device: Device, monkeypatch: pytest.MonkeyPatch, count: int, *, key_heads: int, heads: int, d: int, taps: int = 4
) -> None:
    """Single rows of many spans by deltanet_many.cu: the formula, and the bits of deltanet.cu, also as int8 rows."""
    launched: list[str] = []
    launch = device.launch

    def recording(source: str, *rest: Any, **named: Any) -> None:
        if source != "quantise":
            launched.append(source)
        launch(source, *rest, **named)

    monkeypatch.setattr(device, "launch", recording)
    lengths = (1,) * count
    check_formula(device, lengths, key_heads=key_heads, heads=heads, d=d, taps=taps)
    case = make_case(count, key_heads=key_heads, heads=heads, d=d, taps=taps, slots=count + 1)
    spans = spread_spans(count + 1, lengths)
    (out, after), (floats, _) = run(device, case, spans), queue(device, case, spans)
    if count <= 16 and d % 128 == 0:
        for group in (32, 128):
            same_output(device, queue(device, case, spans, int8_group=group)[0], floats, group)
    assert set(launched) == {"deltanet_many"}
    monkeypatch.setattr(device, "products", device.products - {"WGMMA"})
    expected, state = run(device, case, spans)
    assert launched[-1] == "deltanet"
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(after.memory, state.memory)
    np.testing.assert_array_equal(after.past, state.past)


def check_shared_heads(
    device: Device, monkeypatch: pytest.MonkeyPatch, split: int, count: int, *, heads: int, taps: int = 4
) -> None:
    """So many blocks for each head of 128: the formula for single rows, and the bits of one block for each head, also
    as int8 rows, and for rows that are accepted and drafted."""
    launched: list[tuple[str, object]] = []
    launch = device.launch

    def recording(source: str, *rest: Any, **named: Any) -> None:
        if source != "quantise":
            launched.append((source, named["defines"].get("SPLIT", 1)))
        launch(source, *rest, **named)

    monkeypatch.setattr(device, "launch", recording)
    sizes: dict[str, Any] = {"key_heads": 1, "heads": heads, "d": 128, "taps": taps}
    most = MOST if count == 1 else 4
    case = make_case(most * count, **sizes, slots=count + 1)
    single = spread_spans(count + 1, (1,) * count)
    drafts = [(i + 1, most * i, most, 9 * (i % 2), 0, 1) for i in range(count)]
    later = [(i + 1, most * i, most, 12, (most - 1 - i) % most, 1) for i in range(count)]
    last = [(i + 1, most * i, most if i else 0, 30, 3 - i % 4, 1) for i in range(count)]
    results = []
    for blocks in (split, 1):
        # With fewer multiprocessors the other kernels of single rows would be chosen.
        monkeypatch.setattr(device, "multiprocessors", blocks * heads * count if blocks > 1 else heads * count)
        launched.clear()
        if blocks > 1:
            check_formula(device, (1,) * count, **sizes)
        steps = [run(device, case.rows(slice(0, count)), single), run(device, case, drafts)]
        for spans in (later, last):
            steps.append(run(device, case, spans, steps[-1][1]))
        results.append([(np.where(np.isnan(out), 0, out), *vars(state).values()) for out, state in steps])
        for group in (32, 128) if count <= 16 else ():
            rows, _ = queue(device, case.rows(slice(0, count)), single, int8_group=group)
            same_output(device, rows, queue(device, case.rows(slice(0, count)), single)[0], group)
        assert {source for source, _ in launched} == ({"deltanet_step", "deltanet"} if blocks > 1 else {"deltanet"})
        assert {number for _, number in launched} == {blocks}
    for shared, alone in zip(*results, strict=True):
        for got, expected in zip(shared, alone, strict=True):
            np.testing.assert_array_equal(got, expected)


def check_single_steps(device: Device, rows: int, *, key_heads: int, heads: int, d: int, taps: int = 4) -> None:
    """Up to RECURRENT_ROWS rows at once have the bits of steps of one row."""
    assert rows <= RECURRENT_ROWS
    case = make_case(rows, key_heads=key_heads, heads=heads, d=d, taps=taps)
    whole, after = run(device, case, [(0, 0, rows, 3)])
    state = case.state
    for t in range(rows):
        out, state = run(device, case.rows(slice(t, t + 1)), [(0, 0, 1, 3 + t)], state)
        np.testing.assert_array_equal(out[0], whole[t])
    np.testing.assert_array_equal(state.memory, after.memory)
    np.testing.assert_array_equal(state.past, after.past)


def check_rollback(
    device: Device, speculative: int, accepted: int, then: int, *, heads: int, d: int, taps: int = 4
) -> None:
    """A speculative span, some of whose rows are accepted, and a span after them: outputs and states of accepted rows.

    Beside it a slot that nothing is pending in. `then` rows may be speculative themselves, or many, or none.
    """
    case = make_case(speculative + then + 5, key_heads=1, heads=heads, d=d, taps=taps, slots=2)
    first, second = case.rows(slice(0, speculative + 2)), case.rows(slice(speculative, speculative + then + 3))
    out, state = run(device, first, [(1, 0, speculative, 7, 0, 1), (0, speculative, 2, 4)])
    np.testing.assert_array_equal(state.memory[1], case.state.memory[1])
    np.testing.assert_array_equal(state.past[1], case.state.past[1])
    expected, fresh = run(device, first, [(1, 0, speculative, 7), (0, speculative, 2, 4)])
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(state.memory[0], fresh.memory[0])

    _, fresh = run(device, case.rows(slice(0, accepted)), [(1, 0, accepted, 7)])
    fresh = replace(fresh, memory=np.stack((state.memory[0], fresh.memory[1])))
    fresh = replace(fresh, past=np.stack((state.past[0], fresh.past[1])))
    for again in (0, 1) if 0 < then <= RECURRENT_ROWS else (0,):
        spans = [(0, 0, 3, 6, 0, 0), (1, 3, then, 7 + accepted, accepted, again)]
        got, behind = run(device, second, spans, state)
        expected, after = run(device, second, [(slot, start, rows, at) for slot, start, rows, at, *_ in spans], fresh)
        np.testing.assert_array_equal(got[: 3 + then], expected[: 3 + then])
        if again:
            after = replace(after, memory=np.stack((after.memory[0], fresh.memory[1])))
            after = replace(after, past=np.stack((after.past[0], fresh.past[1])))
        np.testing.assert_array_equal(behind.memory, after.memory)
        np.testing.assert_array_equal(behind.past, after.past)


def check_tree(
    device: Device, parents: Sequence[int], path: Sequence[int], *, heads: int, d: int, taps: int = 4
) -> None:
    """Each row of a draft tree has the bits of a span of its ancestors and itself; then a path is accepted, before a
    span of each kind. parents[i] is the parent of row i + 1. Another slot has a span without branches."""
    count = len(parents) + 1
    case = make_case(count + 3 + 2, key_heads=1, heads=heads, d=d, taps=taps, slots=2)
    tree = tree_spans(parents, Span(1, 2, count, 7))
    beside = Span(0, 0, 2, 4)
    rows = case.rows(slice(0, 2 + count))
    out, state = run_spans(device, rows, [beside, *tree])
    np.testing.assert_array_equal(state.memory[1], case.state.memory[1])
    np.testing.assert_array_equal(state.past[1], case.state.past[1])
    expected, chain = run_spans(device, rows, [beside])
    np.testing.assert_array_equal(out[:2], expected[:2])
    np.testing.assert_array_equal(state.memory[0], chain.memory[0])
    paths = {0: [0]}
    for row, parent in enumerate(parents, 1):
        paths[row] = [*paths[parent], row]
    for row, own in paths.items():
        expected, chain = run_spans(device, picked(case, [2 + i for i in own]), [Span(1, 0, len(own), 7)])
        np.testing.assert_array_equal(out[2 + row], expected[-1])
    _, chain = run_spans(device, picked(case, [2 + i for i in path]), [Span(1, 0, len(path), 7)])
    after = case.rows(slice(count, count + 5))
    # The last one is of another slot, and begins anew.
    for then in (
        [Span(1, 0, 5, 7 + len(path))],
        tree_spans((0, 1, 0, 3), Span(1, 0, 5, 7 + len(path))),
        [Span(0, 0, 5, 0)],
    ):
        first, *others = then if then[0].slot else [Span(1, 0, 0, 7 + len(path)), *then]
        accepts = replace(first, accepted=len(path), path=tuple(path))
        got, behind = run_spans(device, after, [accepts, *others], state)
        expected, fresh = run_spans(device, after, then, chain)
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(behind.memory[1], fresh.memory[1])
        np.testing.assert_array_equal(behind.past[1], fresh.past[1])


def picked(case: Case, rows: Sequence[int]) -> Case:
    """A case of some rows."""
    rows = list(rows)
    return replace(case, m=case.m[rows], z=case.z[rows], alpha=case.alpha[rows], beta=case.beta[rows])


def run_spans(device: Device, case: Case, spans: Sequence[Span], state: State | None = None) -> tuple[Floats, State]:
    """`run` for any spans."""
    out, after = queue(device, case, spans, state)
    return device.download(out), after


def check_neighbours(device: Device, lengths: Sequence[int], *, key_heads: int, heads: int, d: int) -> None:
    """A span has the same bits alone as among others, wherever in the step it starts."""
    case = make_case(sum(lengths), key_heads=key_heads, heads=heads, d=d, slots=len(lengths))
    spans = spread_spans(len(lengths), lengths)
    together, after = run(device, case, spans)
    for slot, start, rows, position in spans:
        own = slice(start, start + rows)
        out, state = run(device, case.rows(own), [(slot, 0, rows, position)])
        np.testing.assert_array_equal(out, together[own])
        np.testing.assert_array_equal(state.memory[slot], after.memory[slot])
        np.testing.assert_array_equal(state.past[slot], after.past[slot])


def check_cuts(
    device: Device,
    cuts: Sequence[int],
    *,
    key_heads: int,
    heads: int,
    d: int,
    decay: Decay,
    exact: bool = False,
) -> None:
    """A prompt cut anywhere agrees with the prompt in one span: up to rounding, or bit for bit if `exact`."""
    n = sum(cuts)
    case = make_case(n, key_heads=key_heads, heads=heads, d=d, decay=decay, seed=2)
    whole, after = run(device, case, [(0, 0, n, 0)])
    state, at = case.state, 0
    for rows in cuts:
        own = slice(at, at + rows)
        out, state = run(device, case.rows(own), [(0, 0, rows, at)], state)
        if exact:
            np.testing.assert_array_equal(out, whole[own])
        assert relative_error(out, whole[own]) < TOLERANCE, at
        at += rows
    agree(state, after)
    if exact:
        np.testing.assert_array_equal(state.memory, after.memory)


def check_far_out(device: Device, rows: int) -> None:
    """Gates at both ends of float32, zero keys and queries, silu where exp overflows: finite results of the formula."""
    d = 64
    case = make_case(rows, key_heads=1, heads=2, d=d)
    case.conv[: 2 * d, :3] = 0  # so that zero rows make zero keys and queries
    case.m[: rows // 2, :d] = 0
    case.m[rows // 3 : rows // 2, d : 2 * d] = 0
    case.m[-3:, 2 * d : 2 * d + 8] = [-2000, 2000, -88, 88, 0, 500, -500, 100]
    case.alpha[2::5], case.alpha[1::5] = 1e4, -1e4
    case.beta[::3], case.beta[1::3] = -200, 200
    out, after = run(device, case, [(0, 0, rows, 1)])
    expected, state = delta_formula(case, State(case.state.memory[0], case.state.past[0]))
    assert relative_error(out, expected) < TOLERANCE
    agree(State(after.memory[0], after.past[0]), state)


def check_tiny_rates(device: Device, rows: int) -> None:
    """Rows that add next to nothing to a state that stays: what would scale them up has no float."""
    case = make_case(rows, key_heads=1, heads=2, d=64, decay="none")
    case.beta[:] = -80.5  # 1e-35
    out, after = run(device, case, [(0, 0, rows, 1)])
    expected, state = delta_formula(case, State(case.state.memory[0], case.state.past[0]))
    assert relative_error(out, expected) < TOLERANCE
    agree(State(after.memory[0], after.past[0]), state)


def check_same_keys(device: Device, rows: int) -> None:
    """A state that gets much larger than what any row adds: all rows have one key, small rates and no decay."""
    d = 64
    case = make_case(rows, key_heads=1, heads=2, d=d, decay="none")
    case.conv[:, :3] = 0
    case.m[:, d : 2 * d] = 0
    case.m[:, d], case.conv[d] = 20, 1
    case.m[:, 2 * d :] = case.m[0, 2 * d :]
    case.beta[:] = -4  # 1/55
    case.state.memory[:] = 0
    out, after = run(device, case, [(0, 0, rows, 1)])
    expected, state = delta_formula(case, State(case.state.memory[0], case.state.past[0]))
    assert relative_error(out, expected) < TOLERANCE
    agree(State(after.memory[0], after.past[0]), state)


def check_agreement(
    device: Device, host: Device, lengths: Sequence[int], *, key_heads: int, heads: int, d: int
) -> None:
    """The device and the NumPy reference."""
    case = make_case(sum(lengths), key_heads=key_heads, heads=heads, d=d, slots=len(lengths))
    spans = spread_spans(len(lengths), lengths)
    (out, after), (expected, state) = (run(on, case, spans) for on in (device, host))
    assert relative_error(out, expected) < TOLERANCE
    agree(after, state)


def check_no_rows(device: Device) -> None:
    """An empty step."""
    case = make_case(0, key_heads=1, heads=2, d=64)
    out, after = run(device, case, [])
    assert out.shape == (0, 128)
    np.testing.assert_array_equal(after.memory, case.state.memory)


def check_fp16_output(device: Device, rows: int, *, key_heads: int, heads: int, d: int) -> None:
    """The halves of the outputs as floats, of rows that need a scale too, and the same states, also of sums of int8
    rows; rows of a step with several spans stay floats."""
    case = make_case(rows, key_heads=key_heads, heads=heads, d=d)
    case.z[::3] *= 1e-5
    floats, state = queue(device, case, [(0, 0, rows, 3)])
    halves, after = queue(device, case, [(0, 0, rows, 3)], top=TOP)
    same_halves(device, halves, floats)
    np.testing.assert_array_equal(after.memory, state.memory)
    np.testing.assert_array_equal(after.past, state.past)
    width = case.m.shape[1] + case.z.shape[1] + 2 * heads
    rng = np.random.default_rng(1)
    values = rng.integers(-(1 << 20), 1 << 20, (rows, width), np.int32)
    scales = (rng.random(rows).astype(np.float32), (rng.random(width) * 1e-6).astype(np.float32))
    x = values.astype(np.float32) * scales[0][:, None] * scales[1]
    case = _of_inputs(case, x)
    floats, state = queue(device, case, [(0, 0, rows, 3)])
    sums = Int8Sums(*(device.upload(array) for array in (values, *scales)))
    halves, after = queue(device, case, [(0, 0, rows, 3)], top=-3, products=sums)
    same_halves(device, halves, floats, -3)
    np.testing.assert_array_equal(after.memory, state.memory)
    np.testing.assert_array_equal(after.past, state.past)
    several = queue(
        device, make_case(rows + 1, key_heads=1, heads=1, d=d, slots=2), laid_out((0, rows, 3), (1, 1, 3)), top=TOP
    )
    assert several[0].dtype == np.float32


def _of_inputs(case: Case, x: Floats) -> Case:
    """The case with other rows of inputs."""
    ends = np.cumsum([case.m.shape[1], case.z.shape[1], case.alpha.shape[1]])
    m, z, alpha, beta = np.split(x.astype(np.float32), ends, axis=1)
    return replace(case, m=m, z=z, alpha=alpha, beta=beta)


def check_halves(device: Device, rows: int, *, key_heads: int, heads: int, d: int, taps: int = 4) -> None:
    """Inputs as halves whose rows have scales, of a new span and of one that goes on, against the formula."""
    case = make_case(rows, key_heads=key_heads, heads=heads, d=d, taps=taps)
    whole = np.concatenate((case.m, case.z, case.alpha, case.beta), axis=1)
    whole[:, -2 * heads :][::5] *= 8
    whole[-1, case.m.shape[1] :][:4] = -300, 300, -88, 0
    scales = (2.0 ** (np.arange(rows) % 7 - 3)).astype(np.float32)
    values = (whole / scales[:, None]).astype(np.float16)
    case = _of_inputs(case, values * scales[:, None])
    halves = Halves(device.upload(values), device.upload(scales))
    for position in (0, 3):
        before = State(*(x[0] if position else np.zeros_like(x[0]) for x in (case.state.memory, case.state.past)))
        exact, state = delta_formula(case, before)
        made, after = queue(device, case, [(0, 0, rows, position)], top=-3, products=halves)
        scale = device.download(made.scale)[:, None].astype(np.float64)
        out = device.download(made.values)[:, : heads * d] * scale
        assert made.top == -3 and np.abs(device.download(made.values)).max() < 2.0**-3
        limit = 2.0**-11 * np.abs(exact) + 2.0**-25 * scale + TOLERANCE * np.sqrt(np.mean(np.square(exact)))
        assert (np.abs(out - exact) <= limit).all(), position
        agree(State(after.memory[0], after.past[0]), state)
