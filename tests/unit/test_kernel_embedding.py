"""kernels/embedding.cu on the emulated device."""

from __future__ import annotations

import pytest

from luce.runtime.device import Device
from tests.support.op_checks_embedding import check_embed, check_nothing, check_take_rows
from tests.support.quant_blocks import FORMATS, PLAIN, block_cols


@pytest.mark.parametrize("name", FORMATS)
def test_embed_equals_gguf(emulated: Device, name: str) -> None:
    check_embed(emulated, name, rows=5, cols=max(256, 3 * block_cols(name)), seed=1)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("cols", [1, 3, 67])
def test_embed_rows_of_any_length(emulated: Device, name: str, cols: int) -> None:
    check_embed(emulated, name, rows=6, cols=cols, seed=2)


@pytest.mark.parametrize(("n", "m", "features"), [(1, 1, 1), (7, 3, 300), (3, 9, 33)])
def test_take_rows(emulated: Device, n: int, m: int, features: int) -> None:
    check_take_rows(emulated, n, m, features)


def test_nothing(emulated: Device) -> None:
    check_nothing(emulated)
