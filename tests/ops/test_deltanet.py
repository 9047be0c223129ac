"""Gated DeltaNet against float64: NumPy, luce/cpu_kernels/deltanet.py and kernels/deltanet*.cu."""

from __future__ import annotations

import itertools

import pytest

from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support import op_checks_deltanet as checks
from tests.support.devices import COMPILED, EMULATED, on_devices

Lengths = tuple[int, ...]
#: all kernels of chunks
CHUNKED = (*EMULATED, "emulated, wgmma")


@pytest.mark.parametrize("decay", ["model", "none", "strong", "mixed"])
@on_devices(
    "lengths, key_heads, heads, d",
    # Compiled code of the CPU leaves heads of 24 to NumPy.
    host=[(lengths, 2, 6, d) for lengths in ((1, 2, 16, 5), (17, 1, 63), (64, 65, 200)) for d in (24, 48)],
    emulated=[(lengths, 1, 2, 64) for lengths in ((1, 16, 5), (17, 1, 63), (64, 65), (130,))],
    emulated_devices=CHUNKED,
    gpu=[(lengths, 2, 6, 128) for lengths in ((1, 2, 16, 5), (17, 1, 63), (64, 65, 500))],
)
def test_formula(device: Device, lengths: Lengths, key_heads: int, heads: int, d: int, decay: checks.Decay) -> None:
    checks.check_formula(device, lengths, key_heads=key_heads, heads=heads, d=d, decay=decay)


@on_devices(
    "lengths, key_heads, heads, d",
    host=[((3, 70), *sizes) for sizes in [(1, 1, 16), (3, 3, 80), (2, 4, 128), (1, 2, 256), (1, 1, 272)]],
    emulated=[((3, 70), 2, 6, 64), ((3, 70), 3, 3, 64), ((3, 70), 1, 5, 64), ((3, 70), 1, 2, 128)],
    emulated_devices=CHUNKED,
    gpu=[
        ((3, 150, 1), *sizes)
        for sizes in [(1, 1, 64), (2, 4, 64), (3, 3, 64), (1, 5, 128), (16, 48, 128), (16, 32, 128)]
    ],
)
def test_shapes(device: Device, lengths: Lengths, key_heads: int, heads: int, d: int) -> None:
    checks.check_formula(device, lengths, key_heads=key_heads, heads=heads, d=d)


@pytest.mark.parametrize("taps", [2, 3])
@on_devices(
    "lengths, d",
    host=[((1, 2, 3), 16), ((70, 1, 33), 16)],
    emulated=[((1, 2, 3), 64), ((40, 1, 16, 33), 64)],
    gpu=[((1, 2, 3), 64), ((500, 1, 16, 33), 64)],
)
def test_taps(device: Device, lengths: Lengths, d: int, taps: int) -> None:
    checks.check_formula(device, lengths, key_heads=2, heads=4, d=d, taps=taps)


@on_devices(host=[], emulated=[])
def test_agrees_with_the_reference(device: Device) -> None:
    checks.check_agreement(device, HostDevice(), (1, 200, 16, 33, 1), key_heads=16, heads=48, d=128)


@on_devices(
    "rows, key_heads, heads, d",
    host=[(rows, 2, 4, 64) for rows in (1, 9, 16)],
    emulated=[(2, 1, 2, 64), (16, 1, 2, 64), (3, 1, 2, 128)],
    gpu=[(rows, 2, 6, 128) for rows in range(1, 17)],
)
def test_single_steps(device: Device, rows: int, key_heads: int, heads: int, d: int) -> None:
    checks.check_single_steps(device, rows, key_heads=key_heads, heads=heads, d=d)


@on_devices(
    "count, key_heads, heads, d, taps",
    host=[],
    # A block of the emulated device has up to 8 rows, more than there are states in its shared memory.
    emulated=[(19, 1, 3, 64, 4), (11, 1, 2, 64, 2), (5, 1, 3, 128, 4)],
    emulated_devices=("emulated, wgmma",),
    gpu=[(64, 16, 48, 128, 4), (16, 16, 32, 128, 4), (200, 2, 6, 64, 3)],
)
def test_many_spans(
    device: Device, monkeypatch: pytest.MonkeyPatch, count: int, key_heads: int, heads: int, d: int, taps: int
) -> None:
    checks.check_many_spans(device, monkeypatch, count, key_heads=key_heads, heads=heads, d=d, taps=taps)


@on_devices(
    "split, count, heads, taps",
    host=[],
    emulated=[(2, 1, 2, 4), (4, 2, 1, 4), (4, 1, 1, 2)],
    emulated_devices=("emulated, wgmma",),
    gpu=[(2, 1, 48, 4), (4, 1, 32, 4), (2, 3, 16, 3), (4, 9, 3, 2)],
)
def test_blocks_that_share_a_head(
    device: Device, monkeypatch: pytest.MonkeyPatch, split: int, count: int, heads: int, taps: int
) -> None:
    checks.check_shared_heads(device, monkeypatch, split, count, heads=heads, taps=taps)


@on_devices(
    "draft, accepted, then, heads, d, taps",
    host=[
        (*drafted, then, 4, 32, 4)
        for drafted, then in itertools.product([(2, 1), (8, 8), (16, 5), (16, 16)], [0, 1, 9, 70])
    ],
    emulated=[
        (draft, accepted, then, 2, 64, 2 if then == 5 else 4)
        for draft, accepted, then in [(2, 1, 1), (16, 16, 5), (6, 2, 16), (3, 3, 70), (5, 4, 0)]
    ],
    gpu=[
        (*drafted, then, 6, 128, 4) for drafted, then in itertools.product([(2, 1), (16, 16), (16, 5)], [0, 1, 16, 200])
    ],
)
def test_draft_rows(device: Device, draft: int, accepted: int, then: int, heads: int, d: int, taps: int) -> None:
    checks.check_rollback(device, draft, accepted, then, heads=heads, d=d, taps=taps)


TREES: list[tuple[Lengths, Lengths]] = [
    ((0, 1, 2), (0, 1)),
    ((0, 1, 0, 3, 3, 0), (0, 3, 5)),
    ((0, 0, 0), (0, 3)),
    ((0, 1, 2, 3, 2, 5, 1, 0), (0, 1, 2, 5)),
]


@on_devices(
    "parents, path, heads, d, taps",
    host=[(*tree, 4, 32, 4) for tree in TREES],
    emulated=[(*tree, 2, 64, 3 if len(tree[1]) == 4 else 4) for tree in TREES],
    gpu=[(*tree, 6, 128, 4) for tree in TREES],
)
def test_trees(device: Device, parents: Lengths, path: Lengths, heads: int, d: int, taps: int) -> None:
    checks.check_tree(device, parents, path, heads=heads, d=d, taps=taps)


@on_devices(
    "steps, heads, d",
    host=[([(1, 17, 16, 70, 3), (1,) * 20], 3, 32)],
    host_devices=COMPILED,
    emulated=[([(1, 17, 16, 70, 3)], 2, 64)],
    emulated_devices=CHUNKED,
    gpu=[([(1, 17, 16, 300, 3, 64, 1, 1), (1,) * 64], 3, d) for d in (64, 128)],
)
def test_spans_do_not_depend_on_their_neighbours(device: Device, steps: list[Lengths], heads: int, d: int) -> None:
    for lengths in steps:
        checks.check_neighbours(device, lengths, key_heads=1, heads=heads, d=d)


@on_devices(
    "lengths, key_heads, heads, d, decay",
    host=[((1, 30, 16, 100, 7), 1, 2, 32, decay) for decay in ("none", "mixed")],
    emulated=[((1, 30, 16, 100, 7), 1, 2, 64, decay) for decay in ("model", "none")],
    emulated_devices=CHUNKED,
    gpu=[((1, 30, 16, 300, 65, 7), 2, 4, 128, decay) for decay in ("model", "none", "mixed")],
)
def test_cut_anywhere(
    device: Device, lengths: Lengths, key_heads: int, heads: int, d: int, decay: checks.Decay
) -> None:
    checks.check_cuts(device, lengths, key_heads=key_heads, heads=heads, d=d, decay=decay)


@on_devices(
    "lengths, decay",
    host=[((1, 30, 16, 100, 7), decay) for decay in ("none", "mixed")],
    host_devices=COMPILED,
    emulated=[],
    gpu=[],
)
def test_cut_anywhere_to_the_same_bits(device: Device, lengths: Lengths, decay: checks.Decay) -> None:
    checks.check_cuts(device, lengths, key_heads=1, heads=2, d=32, decay=decay, exact=True)


@on_devices("rows", [16, 40], emulated_devices=CHUNKED)
def test_far_out(device: Device, rows: int) -> None:
    checks.check_far_out(device, rows)


@on_devices("rows", [16, 70], emulated_devices=CHUNKED)
def test_tiny_rates(device: Device, rows: int) -> None:
    checks.check_tiny_rates(device, rows)


@on_devices("rows", [16, 150], emulated_devices=CHUNKED)
def test_same_keys(device: Device, rows: int) -> None:
    checks.check_same_keys(device, rows)


@on_devices()
def test_no_rows(device: Device) -> None:
    checks.check_no_rows(device)


@on_devices(
    "lengths, key_heads, heads, d",
    host=[],
    emulated=[((1,), 1, 2, 128), ((2, 1), 1, 2, 64), ((5, 1, 3), 1, 2, 128)],
    gpu=[(lengths, 16, 32, 128) for lengths in ((1,), (2, 1), (5, 1, 3), (16,))],
)
def test_quantised_output(device: Device, lengths: Lengths, key_heads: int, heads: int, d: int) -> None:
    checks.check_quantised_output(device, lengths, key_heads=key_heads, heads=heads, d=d)


@on_devices(
    "rows, key_heads, heads, d",
    host=[],
    emulated=[(17, 1, 3, 64), (20, 1, 1, 128)],
    emulated_devices=CHUNKED,
    gpu=[(17, 1, 3, 64), (300, 16, 48, 128)],
)
def test_output_as_fp16(device: Device, rows: int, key_heads: int, heads: int, d: int) -> None:
    checks.check_fp16_output(device, rows, key_heads=key_heads, heads=heads, d=d)


@pytest.mark.parametrize("d", [64, 128])
@on_devices(host=[], gpu=[], emulated_devices=("emulated, 32 lanes", "emulated, wgmma"))
def test_little_shared_memory(device: Device, d: int) -> None:
    """Then delta_chunks computes the chunks, to other bits than delta_chunks_mma and delta_chunks_wgmma."""
    case = checks.make_case(70, key_heads=1, heads=2, d=d)
    whole, _ = checks.run(device, case, [(0, 0, 70, 3)])
    device.shared_limit = 64 << 10
    checks.check_formula(device, (3, 70), key_heads=1, heads=2, d=d)
    assert (checks.run(device, case, [(0, 0, 70, 3)])[0] != whole).any()


@on_devices(
    "rows, key_heads, heads, d, taps",
    host=[],
    emulated=[(17, 2, 8, 64, 4), (67, 1, 8, 128, 3)],
    emulated_devices=CHUNKED,
    gpu=[(17, 2, 8, 64, 3), (300, 16, 48, 128, 4)],
)
def test_inputs_as_halves(device: Device, rows: int, key_heads: int, heads: int, d: int, taps: int) -> None:
    checks.check_halves(device, rows, key_heads=key_heads, heads=heads, d=d, taps=taps)
