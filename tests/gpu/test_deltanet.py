"""kernels/deltanet.cu and deltanet_chunk.cu on a GPU."""

from __future__ import annotations

import pytest

from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support import op_checks_deltanet as checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("decay", ["model", "none", "strong", "mixed"])
@pytest.mark.parametrize("lengths", [(1, 2, 16, 5), (17, 1, 63), (64, 65, 500)])
def test_formula(gpu: Device, lengths: tuple[int, ...], decay: checks.Decay) -> None:
    checks.check_formula(gpu, lengths, key_heads=2, heads=6, d=128, decay=decay)


@pytest.mark.parametrize(
    ("key_heads", "heads", "d"), [(1, 1, 64), (2, 4, 64), (3, 3, 64), (1, 5, 128), (16, 48, 128), (16, 32, 128)]
)
def test_shapes(gpu: Device, key_heads: int, heads: int, d: int) -> None:
    checks.check_formula(gpu, (3, 150, 1), key_heads=key_heads, heads=heads, d=d)


@pytest.mark.parametrize("taps", [2, 3])
@pytest.mark.parametrize("lengths", [(1, 2, 3), (500, 1, 16, 33)])
def test_taps(gpu: Device, lengths: tuple[int, ...], taps: int) -> None:
    checks.check_formula(gpu, lengths, key_heads=2, heads=4, d=64, taps=taps)


def test_agrees_with_the_reference(gpu: Device) -> None:
    checks.check_agreement(gpu, HostDevice(), (1, 200, 16, 33, 1), key_heads=16, heads=48, d=128)


@pytest.mark.parametrize("rows", range(1, 17))
def test_single_steps(gpu: Device, rows: int) -> None:
    checks.check_single_steps(gpu, rows, key_heads=2, heads=6, d=128)


@pytest.mark.parametrize("d", [64, 128])
def test_spans_do_not_depend_on_their_company(gpu: Device, d: int) -> None:
    checks.check_company(gpu, (1, 17, 16, 300, 3, 64, 1, 1), key_heads=1, heads=3, d=d)
    checks.check_company(gpu, (1,) * 64, key_heads=1, heads=3, d=d)


@pytest.mark.parametrize("decay", ["model", "none", "mixed"])
def test_cut_anywhere(gpu: Device, decay: checks.Decay) -> None:
    checks.check_cuts(gpu, (1, 30, 16, 300, 65, 7), key_heads=2, heads=4, d=128, decay=decay)


@pytest.mark.parametrize("rows", [16, 40])
def test_far_out(gpu: Device, rows: int) -> None:
    checks.check_far_out(gpu, rows)


def test_no_rows(gpu: Device) -> None:
    checks.check_no_rows(gpu)


@pytest.mark.parametrize("then", [0, 1, 16, 200])
@pytest.mark.parametrize(("speculative", "accepted"), [(2, 1), (16, 16), (16, 5)])
def test_speculative_rows(gpu: Device, speculative: int, accepted: int, then: int) -> None:
    checks.check_rollback(gpu, speculative, accepted, then, heads=6, d=128)


@pytest.mark.parametrize(
    ("parents", "path"),
    [
        ((0, 1, 2), (0, 1)),
        ((0, 1, 0, 3, 3, 0), (0, 3, 5)),
        ((0, 0, 0), (0, 3)),
        ((0, 1, 2, 3, 2, 5, 1, 0), (0, 1, 2, 5)),
    ],
)
def test_trees(gpu: Device, parents: tuple[int, ...], path: tuple[int, ...]) -> None:
    checks.check_tree(gpu, parents, path, heads=6, d=128)


@pytest.mark.parametrize("lengths", [(1,), (2, 1), (5, 1, 3), (16,)])
def test_in_bytes(gpu: Device, lengths: tuple[int, ...]) -> None:
    checks.check_in_bytes(gpu, lengths, key_heads=16, heads=32, d=128)
