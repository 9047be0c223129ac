"""kernels/activation.cu on the emulated device."""

from __future__ import annotations

import pytest

from luce.models.spec import Activation
from luce.runtime.device import Device
from tests.support import op_checks_activation as checks


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(("n", "f"), [(1, 1), (3, 255), (2, 2100)])
def test_gated_activation(emulated: Device, n: int, f: int, activation: Activation) -> None:
    checks.check_gated_activation(emulated, n, f, activation)
    checks.check_activation_extremes(emulated, activation)


@pytest.mark.parametrize(("n", "heads", "d"), [(1, 1, 8), (3, 5, 48), (2, 5, 256)])
def test_sigmoid_gate(emulated: Device, n: int, heads: int, d: int) -> None:
    checks.check_sigmoid_gate(emulated, n, heads, d)


@pytest.mark.parametrize(("n", "heads", "d"), [(1, 1, 8), (3, 5, 48), (2, 3, 256)])
def test_softplus_gate(emulated: Device, n: int, heads: int, d: int) -> None:
    checks.check_softplus_gate(emulated, n, heads, d)


@pytest.mark.parametrize(("n", "d"), [(1, 1), (3, 257), (2, 600)])
def test_scale_and_softcap(emulated: Device, n: int, d: int) -> None:
    checks.check_scale_and_softcap(emulated, n, d)


@pytest.mark.parametrize(("n", "d"), [(1, 1), (3, 257), (2, 600)])
def test_add_gated(emulated: Device, n: int, d: int) -> None:
    checks.check_add_gated(emulated, n, d)


@pytest.mark.parametrize(("n", "d"), [(1, 1), (3, 257), (2, 600)])
def test_add(emulated: Device, n: int, d: int) -> None:
    checks.check_add(emulated, n, d)
