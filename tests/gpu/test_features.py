"""kernels/features.cu on a GPU."""

from __future__ import annotations

import pytest

from luce.runtime.device import Device
from tests.support import op_checks_features as checks

pytestmark = pytest.mark.gpu


def test_capture(gpu: Device) -> None:
    checks.check_capture(gpu, 17, 5120)


def test_ring(gpu: Device) -> None:
    checks.check_ring(gpu)


def test_tails(gpu: Device) -> None:
    checks.check_tails(gpu, 6)
    checks.check_tails(gpu, 5120)
