"""Checks of luce.ops.deltanet over any device, against float64 formulas written from the paper (arXiv 2412.06464)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from luce.ops.deltanet import RECURRENT_ROWS, conv_silu, gated_delta
from luce.runtime.device import Device
from luce.runtime.step import SpanArrays

Floats = NDArray[np.floating[Any]]
#: slot, start, rows, position
SpanRow = tuple[int, int, int, int]
#: What a token multiplies the state by: a trained model's range; all of it; nearly none; either, row by row.
Decay = Literal["model", "none", "strong", "mixed"]

#: Of relative_error. Measured: up to 4e-6 in chunks and 2e-6 row by row; ten times that is a mistake.
TOLERANCE = 1e-5


def span_arrays(device: Device, spans: Sequence[SpanRow]) -> SpanArrays:
    """Spans as a step would put them on the device."""
    table = np.array(spans, np.int32).reshape(-1, 4)
    return SpanArrays(
        table=device.upload(table),
        row_span=device.upload(np.repeat(np.arange(len(table), dtype=np.int32), table[:, 2])),
        count=len(table),
        longest=int(table[:, 2].max(initial=0)),
    )


def laid_out(*spans: tuple[int, int, int]) -> list[SpanRow]:
    """(slot, rows, position) one after the other, from row 0."""
    starts = np.cumsum([0, *(rows for _, rows, _ in spans)]).tolist()
    return [(slot, start, rows, position) for (slot, rows, position), start in zip(spans, starts, strict=False)]


# --- the convolution


def conv_formula(m: Floats, weight: Floats, past: Floats) -> tuple[Floats, Floats]:
    """silu(sum over tap of weight[:, tap] * input[t - (K-1) + tap]) in float64, and the last K-1 inputs."""
    taps = weight.shape[1]
    inputs = np.concatenate((past, m)).astype(np.float64)
    sums = np.array([np.einsum("kc,ck->c", inputs[t : t + taps], weight.astype(np.float64)) for t in range(len(m))])
    return sums / (1 + np.exp(-sums)), inputs[len(m) :]


def check_conv(device: Device, spans: Sequence[SpanRow], *, channels: int, taps: int, seed: int = 0) -> None:
    """Results and states of one step, with rows that are a part of wider ones."""
    rng = np.random.default_rng(seed)
    n = sum(rows for _, _, rows, _ in spans)
    wide = rng.standard_normal((n, channels + 5)).astype(np.float32)
    weight = rng.standard_normal((channels, taps)).astype(np.float32)
    state = rng.standard_normal((max(slot for slot, *_ in spans) + 2, taps - 1, channels)).astype(np.float32)
    on_device = device.upload(state.copy())
    got = device.download(
        conv_silu(
            device,
            device.upload(wide)[:, 3 : channels + 3],
            device.upload(weight),
            on_device,
            span_arrays(device, spans),
        )
    )
    states = state.copy()
    for slot, start, rows, position in spans:
        past = state[slot] if position else np.zeros_like(state[slot])
        own = slice(start, start + rows)
        out, states[slot] = conv_formula(wide[own, 3 : channels + 3], weight, past)
        np.testing.assert_allclose(got[own], out, rtol=2e-6, atol=5e-6)
    np.testing.assert_array_equal(device.download(on_device), states)


def check_conv_cuts(device: Device, cuts: Sequence[int], *, channels: int, taps: int) -> None:
    """A prompt cut into spans of `cuts` rows gives the bits of one go, and the same state."""
    rng = np.random.default_rng(1)
    n = sum(cuts)
    m = device.upload(rng.standard_normal((n, channels)).astype(np.float32))
    weight = device.upload(rng.standard_normal((channels, taps)).astype(np.float32))
    # A new sequence does not see what the slot's last one left.
    states = [device.upload(np.full((1, taps - 1, channels), np.nan, np.float32)) for _ in range(2)]
    whole = device.download(conv_silu(device, m, weight, states[0], span_arrays(device, [(0, 0, n, 0)])))
    at = 0
    for rows in cuts:
        spans = span_arrays(device, [(0, 0, rows, at)])
        part = device.download(conv_silu(device, m[at : at + rows], weight, states[1], spans))
        np.testing.assert_array_equal(part, whole[at : at + rows])
        at += rows
    np.testing.assert_array_equal(device.download(states[0]), device.download(states[1]))
    assert np.isfinite(whole).all()


def check_conv_far_out(device: Device) -> None:
    """silu is 0 and the identity where exp overflows."""
    m, weight = np.array([[-2000, 2000, -88]], np.float32), np.array([[5, 1]] * 3, np.float32)
    spans, state = span_arrays(device, [(0, 0, 1, 0)]), device.zeros((1, 1, 3))
    got = device.download(conv_silu(device, device.upload(m), device.upload(weight), state, spans))
    np.testing.assert_allclose(got, [[0, 2000, -88 * np.exp(-88.0)]], rtol=1e-5)


# --- the gated delta rule


@dataclass(frozen=True)
class Case:
    """Inputs of gated_delta for rows of one step, and the states before it."""

    c: Floats
    alpha: Floats
    beta: Floats
    decay: Floats
    dt_bias: Floats
    state: Floats
    key_heads: int

    def rows(self, own: slice) -> Case:
        """The same with some of the rows."""
        return Case(self.c[own], self.alpha[own], self.beta[own], self.decay, self.dt_bias, self.state, self.key_heads)


def make_case(
    rows: int, *, key_heads: int, heads: int, d: int, slots: int = 1, decay: Decay = "model", seed: int = 0
) -> Case:
    """Random inputs; g = decay softplus(alpha + dt_bias) is about -20 per row where the decay is strong."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Floats:
        return rng.standard_normal(shape).astype(np.float32)

    alpha = normal(rows, heads)
    if decay == "strong":
        alpha += 10
    elif decay == "none":
        alpha -= 30
    elif decay == "mixed":
        alpha += np.where(rng.random((rows, heads)) < 0.3, 10, -8).astype(np.float32)
    return Case(
        # Keys have a common part, as after silu: (I + A)^-1 is then far from I.
        c=normal(rows, (2 * key_heads + heads) * d) + np.float32(0.5),
        alpha=alpha,
        beta=normal(rows, heads) + 1,
        decay=np.full(heads, -2, np.float32) + normal(heads) * np.float32(0.1),
        dt_bias=normal(heads) * np.float32(0.1),
        state=normal(slots, heads, d, d),
        key_heads=key_heads,
    )


def delta_formula(case: Case, state: Floats) -> tuple[Floats, Floats]:
    """One sequence's rows, token by token and head by head in float64: outputs [n, heads, d], the state after them."""
    n, heads = case.alpha.shape
    d = state.shape[-1]
    c = case.c.astype(np.float64)
    q_all, k_all, v_all = np.split(c, (case.key_heads * d, 2 * case.key_heads * d), axis=1)
    states = state.astype(np.float64)
    out = np.empty((n, heads, d))
    for h in range(heads):
        s = states[h]
        kh = h % case.key_heads
        for t in range(n):
            q, k = (x[t, kh * d : (kh + 1) * d] for x in (q_all, k_all))
            q = q / np.sqrt(np.sum(q * q) + 1e-6) / np.sqrt(d)
            k = k / np.sqrt(np.sum(k * k) + 1e-6)
            v = v_all[t, h * d : (h + 1) * d]
            rate = 1 / (1 + np.exp(-float(case.beta[t, h])))
            g = float(case.decay[h]) * np.logaddexp(0, float(case.alpha[t, h]) + float(case.dt_bias[h]))
            s *= np.exp(g)
            s += np.outer(k, rate * (v - k @ s))
            out[t, h] = q @ s
    return out, states


def run_delta(
    device: Device, case: Case, spans: Sequence[SpanRow], state: Floats | None = None
) -> tuple[Floats, Floats]:
    """The op's outputs and states after it, on the host; alpha and beta are parts of wider rows."""
    heads = case.alpha.shape[1]
    wide = device.upload(np.concatenate((case.alpha, case.beta, case.beta[:, :1]), axis=1))
    on_device = device.upload((case.state if state is None else state).copy())
    out = gated_delta(
        device,
        device.upload(case.c),
        wide[:, :heads],
        wide[:, heads : 2 * heads],
        device.upload(case.decay),
        device.upload(case.dt_bias),
        on_device,
        span_arrays(device, spans),
        key_heads=case.key_heads,
    )
    return device.download(out), device.download(on_device)


def relative_error(got: Floats, expected: Floats) -> float:
    """The largest difference, relative to the root mean square of what was expected."""
    scale = float(np.sqrt(np.mean(np.square(expected, dtype=np.float64))))
    return float(np.max(np.abs(got - expected))) / scale


def spread_spans(case_slots: int, lengths: Sequence[int]) -> list[SpanRow]:
    """Spans of these lengths in slots from the last to the first, every third of them new."""
    return laid_out(*((case_slots - 1 - i, rows, 0 if i % 3 == 2 else 7 * i + 1) for i, rows in enumerate(lengths)))


def check_delta(
    device: Device, lengths: Sequence[int], *, key_heads: int, heads: int, d: int, decay: Decay = "model"
) -> None:
    """Outputs and states of one step against the formula; new spans in slots of NaN, a slot that no span has."""
    case = make_case(sum(lengths), key_heads=key_heads, heads=heads, d=d, slots=len(lengths) + 1, decay=decay)
    spans = spread_spans(len(lengths) + 1, lengths)
    before = case.state.copy()
    for slot, _, _, position in spans:
        if not position:
            before[slot] = np.nan
    out, after = run_delta(device, case, spans, before)
    np.testing.assert_array_equal(after[0], before[0])
    for slot, start, rows, position in spans:
        own = slice(start, start + rows)
        old = before[slot] if position else np.zeros_like(before[slot])
        expected, state = delta_formula(case.rows(own), old)
        assert relative_error(out[own], expected) < TOLERANCE, (rows, position)
        assert relative_error(after[slot], state) < TOLERANCE, (rows, position)


def check_single_steps(device: Device, rows: int, *, key_heads: int, heads: int, d: int) -> None:
    """Up to RECURRENT_ROWS rows at once have the bits of steps of one row."""
    assert rows <= RECURRENT_ROWS
    case = make_case(rows, key_heads=key_heads, heads=heads, d=d)
    whole, after = run_delta(device, case, [(0, 0, rows, 3)])
    state = case.state
    for t in range(rows):
        out, state = run_delta(device, case.rows(slice(t, t + 1)), [(0, 0, 1, 3 + t)], state)
        np.testing.assert_array_equal(out[0], whole[t])
    np.testing.assert_array_equal(state, after)


def check_company(device: Device, lengths: Sequence[int], *, key_heads: int, heads: int, d: int) -> None:
    """A span has the same bits alone as among others, wherever in the step it starts."""
    case = make_case(sum(lengths), key_heads=key_heads, heads=heads, d=d, slots=len(lengths))
    spans = spread_spans(len(lengths), lengths)
    together, after = run_delta(device, case, spans)
    for slot, start, rows, position in spans:
        own = slice(start, start + rows)
        out, state = run_delta(device, case.rows(own), [(slot, 0, rows, position)])
        np.testing.assert_array_equal(out, together[own])
        np.testing.assert_array_equal(state[slot], after[slot])


def check_cuts(device: Device, cuts: Sequence[int], *, key_heads: int, heads: int, d: int, decay: Decay) -> None:
    """A prompt cut anywhere agrees with one go to rounding."""
    n = sum(cuts)
    case = make_case(n, key_heads=key_heads, heads=heads, d=d, decay=decay, seed=2)
    whole, after = run_delta(device, case, [(0, 0, n, 0)])
    state, at = case.state, 0
    for rows in cuts:
        own = slice(at, at + rows)
        out, state = run_delta(device, case.rows(own), [(0, 0, rows, at)], state)
        assert relative_error(out, whole[own]) < TOLERANCE, at
        at += rows
    assert relative_error(state, after) < TOLERANCE


def check_delta_far_out(device: Device, rows: int) -> None:
    """Gates at both ends of float32, keys and queries of zeros: all finite, and the formula's."""
    case = make_case(rows, key_heads=1, heads=2, d=16)
    case.c[: rows // 2, :16] = 0
    case.c[rows // 3 : rows // 2, 16:32] = 0
    case.alpha[2::5], case.alpha[1::5] = 1e4, -1e4
    case.beta[::3], case.beta[1::3] = -200, 200
    out, after = run_delta(device, case, [(0, 0, rows, 1)])
    expected, state = delta_formula(case, case.state[0])
    assert relative_error(out, expected) < TOLERANCE
    assert relative_error(after[0], state) < TOLERANCE


def check_agreement(
    device: Device, host: Device, lengths: Sequence[int], *, key_heads: int, heads: int, d: int
) -> None:
    """The device and the NumPy reference."""
    case = make_case(sum(lengths), key_heads=key_heads, heads=heads, d=d, slots=len(lengths))
    spans = spread_spans(len(lengths), lengths)
    (out, after), (expected, state) = (run_delta(on, case, spans) for on in (device, host))
    assert relative_error(out, expected) < TOLERANCE
    assert relative_error(after, state) < TOLERANCE


def check_no_rows(device: Device) -> None:
    """An empty step."""
    case = make_case(0, key_heads=1, heads=2, d=16)
    out, after = run_delta(device, case, [])
    assert out.shape == (0, 2, 16)
    np.testing.assert_array_equal(after, case.state)
    m, weight, state = device.empty((0, 5)), device.zeros((5, 4)), device.zeros((1, 3, 5))
    assert conv_silu(device, m, weight, state, span_arrays(device, [])).shape == (0, 5)
