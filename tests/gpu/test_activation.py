"""kernels/activation.cu on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from luce.models.spec import Activation
from luce.ops.activation import gated_activation
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support import op_checks_activation as checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(("n", "f"), [(1, 1), (3, 255), (16, 17408), (70000, 24), (513, 3072)])
def test_gated_activation(gpu: Device, n: int, f: int, activation: Activation) -> None:
    checks.check_gated_activation(gpu, n, f, activation)
    checks.check_activation_extremes(gpu, activation)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_agrees_with_the_reference(gpu: Device, activation: Activation) -> None:
    x = np.random.default_rng(0).standard_normal((33, 2000)).astype(np.float32)
    actual = gpu.download(gated_activation(gpu, gpu.upload(x[:, :1000]), gpu.upload(x[:, 1000:]), activation))
    np.testing.assert_allclose(
        actual, gated_activation(HostDevice(), x[:, :1000], x[:, 1000:], activation), rtol=2e-6, atol=1e-6
    )


@pytest.mark.parametrize(("n", "heads", "d"), [(1, 1, 8), (3, 5, 48), (512, 24, 256), (70000, 1, 16)])
def test_sigmoid_gate(gpu: Device, n: int, heads: int, d: int) -> None:
    checks.check_sigmoid_gate(gpu, n, heads, d)


@pytest.mark.parametrize(("n", "heads", "d"), [(1, 1, 8), (3, 5, 48), (2, 3, 256)])
def test_softplus_gate(gpu: Device, n: int, heads: int, d: int) -> None:
    checks.check_softplus_gate(gpu, n, heads, d)


@pytest.mark.parametrize(("n", "d"), [(1, 1), (3, 257), (2, 600)])
def test_scale_and_softcap(gpu: Device, n: int, d: int) -> None:
    checks.check_scale_and_softcap(gpu, n, d)


@pytest.mark.parametrize(("n", "d"), [(1, 1), (3, 257), (512, 5120)])
def test_add_gated(gpu: Device, n: int, d: int) -> None:
    checks.check_add_gated(gpu, n, d)


@pytest.mark.parametrize(("n", "d"), [(1, 1), (3, 257), (512, 5120), (70000, 9)])
def test_add(gpu: Device, n: int, d: int) -> None:
    checks.check_add(gpu, n, d)
