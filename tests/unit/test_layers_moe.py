"""The mixture-of-experts layer: a row's bits in company, and many rows' product with the router without the gate."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

from luce.layers import moe
from luce.layers.decoder_layer import DecoderLayer, Residual
from luce.layers.deltanet import DeltaNetLayer
from luce.layers.mlp import GatedMLPLayer
from luce.layers.moe import MoELayer
from luce.layers.norm import Norm
from luce.layers.routed_experts import RoutedExperts
from luce.models.spec import GatedMLP, MoE
from luce.ops.int8_rows import Int8Rows
from luce.ops.matmul import FEW_ROWS, MANY_ROWS
from luce.ops.matmul_int8 import ADDS, ADDS_EARLY
from luce.ops.matmul_prefill import BLAS_ROWS
from luce.ops.moe_prefill_int8 import store_experts
from luce.ops.norm import Unnormed
from luce.ops.weight import upload_experts, upload_weight
from tests.support.emulated import EmulatedDevice
from tests.support.quant_blocks import random_tensor

EXPERTS, HIDDEN, INNER, ROWS = 5, 64, 32, 20


def _layer(
    device: EmulatedDevice, *, experts_in: str = "Q8_0", shared_in: str = "Q8_0", int8: bool = False
) -> MoELayer:
    """With a shared MLP and its gate; with `int8` a prompt's rows are multiplied as int8."""
    spec = MoE(EXPERTS, 2, INNER, INNER, "softmax", shared_gate=True)

    def tensors(name: str, *shapes: tuple[int, int]) -> list:
        return [random_tensor(name, rows, cols, seed=rows * cols + i) for i, (rows, cols) in enumerate(shapes)]

    ups, downs = (EXPERTS * INNER, HIDDEN), (EXPERTS * HIDDEN, INNER)
    experts = RoutedExperts(
        device,
        spec,
        gate_up=upload_experts(device, tensors(experts_in, ups, ups), EXPERTS),
        down=upload_experts(device, tensors(experts_in, downs), EXPERTS),
    )
    shared = GatedMLPLayer(
        device,
        GatedMLP(INNER, "silu"),
        gate_up=upload_weight(device, tensors(shared_in, (INNER, HIDDEN), (INNER, HIDDEN))),
        down=upload_weight(device, tensors(shared_in, (HIDDEN, INNER))),
    )
    for weight in (experts.gate_up, experts.down, shared.input_weight, shared.down):
        weight.int8 = int8
    if int8:
        store_experts(device, experts.gate_up, EXPERTS, gated=True)
        store_experts(device, experts.down, EXPERTS, gated=False)
    router = upload_weight(device, tensors("F32", (EXPERTS, HIDDEN), (1, HIDDEN)))
    return MoELayer(device, spec, bias=None, expert_scale=None, router=router, experts=experts, shared=shared)


def test_the_gate_of_the_shared_mlp_apart_from_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice(32)
    layer = _layer(device)
    x = np.random.default_rng(0).standard_normal((ROWS, HIDDEN)).astype(np.float32)
    joined = device.download(layer(device.upload(x)))
    monkeypatch.setattr(moe, "GATE_APART", ROWS)
    apart = device.download(layer(device.upload(x)))
    np.testing.assert_allclose(apart, joined, rtol=0, atol=1e-6 * np.abs(joined).max())
    assert np.abs(joined).max() > 0


def test_the_gate_stays_with_the_router_where_it_is_no_tile_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice(32, products=("F16", "BF16", "WGMMA"))
    layer = _layer(device)
    x = np.random.default_rng(0).standard_normal((BLAS_ROWS, HIDDEN)).astype(np.float32)
    joined = device.download(layer(device.upload(x)))
    monkeypatch.setattr(moe, "GATE_APART", BLAS_ROWS)
    np.testing.assert_array_equal(device.download(layer(device.upload(x))), joined)


def test_a_row_has_the_bits_that_it_has_alone() -> None:
    """The router, the experts and the shared MLP that joins them; other formats say that they do not keep them."""
    device = EmulatedDevice(32)
    layer = _layer(device)
    x = np.random.default_rng(1).standard_normal((MANY_ROWS, HIDDEN)).astype(np.float32)
    assert layer.invariant_rows == MANY_ROWS
    together = {rows: device.download(layer(device.upload(x[:rows]))).copy() for rows in (ROWS, MANY_ROWS)}
    for row in (0, 7, ROWS - 1, MANY_ROWS - 1):
        alone = device.download(layer(device.upload(x[row : row + 1])))[0]
        for rows, all_rows in together.items():
            if row < rows:
                np.testing.assert_array_equal(all_rows[row], alone)
    # In a step of several short prompts any number of rows.
    more = np.concatenate((x, x[:ROWS]))
    assert not np.array_equal(device.download(layer(device.upload(more)))[:MANY_ROWS], together[MANY_ROWS])
    device.batch_invariant = True
    found = device.download(layer(device.upload(more)))
    device.batch_invariant = False
    np.testing.assert_array_equal(found[:MANY_ROWS], together[MANY_ROWS])
    np.testing.assert_array_equal(found[MANY_ROWS:], together[ROWS])
    assert _layer(device, experts_in="IQ4_NL").invariant_rows == FEW_ROWS
    device.products = frozenset()
    assert _layer(device).invariant_rows == FEW_ROWS


def _norm(device: EmulatedDevice) -> Norm:
    return Norm(device.upload(np.random.default_rng(5).uniform(0.5, 2, HIDDEN).astype(np.float32)), 1e-6)


@pytest.mark.parametrize("shared_in", ["Q8_0", "Q4_0"])
def test_a_row_that_the_layer_norms(shared_in: str) -> None:
    """The bits of its norm before; other devices, more rows and a shared MLP that reads floats have no such rows."""
    device = EmulatedDevice(32, products=("F16", "BF16", "WGMMA"))
    layer, norm = _layer(device, shared_in=shared_in), _norm(device)
    assert layer.shared_joins == (shared_in == "Q8_0")
    x = device.upload(np.random.default_rng(4).standard_normal((1, HIDDEN)).astype(np.float32))
    assert layer.norms_row(1)
    bare = norm.of_sum(device, x, None, layer.input_weight, bare=True)
    assert isinstance(bare, Unnormed)
    expected = device.download(layer(norm.of_sum(device, x, None, layer.input_weight)))
    for _ in range(2):
        np.testing.assert_array_equal(device.download(layer(bare)), expected)
    assert not isinstance(norm.of_sum(device, x, x, layer.input_weight, bare=True), Unnormed)
    assert not layer.norms_row(2)
    assert not _layer(device, shared_in="F16").norms_row(1)
    assert not _layer(device, experts_in="IQ4_NL").norms_row(1)
    assert not _layer(EmulatedDevice(32)).norms_row(1)


class _Mixer(DeltaNetLayer):
    """What is multiplied by `out` is the row that comes in."""

    only_multiplies = False

    def __init__(self, device: EmulatedDevice) -> None:
        self.out = self.input_weight = upload_weight(device, [random_tensor("Q8_0", HIDDEN, HIDDEN, seed=9)])

    def mix(self, y: Any, step: Any) -> Any:
        return y


@pytest.mark.parametrize("wgmma", [True, False])
def test_a_decoder_layer_norms_a_row_in_its_experts_layer(wgmma: bool) -> None:
    """The product before it, which adds to the stream, lets that start early."""
    results, launched = {}, {}
    for rows in (1, 2):
        device = EmulatedDevice(32, products=("F16", "BF16", "WGMMA") if wgmma else ("F16", "BF16"))
        layer = DecoderLayer(_norm(device), _Mixer(device), _norm(device), _layer(device))
        stream = Residual(
            device, device.upload(np.random.default_rng(6).standard_normal((2, HIDDEN))[:rows].astype("f"))
        )
        with mock.patch.object(device, "launch", wraps=device.launch) as launch:
            layer(stream, None)  # type: ignore[arg-type]
        results[rows] = device.download(stream.settle())
        launched[rows] = {call.args[1]: call.args[4] for call in launch.call_args_list}
    np.testing.assert_array_equal(results[1][0], results[2][0])
    assert ("norm_route" in launched[1]) == wgmma
    assert ("route" in launched[1]) != wgmma
    assert launched[1]["matmul_int8"][-1] == (ADDS_EARLY if wgmma else ADDS)
    assert "norm_route" not in launched[2]


@pytest.mark.parametrize("rows", [1, FEW_ROWS])
def test_a_result_added_to_the_stream(rows: int) -> None:
    """It is the float32 sum; a shared MLP of its own, or more rows, are added behind."""
    device = EmulatedDevice(32)
    layer = _layer(device)
    x, stream = np.random.default_rng(3).standard_normal((2, rows, HIDDEN)).astype(np.float32)
    assert layer.adds(rows)
    to = device.upload(stream)
    assert layer(device.upload(x), to=to) is to
    np.testing.assert_array_equal(device.download(to), stream + device.download(layer(device.upload(x))))
    assert not layer.adds(FEW_ROWS + 1)
    assert not _layer(device, shared_in="F16").adds(rows)
    assert not _layer(device, experts_in="IQ4_NL").adds(rows)


@pytest.mark.parametrize("shared_in", ["Q8_0", "F16"])
def test_rows_of_prompts_as_int8(shared_in: str) -> None:
    """They are rounded once, for the experts and for a shared MLP that multiplies int8 too; fewer rows are not."""
    device = EmulatedDevice(products=("F16", "BF16", "WGMMA"))
    plain, own = (_layer(device, shared_in=shared_in, int8=int8) for int8 in (False, True))
    x = device.upload(np.random.default_rng(2).standard_normal((BLAS_ROWS, HIDDEN)).astype(np.float32))
    with (
        mock.patch.object(moe, "to_int8", wraps=moe.to_int8) as rounded,
        mock.patch.object(GatedMLPLayer, "__call__", autospec=True, side_effect=GatedMLPLayer.__call__) as shared,
        mock.patch.object(moe, "route", wraps=moe.route) as route,
    ):
        exact, actual = (device.download(layer(x)).astype(np.float64) for layer in (plain, own))
        few = [device.download(layer(x[: BLAS_ROWS - 1])) for layer in (plain, own)]
    assert rounded.call_count == 1
    assert [type(call.args[1]) is Int8Rows for call in shared.call_args_list[:2]] == [False, shared_in == "Q8_0"]
    assert [call.kwargs["multiplies"] for call in route.call_args_list] == [True, False, False, False]
    # Random halves of the shared MLP are far larger than what the experts make of theirs.
    assert (1e-5 if shared_in == "Q8_0" else 1e-8) < ((actual - exact) ** 2).mean() / (exact**2).mean() < 1e-3
    np.testing.assert_array_equal(*few)
