"""argmax and the best candidates on the host device."""

from __future__ import annotations

import pytest

from luce.runtime.host import HostDevice
from tests.support.op_checks_sample import check_argmax, check_argmax_logsumexp, check_top


@pytest.mark.parametrize(("vocab", "scale", "softcap"), [(1, 1, 0), (300, 0.5, 0), (4097, 1, 30), (9000, 2, 0)])
def test_argmax_logsumexp(vocab: int, scale: float, softcap: float) -> None:
    check_argmax_logsumexp(HostDevice(), vocab, scale, softcap)


@pytest.mark.parametrize("vocab", [1, 2, 3, 500])
def test_argmax(vocab: int) -> None:
    check_argmax(HostDevice(), vocab)


@pytest.mark.parametrize("vocab", [1, 2, 64, 65, 500])
def test_top(vocab: int) -> None:
    check_top(HostDevice(), vocab)
