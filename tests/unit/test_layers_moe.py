"""The mixture-of-experts layer: its many rows' product with the router without the shared MLP's gate."""

from __future__ import annotations

import numpy as np
import pytest

from luce.layers import moe
from luce.layers.mlp import GatedMLPLayer
from luce.layers.moe import MoELayer
from luce.layers.routed_experts import RoutedExperts
from luce.models.spec import GatedMLP, MoE
from luce.ops.weight import upload_experts, upload_weight
from tests.support.emulated import EmulatedDevice
from tests.support.quant_blocks import random_tensor

EXPERTS, HIDDEN, INNER, ROWS = 5, 64, 32, 20


def test_the_gate_of_the_shared_mlp_apart_from_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice(32)
    spec = MoE(EXPERTS, 2, INNER, INNER, "softmax", shared_gate=True)

    def tensors(name: str, *shapes: tuple[int, int]) -> list:
        return [random_tensor(name, rows, cols, seed=rows * cols + i) for i, (rows, cols) in enumerate(shapes)]

    ups, downs = (EXPERTS * INNER, HIDDEN), (EXPERTS * HIDDEN, INNER)
    experts = RoutedExperts(
        device,
        spec,
        gate_up=upload_experts(device, tensors("Q8_0", ups, ups), EXPERTS),
        down=upload_experts(device, tensors("Q8_0", downs), EXPERTS),
    )
    shared = GatedMLPLayer(
        device,
        GatedMLP(INNER, "silu"),
        gate_up=upload_weight(device, tensors("Q8_0", (INNER, HIDDEN), (INNER, HIDDEN))),
        down=upload_weight(device, tensors("Q8_0", (HIDDEN, INNER))),
    )
    router = upload_weight(device, tensors("F32", (EXPERTS, HIDDEN), (1, HIDDEN)))
    layer = MoELayer(device, spec, bias=None, expert_scale=None, router=router, experts=experts, shared=shared)
    x = np.random.default_rng(0).standard_normal((ROWS, HIDDEN)).astype(np.float32)
    joined = device.download(layer(device.upload(x)))
    monkeypatch.setattr(moe, "GATE_APART", ROWS)
    apart = device.download(layer(device.upload(x)))
    np.testing.assert_allclose(apart, joined, rtol=0, atol=1e-6 * np.abs(joined).max())
    assert np.abs(joined).max() > 0
