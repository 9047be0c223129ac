"""embed and take_rows on the host device."""

from __future__ import annotations

import pytest

from luce.runtime.host import HostDevice
from tests.support.op_checks_embedding import check_embed, check_nothing, check_take_rows
from tests.support.quant_blocks import FORMATS, block_cols


@pytest.mark.parametrize("name", FORMATS)
def test_embed_equals_gguf(name: str) -> None:
    check_embed(HostDevice(), name, rows=7, cols=2 * max(16, block_cols(name)), seed=3)


def test_take_rows() -> None:
    check_take_rows(HostDevice(), 5, 8, 11)


def test_nothing() -> None:
    check_nothing(HostDevice())
