"""The NumPy activations against float64."""

from __future__ import annotations

import pytest

from luce.models.spec import Activation
from luce.runtime.host import HostDevice
from tests.support import op_checks_activation as checks


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(("n", "f"), [(1, 1), (3, 255), (2, 700)])
def test_gated_activation(n: int, f: int, activation: Activation) -> None:
    checks.check_gated_activation(HostDevice(), n, f, activation)
    checks.check_activation_extremes(HostDevice(), activation)


@pytest.mark.parametrize(("n", "heads", "d"), [(1, 1, 8), (3, 5, 48), (2, 3, 256)])
def test_sigmoid_gate(n: int, heads: int, d: int) -> None:
    checks.check_sigmoid_gate(HostDevice(), n, heads, d)


@pytest.mark.parametrize(("n", "heads", "d"), [(1, 1, 8), (3, 5, 48), (2, 3, 256)])
def test_softplus_gate(n: int, heads: int, d: int) -> None:
    checks.check_softplus_gate(HostDevice(), n, heads, d)


@pytest.mark.parametrize(("n", "d"), [(1, 1), (3, 257), (2, 600)])
def test_scale_and_softcap(n: int, d: int) -> None:
    checks.check_scale_and_softcap(HostDevice(), n, d)


@pytest.mark.parametrize(("n", "d"), [(1, 1), (3, 257), (2, 600)])
def test_add_gated(n: int, d: int) -> None:
    checks.check_add_gated(HostDevice(), n, d)


@pytest.mark.parametrize(("n", "d"), [(1, 1), (3, 257), (2, 600)])
def test_add(n: int, d: int) -> None:
    checks.check_add(HostDevice(), n, d)
