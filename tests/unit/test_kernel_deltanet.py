"""kernels/deltanet.cu and deltanet_chunk.cu on the emulated device."""

from __future__ import annotations

import pytest

from luce.runtime.device import Device
from tests.support import op_checks_deltanet as checks


@pytest.mark.parametrize("decay", ["model", "none", "strong", "mixed"])
@pytest.mark.parametrize("lengths", [(1, 16, 5), (17, 1, 63), (64, 65), (130,)])
def test_formula(emulated: Device, lengths: tuple[int, ...], decay: checks.Decay) -> None:
    checks.check_formula(emulated, lengths, key_heads=1, heads=2, d=64, decay=decay)


@pytest.mark.parametrize(("key_heads", "heads", "d"), [(2, 6, 64), (3, 3, 64), (1, 5, 64), (1, 2, 128)])
def test_shapes(emulated: Device, key_heads: int, heads: int, d: int) -> None:
    checks.check_formula(emulated, (3, 70), key_heads=key_heads, heads=heads, d=d)


@pytest.mark.parametrize("taps", [2, 3])
@pytest.mark.parametrize("lengths", [(1, 2, 3), (40, 1, 16, 33)])
def test_taps(emulated: Device, lengths: tuple[int, ...], taps: int) -> None:
    checks.check_formula(emulated, lengths, key_heads=2, heads=4, d=64, taps=taps)


@pytest.mark.parametrize(("rows", "d"), [(2, 64), (16, 64), (3, 128)])
def test_single_steps(emulated: Device, rows: int, d: int) -> None:
    checks.check_single_steps(emulated, rows, key_heads=1, heads=2, d=d)


@pytest.mark.parametrize(
    ("speculative", "accepted", "then"), [(2, 1, 1), (16, 16, 5), (6, 2, 16), (3, 3, 70), (5, 4, 0)]
)
def test_speculative_rows(emulated: Device, speculative: int, accepted: int, then: int) -> None:
    checks.check_rollback(emulated, speculative, accepted, then, heads=2, d=64, taps=2 if then == 5 else 4)


@pytest.mark.parametrize(
    ("parents", "path"),
    [
        ((0, 1, 2), (0, 1)),
        ((0, 1, 0, 3, 3, 0), (0, 3, 5)),
        ((0, 0, 0), (0, 3)),
        ((0, 1, 2, 3, 2, 5, 1, 0), (0, 1, 2, 5)),
    ],
)
def test_trees(emulated: Device, parents: tuple[int, ...], path: tuple[int, ...]) -> None:
    checks.check_tree(emulated, parents, path, heads=2, d=64, taps=3 if len(path) == 4 else 4)


def test_spans_do_not_depend_on_their_company(emulated: Device) -> None:
    checks.check_company(emulated, (1, 17, 16, 70, 3), key_heads=1, heads=2, d=64)


@pytest.mark.parametrize("decay", ["model", "none"])
def test_cut_anywhere(emulated: Device, decay: checks.Decay) -> None:
    checks.check_cuts(emulated, (1, 30, 16, 100, 7), key_heads=1, heads=2, d=64, decay=decay)


@pytest.mark.parametrize("rows", [16, 40])
def test_far_out(emulated: Device, rows: int) -> None:
    checks.check_far_out(emulated, rows)


def test_no_rows(emulated: Device) -> None:
    checks.check_no_rows(emulated)


@pytest.mark.parametrize(("lengths", "d"), [((1,), 128), ((2, 1), 64), ((5, 1, 3), 128)])
def test_in_bytes(emulated: Device, lengths: tuple[int, ...], d: int) -> None:
    checks.check_in_bytes(emulated, lengths, key_heads=1, heads=2, d=d)
