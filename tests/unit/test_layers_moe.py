"""The mixture-of-experts layer: a row's bits in company, and many rows' product with the router without the gate."""

from __future__ import annotations

import numpy as np
import pytest

from luce.layers import moe
from luce.layers.mlp import GatedMLPLayer
from luce.layers.moe import MoELayer
from luce.layers.routed_experts import RoutedExperts
from luce.models.spec import GatedMLP, MoE
from luce.ops.matmul import FEW_ROWS, MANY_ROWS
from luce.ops.matmul_prefill import BLAS_ROWS
from luce.ops.weight import upload_experts, upload_weight
from tests.support.emulated import EmulatedDevice
from tests.support.quant_blocks import random_tensor

EXPERTS, HIDDEN, INNER, ROWS = 5, 64, 32, 20


def _layer(device: EmulatedDevice, *, experts_in: str = "Q8_0") -> MoELayer:
    """With a shared MLP and its gate."""
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
        gate_up=upload_weight(device, tensors("Q8_0", (INNER, HIDDEN), (INNER, HIDDEN))),
        down=upload_weight(device, tensors("Q8_0", (HIDDEN, INNER))),
    )
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
    assert _layer(device, experts_in="IQ4_NL").invariant_rows == FEW_ROWS
    device.products = frozenset()
    assert _layer(device).invariant_rows == FEW_ROWS
