"""argmax and the best candidates on the GPU."""

from __future__ import annotations

import pytest

from luce.runtime.device import Device
from tests.support.op_checks_sample import check_argmax, check_argmax_logsumexp, check_top

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("vocab", "scale", "softcap"), [(1, 1, 0), (300, 0.5, 0), (4097, 1, 30), (9000, 2, 0)])
def test_argmax_logsumexp(gpu: Device, vocab: int, scale: float, softcap: float) -> None:
    check_argmax_logsumexp(gpu, vocab, scale, softcap)


@pytest.mark.parametrize("vocab", [1, 31, 1000, 4096, 4097, 32000, 151936, 248320, 262144])
def test_argmax(gpu: Device, vocab: int) -> None:
    check_argmax(gpu, vocab)


@pytest.mark.parametrize("vocab", [1, 31, 64, 1000, 4096, 4097, 32000, 151936, 248320, 262144, 300000])
def test_top(gpu: Device, vocab: int) -> None:
    check_top(gpu, vocab)
