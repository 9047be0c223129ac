"""The gates, the residual addition and kernels/activation.cu against float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from luce.ops.activation import gated_activation
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support import op_checks_activation as checks
from tests.support.devices import on_devices

if TYPE_CHECKING:
    from luce.models.spec import Activation

activations = pytest.mark.parametrize("activation", ["silu", "gelu", "clamped_swiglu"])


@activations
@on_devices(
    "n, f",
    # Compiled code of the CPU takes multiples of 16, and shares more than 8 rows between threads.
    host=[(1, 1), (3, 255), (2, 704), (21, 768)],
    emulated=[(1, 1), (3, 255), (2, 2100)],
    gpu=[(1, 1), (3, 255), (16, 17408), (70000, 24), (513, 3072)],
)
def test_gated_activation(device: Device, n: int, f: int, activation: Activation) -> None:
    checks.check_gated_activation(device, n, f, activation)
    checks.check_activation_extremes(device, activation)


@activations
@on_devices(host=[], emulated=[])
def test_agrees_with_the_reference(device: Device, activation: Activation) -> None:
    x = np.random.default_rng(0).standard_normal((33, 2000)).astype(np.float32)
    actual = device.download(
        gated_activation(device, device.upload(x[:, :1000]), device.upload(x[:, 1000:]), activation)
    )
    np.testing.assert_allclose(
        actual, gated_activation(HostDevice(), x[:, :1000], x[:, 1000:], activation), rtol=2e-6, atol=1e-6
    )


@on_devices(
    "n, heads, d",
    host=[(1, 1, 8), (3, 5, 48), (2, 3, 256)],
    emulated=[(1, 1, 8), (3, 5, 48), (2, 5, 256)],
    gpu=[(1, 1, 8), (3, 5, 48), (512, 24, 256), (70000, 1, 16)],
)
def test_sigmoid_gate(device: Device, n: int, heads: int, d: int) -> None:
    checks.check_sigmoid_gate(device, n, heads, d)


@on_devices("n, heads, d", [(1, 1, 8), (3, 5, 48), (2, 3, 256)])
def test_softplus_gate(device: Device, n: int, heads: int, d: int) -> None:
    checks.check_softplus_gate(device, n, heads, d)


@on_devices("n, d", [(1, 1), (3, 257), (2, 600)])
def test_scale_and_softcap(device: Device, n: int, d: int) -> None:
    checks.check_scale_and_softcap(device, n, d)


@on_devices("n, d", [(1, 1), (3, 257), (2, 600)], gpu=[(1, 1), (3, 257), (512, 5120)])
def test_add_gated(device: Device, n: int, d: int) -> None:
    checks.check_add_gated(device, n, d)


@on_devices("n, d", [(1, 1), (3, 257), (2, 600)], gpu=[(1, 1), (3, 257), (512, 5120), (70000, 9)])
def test_add(device: Device, n: int, d: int) -> None:
    checks.check_add(device, n, d)


@on_devices("n, f", [(1, 1), (3, 257), (2, 600)], gpu=[(1, 1), (3, 257), (512, 12288)])
def test_gelu(device: Device, n: int, f: int) -> None:
    checks.check_gelu(device, n, f)


@on_devices("n, d", [(1, 1), (3, 257), (2, 600)], gpu=[(1, 1), (3, 257), (512, 5120)])
def test_add_bias(device: Device, n: int, d: int) -> None:
    checks.check_add_bias(device, n, d)


@pytest.mark.parametrize("activation", ["silu", "gelu", "clamped_swiglu"])
@on_devices("n, heads, d", host=[], emulated=[(3, 2, 24), (2, 1, 65), (2, 9, 128)], gpu=[(33, 24, 256), (3, 1, 65)])
def test_gates_as_fp16(device: Device, n: int, heads: int, d: int, activation: Activation) -> None:
    checks.check_fp16_gates(device, n, heads, d, activation)


@on_devices("n, heads, d", host=[], emulated=[(3, 2, 24), (2, 9, 128)], gpu=[(300, 24, 256), (3, 1, 64)])
def test_gate_of_halves_as_fp16(device: Device, n: int, heads: int, d: int) -> None:
    checks.check_fp16_gate_of_halves(device, n, heads, d)
