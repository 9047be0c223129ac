"""Attention of a text of which rows read some blocks, and kernels/block_sparse.cu."""

from __future__ import annotations

import numpy as np
import pytest

from luce.ops import block_sparse
from luce.ops.block_sparse import BLOCK, is_dense
from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support import op_checks_block_sparse as checks
from tests.support.devices import ATTENTION_EMULATED, ATTENTION_GPU, on_devices

PATHS = {"emulated_devices": ATTENTION_EMULATED, "gpu_devices": ATTENTION_GPU}
SHAPE = (2, 1, 32)


@on_devices(
    "n, rows, shape, alpha",
    host=[
        (1300, 512, (4, 2, 32), 0.12),
        (1300, 128, (4, 2, 32), 0.12),
        (1281, 512, SHAPE, 0.12),
        (1664, 2048, (3, 3, 48), 0.5),
        (2100, 384, (4, 1, 64), 0.02),
    ],
    emulated=[(1281, 768, SHAPE, 0.12)],
    gpu=[
        (1300, 512, (4, 2, 128), 0.12),
        (1281, 2048, SHAPE, 0.12),
        (4000, 1024, (16, 8, 128), 0.12),
        (2100, 384, (4, 1, 64), 0.02),
    ],
    **PATHS,
)
def test_the_result_is_that_of_the_formulas(
    device: Device, n: int, rows: int, shape: tuple[int, int, int], alpha: float
) -> None:
    checks.check(device, n, rows, shape, alpha)


@on_devices("begin", host=[], emulated=[70], gpu=[70, 1000], **PATHS)
def test_pages_of_query_blocks_are_listed(device: Device, begin: int) -> None:
    checks.check_lists(device, begin, heads=4, kv_heads=2)


# Steps of 16 rows or fewer are split otherwise where nothing is left out.
@on_devices("n, rows", host=[(1300, 384)], emulated=[(1300, 768)], gpu=[(1300, 384), (5000, 2048)], **PATHS)
def test_with_all_blocks_the_bits_are_those_of_attention(device: Device, n: int, rows: int) -> None:
    text = checks.Text.random(n, SHAPE, seed=1, spread=0.2)
    found, expected = (checks.computed(device, text, rows, alpha) for alpha in (1e-30, None))
    if isinstance(device, HostDevice) and not isinstance(device, CpuDevice):
        # NumPy multiplies matrices of other shapes in another order.
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    else:
        np.testing.assert_array_equal(found, expected)


def test_equal_scores_keep_all_blocks() -> None:
    text = checks.Text.random(1400, SHAPE, seed=2)
    same = checks.Text(text.q, np.ones_like(text.k), text.v, text.scale)
    found, expected = (checks.computed(HostDevice(), same, 512, alpha) for alpha in (0.999, None))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("blocks", [1, 2, 5, 8, 9, 12])
def test_blocks_that_are_read_whatever_their_scores_are(blocks: int) -> None:
    """By an alpha that no other block reaches: the first two, the newest four, and all of the last two rows' blocks."""
    rng = np.random.default_rng(blocks)
    n = blocks * BLOCK
    text = checks.Text.random(n, (1, 1, 16), seed=3)
    k = text.k.copy()
    # Block 0 has the largest score by far.
    k[:BLOCK], q = 40.0, np.abs(text.q) + 1.0
    apart = checks.Text(q, k, rng.standard_normal(text.v.shape), text.scale)
    read, _ = checks.blocks_read(apart, 0.9)
    expected = [[b <= m and checks.forced(b, m, blocks) for b in range(blocks)] for m in range(blocks)]
    np.testing.assert_array_equal(read[0], expected)
    found = checks.computed(HostDevice(), apart, 256, 0.9)
    np.testing.assert_allclose(found, checks.reference(apart, read), rtol=1e-3, atol=1e-3)
    assert is_dense(n) == (blocks <= 8) == bool(np.tril(np.ones((blocks, blocks)))[read[0] == 0].sum() == 0)


def test_memory_is_that_of_the_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of K and V, means, the lists of a step, its queries and its results."""
    n, rows, (heads, kv_heads, d) = 1300, 256, (4, 2, 32)
    blocks = 11
    copies = blocks * BLOCK * 2 * kv_heads * d * 2
    expected = copies + blocks * kv_heads * d * 4 + heads * 2 * blocks * (4 + 8 + 8) + 2 * rows * heads * d * 4
    assert block_sparse.block_sparse_bytes(n, rows, heads, 2 * kv_heads * d * 2, kv_heads, d) == expected
