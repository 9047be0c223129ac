"""argmax and the best candidates on the host device."""

from __future__ import annotations

import pytest

from luce.runtime.host import HostDevice
from tests.support.op_checks_sample import check_argmax, check_top


@pytest.mark.parametrize("vocab", [1, 2, 3, 500])
def test_argmax(vocab: int) -> None:
    check_argmax(HostDevice(), vocab)


@pytest.mark.parametrize("vocab", [1, 2, 64, 65, 500])
def test_top(vocab: int) -> None:
    check_top(HostDevice(), vocab)
