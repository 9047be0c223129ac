"""A test of the tests: a kernel is broken in one place, and the checks of its op on the emulated device must fail.

Every barrier is dropped once, and every wait for copies in the background, for blocks of a cluster or for what blocks
post, every line of gates, every LUCE_LANES becomes 32 once, every loop over a norm's row goes one element too far, and
a reduction swaps two lanes. The edited sources are copies; launches find them through the device's `kernels`.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from _pytest.mark import ParameterSet

from luce.errors import DeviceError
from luce.ops.matmul_prefill import BLAS_ROWS
from luce.runtime.device import Device
from tests.support import (
    op_checks_attention,
    op_checks_block_sparse,
    op_checks_deltanet,
    op_checks_matmul,
    op_checks_moe,
    op_checks_moe_prefill,
    op_checks_moe_prefill_int8,
    op_checks_norm,
    op_checks_qkv,
    op_checks_sample,
    op_checks_tail_attention,
)
from tests.support.emulated import EmulatedDevice
from tests.support.emulated_build import KERNELS

pytestmark = pytest.mark.emulated

# All of reduce.h, and two sums in a row.
REDUCTIONS = """
#include "reduce.h"
extern "C" __global__ void reductions(const float* x, float* out) {
    luce_await();
    int t = luce_thread();
    out[t] = luce_block_sum(x[t]);
    out[512 + t] = luce_block_sum(2 * x[t]);
    out[1024 + t] = luce_block_max(x[t]);
    out[1536 + t] = luce_lane_sum(x[t]);
    out[2048 + t] = luce_lane_max(x[t]);
}
"""


def _reduce(device: Device) -> None:
    x = np.random.default_rng(0).permutation(512).astype(np.float32)
    out = device.empty((5, 512))
    device.launch("reductions", "reductions", (1,), (512,), (device.upload(x), out))
    waves = x.reshape(-1, device.lanes)
    expected = [np.repeat(v, 512) for v in (x.sum(), 2 * x.sum(), x.max())]
    expected += [np.repeat(v, device.lanes) for v in (waves.sum(1), waves.max(1))]
    np.testing.assert_array_equal(device.download(out), expected)


def _norm(device: Device) -> None:
    op_checks_norm.check_rms_norm(device, 2, 1000)
    op_checks_norm.check_add_rms_norm(device, 2, 1000)
    op_checks_norm.check_quantised_norm(device, 3, 992, adding=True, group=128)
    op_checks_norm.check_add_rms_norm(device, 2, 8203)
    for adding in (True, False):
        op_checks_norm.check_fp16_norm(device, 2, 1000, adding=adding)
    op_checks_norm.check_added_halves(device, 2, 2504)
    for d in (8203, 8204):
        op_checks_norm.check_fp16_norm(device, 2, d, adding=True)
    op_checks_norm.check_head_rms_norm(device, 2, 5, 80)
    op_checks_norm.check_layer_norm(device, 4, 1000, biased=True)


def _attention(device: Device) -> None:
    device.products = frozenset()
    op_checks_attention.check_shape(device, 6, 2, 48, [(63, 3), (300, 1), (250, 20)])
    op_checks_attention.check_shape(device, 3, 1, 16, [(600, 1), (570, 20)])
    op_checks_attention.check_shape(device, 1, 1, 256, [(63, 3)])
    op_checks_attention.check_rows_alone(device, 1, 1, 64, 760, None)


def _attention_mma(device: Device) -> None:
    op_checks_attention.check_shape(device, 6, 2, 48, [(63, 3), (250, 20)])
    op_checks_attention.check_shape(device, 2, 1, 16, [(4093, 6)])  # splits of two lengths
    op_checks_attention.check_missing_pages(device)


def _attention_wgmma(device: Device) -> None:
    device.products |= {"WGMMA"}
    _attention_mma(device)
    op_checks_attention.check_shape(device, 6, 1, 16, [(4093, 6)])  # splits of two lengths, in larger tiles
    op_checks_attention.check_shape(device, 1, 1, 256, [(500, 20)])  # more units than slots
    op_checks_attention.check_types(device, "q8_0", "q8_0", 6, 2, 64, [(63, 20)])
    op_checks_attention.check_stale(device, 1, 1, 64, 20, math.nan)


def _deltanet(device: Device) -> None:
    op_checks_deltanet.check_formula(device, (1, 16, 5), key_heads=1, heads=2, d=128)
    op_checks_deltanet.check_single_steps(device, 3, key_heads=1, heads=2, d=64)
    op_checks_deltanet.check_rollback(device, 5, 3, 2, heads=2, d=64)
    op_checks_deltanet.check_tree(device, (0, 1, 0, 3, 3, 0), (0, 3, 5), heads=2, d=64)
    if _shares_heads(device):
        op_checks_deltanet.check_rollback(device, 5, 3, 2, heads=1, d=128)


def _shares_heads(device: Device) -> bool:
    """Whether blocks share the device's heads of 128 now."""
    if device.lanes == 32:
        device.products |= {"WGMMA"}
        device.multiprocessors = 4
    return device.lanes == 32


def _deltanet_step(device: Device) -> None:
    if _shares_heads(device):
        op_checks_deltanet.check_formula(device, (1,), key_heads=1, heads=1, d=128)


def _deltanet_mma(device: Device) -> None:
    op_checks_deltanet.check_formula(device, (150, 17), key_heads=1, heads=2, d=128)


def _deltanet_wgmma(device: Device) -> None:
    if device.lanes == 32:
        device.products |= {"WGMMA"}
    _deltanet_mma(device)


def _deltanet_many(device: Device) -> None:
    if device.lanes == 32:
        device.products |= {"WGMMA"}
    op_checks_deltanet.check_formula(device, (1,) * 19, key_heads=1, heads=3, d=64)


def _deltanet_chunk(device: Device) -> None:
    device.products = frozenset()
    op_checks_deltanet.check_formula(device, (150, 17), key_heads=1, heads=2, d=128)
    op_checks_deltanet.check_formula(device, (70,), key_heads=2, heads=4, d=64)


def _deltanet_output(device: Device) -> None:
    op_checks_deltanet.check_formula(device, (150, 17), key_heads=1, heads=2, d=128)
    op_checks_deltanet.check_formula(device, (70,), key_heads=2, heads=4, d=64)
    op_checks_deltanet.check_fp16_output(device, 20, key_heads=2, heads=6, d=128)


def _matmul_vec(device: Device) -> None:
    op_checks_matmul.check_product(device, "F16", rows=9, cols=4096, n=3)
    op_checks_matmul.check_product(device, "F32", rows=9, cols=71, n=3)


def _qkv(device: Device) -> None:
    op_checks_qkv.check_prepared(device, 2, 3, 1, 200, 70, normed="qk")


def _dot_int8(device: Device) -> None:
    device.products = frozenset()
    # Three rows are tiles for the kernels of 32 lanes, which have tensor cores whatever the device says.
    for n in (2,) if device.lanes == 32 else (2, 3):
        op_checks_matmul.check_product(device, "Q4_K", rows=20, cols=4352, n=n)
    if device.lanes == 32:
        device.products = frozenset({"WGMMA"})  # rows come by bulk copies
    op_checks_matmul.check_product(device, "Q4_K", rows=20, cols=4352, n=1)


def _mma_int8(device: Device) -> None:
    op_checks_matmul.check_product(device, "Q4_K", rows=20, cols=4608, n=3)
    with op_checks_matmul.tiles(3):
        op_checks_matmul.check_product(device, "Q4_K", rows=20, cols=4608, n=3)


def _matmul_rows_wgmma(device: Device) -> None:
    if device.lanes == 32:
        device.products |= {"WGMMA"}
    for name in ("Q4_K", "Q6_K"):
        op_checks_matmul.check_product(device, name, rows=20, cols=2304, n=17)


def _matmul_halves(device: Device) -> None:
    if device.lanes == 32:
        device.products |= {"WGMMA"}
    op_checks_matmul.check_product(device, "F32", rows=70, cols=200, n=BLAS_ROWS)


def _moe_int8(device: Device) -> None:
    # So many slots that those of two rows take turns; each row alone is quantised beside them.
    op_checks_moe.check_expert_mlp(device, ("Q8_0", "Q8_0"), 2, 16, experts=20, inner=64, cols=64, shared="gated")


def _matmul_tile(device: Device) -> None:
    op_checks_matmul.check_product(device, "Q8_0", rows=9, cols=160, n=17)
    op_checks_matmul.check_product(device, "F32", rows=9, cols=96, n=BLAS_ROWS)
    op_checks_matmul.check_row_stride(device, "F32", BLAS_ROWS, 37)


def _moe(device: Device) -> None:
    op_checks_moe.check_random_routes(device, 100, 8, "laguna", rows=2)
    op_checks_moe.check_random_routes(device, 4, 4, "all")
    op_checks_moe.check_ties(device, 256, 8, "gemma4")
    op_checks_moe.check_nan(device, 70, 4)
    op_checks_moe.check_grouped(device, "two best", 4, 8, 256, 8, 3, biased=True)
    many = op_checks_moe.random_ids(300, 8, 40)
    op_checks_moe.check_product(device, [("Q8_0", 2)], many, experts=40, cols=32)
    op_checks_moe.check_combine(device, 2, 3, 300)


def _moe_router(device: Device) -> None:
    if device.lanes == 32:
        device.products |= {"WGMMA"}
        op_checks_moe.check_norm_route(device, "all", 41, 1120, 40, 4, 128)  # threads multiply what others norm


def _moe_matmul(device: Device) -> None:
    ids = op_checks_moe.random_ids
    op_checks_moe.check_product(device, [("Q8_0", 11), ("Q8_0", 3)], ids(3, 2, 5), experts=5, cols=2080)
    op_checks_moe.check_product(device, [("Q8_0", 131)], ids(40, 2, 3), experts=3, cols=96, per_slot=True)
    op_checks_moe.check_product(device, [("F32", 3)], ids(17, 1, 3), experts=3, cols=71)
    op_checks_moe.check_product(device, [("F32", 3)], ids(2, 1, 3), experts=3, cols=71)
    op_checks_moe.check_strides(device, 3, cols=24)


def _moe_prefill(device: Device) -> None:
    if device.lanes == 32:
        device.products |= {"WGMMA"}
    # More slices than stay in shared memory, and fewer, for more features than a block multiplies at a time.
    ids = op_checks_moe.random_ids
    op_checks_moe.check_product(device, [("Q8_0", 9)], ids(144, 1, 3), experts=3, cols=672)
    op_checks_moe.check_product(device, [("Q8_0", 260)], ids(144, 1, 3), experts=3, cols=160)
    op_checks_moe_prefill.check_gated(device, ("Q8_0", "Q8_0"), 144, 1, experts=3, inner=9, cols=160)


def _moe_prefill_int8(device: Device) -> None:
    if device.lanes != 32:
        return
    device.products |= {"WGMMA"}
    # Rows that stay for all turns, and slices that do not; several tiles of an expert.
    ids = op_checks_moe.random_ids
    op_checks_moe_prefill_int8.check_products(device, [("Q8_0", 514)], ids(40, 1, 3), experts=3, cols=160)
    op_checks_moe_prefill_int8.check_products(device, [("Q8_0", 66)], ids(150, 1, 3), experts=3, cols=672)
    op_checks_moe_prefill_int8.check_gates(device, ("Q8_0", "Q8_0"), 40, 1, experts=3, inner=41, cols=160)


def _block_sparse(device: Device) -> None:
    op_checks_block_sparse.check(device, 1281, 1281, (1, 1, 32), 0.12)
    op_checks_block_sparse.check(device, 1281, 1281, (1, 1, 160), 0.12)  # several pieces of a head
    op_checks_block_sparse.check_lists(device, 70, heads=2, kv_heads=1)


#: per source what its mutations must fail
CHECKS: dict[str, Callable[[Device], None]] = {
    "attention.cu": _attention,
    "attention_mma.cu": _attention_wgmma,
    "attention_sync.h": _attention_mma,
    "attention_tile.h": _attention_mma,
    "attention_wgmma.h": _attention_wgmma,
    "deltanet.cu": _deltanet,
    "deltanet_chunk.cu": _deltanet_chunk,
    "deltanet_many.cu": _deltanet_many,
    "deltanet_mma.cu": _deltanet_mma,
    "deltanet_output.cu": _deltanet_output,
    "deltanet_prepare.cu": _deltanet_wgmma,
    "deltanet_rows.h": _deltanet,
    "deltanet_step.cu": _deltanet_step,
    "deltanet_wgmma.cu": _deltanet_wgmma,
    "qkv.cu": _qkv,
    "matmul_tile.cu": _matmul_tile,
    "dot.h": _matmul_vec,
    "dot_int8.h": _dot_int8,
    "matmul_halves.cu": _matmul_halves,
    "matmul_rows_wgmma.cu": _matmul_rows_wgmma,
    "matmul_vec.cu": _matmul_vec,
    "mma_int8.h": _mma_int8,
    "moe.cu": _moe,
    "moe_matmul.cu": _moe_matmul,
    "moe_int8.cu": _moe_int8,
    "moe_prefill.cu": _moe_prefill,
    "moe_prefill_int8.cu": _moe_prefill_int8,
    "moe_router.cu": _moe_router,
    "norm.cu": _norm,
    "reduce.h": _reduce,
    "route.h": _moe,
    "fp16.cu": lambda device: op_checks_matmul.check_fp16_rows(device, (3, 2100), slots=False, top=15),
    "argmax_logsumexp.cu": lambda device: op_checks_sample.check_argmax_logsumexp(device, 9000, 1.0, 0.0),
    "block_sparse.cu": _block_sparse,
    "tail_attention.cu": lambda device: op_checks_tail_attention.check_weights(
        device, "f16", (4, 2, 32), 50, 8, "halves"
    ),
    "tile.h": _matmul_tile,
    "sample.cu": lambda device: op_checks_sample.check_argmax(device, 9000),
}


#: places whose mutations change nothing, as the text there
HARMLESS = (
    ("reduce.h", "LUCE_LANES];"),  # an array is only larger than needed
    ("reduce.h", "LUCE_LANES) return __reduce"),  # for CUDA alone
    ("norm.cu", "LUCE_LANES;\n    __shared__"),  # an array is only larger than needed
    ("sample.cu", "LUCE_LANES];"),
    ("deltanet_rows.h", "LUCE_LANES == 0,"),
    ("moe.cu", "LUCE_LANES) {\n        route_loaded<8>"),  # 64 lanes have at most eight experts each
    ("moe.cu", "LUCE_LANES>(logits"),
    ("attention_mma.cu", "LUCE_LANES"),  # never launched with 64
    ("attention_wgmma.h", "LUCE_LANES"),
    ("attention_wgmma.h", "luce_gate_wait(&shared.queries"),  # emulated waves pass no gate before all have got to one
    ("attention_wgmma.h", "luce_gate_ready"),  # for CUDA alone
    ("attention_wgmma.h", "luce_sync_lanes();\n    if"),  # emulated lanes write before a wave passes the gate
    ("deltanet_many.cu", "LUCE_LANES"),
    ("deltanet_step.cu", "LUCE_LANES"),
    ("deltanet_prepare.cu", "LUCE_LANES"),
    ("deltanet_wgmma.cu", "LUCE_LANES"),
    ("block_sparse.cu", "LUCE_LANES)\nstatic_assert"),  # never compiled for 64
    ("block_sparse.cu", "LUCE_LANES) top"),  # scores are only read twice
    ("qkv.cu", "LUCE_LANES)\n"),  # arrays and loops are only larger than needed
    ("qkv.cu", "LUCE_LANES >= d) break;"),
    ("qkv.cu", "LUCE_LANES >= turned) break;"),
    ("qkv.cu", "LUCE_LANES >= 2 * turned) break;"),
    ("qkv.cu", "LUCE_LANES < 2 * turned) own["),
    ("moe_prefill.cu", "LUCE_LANES"),  # never launched with 64
    ("moe_router.cu", "LUCE_LANES"),
    ("route.h", "LUCE_LANES >= experts) break;"),
    ("route.h", "LUCE_LANES);\n        if (lane == winner)"),  # there are at most 32 groups
    ("moe.cu", "LUCE_LANES) {\n            const int done"),  # two lanes write the same
    ("moe.cu", "LUCE_LANES) tiles[t"),
    ("attention.cu", "luce_sync();\n    return true;"),  # add_keys begins with another one
)
#: fetched pages that are told of too early, or that products do not see
FENCES = [
    (r"luce_wgmma_share\(\);", ";", 32),
    (r"luce_copy_wait<0>\(\);\s*luce_wgmma_share\(\);", "luce_wgmma_share(); luce_copy_wait<0>();", 32),
    (r"luce_wgmma_share\(\);\s*luce_gate_arrive\((.*?)\);", r"luce_gate_arrive(\1); luce_wgmma_share();", 32),
    (r"luce_wgmma_share\(\);\s*luce_sync_lanes\(\);(.*?\);)", r"\1 luce_wgmma_share();", 32),
    (r"luce_wgmma_share\(\);(?=\s*luce_sync_lanes)", "if (luce_lane() == 0) luce_wgmma_share();", 32),
    (r"luce_copy_close\(\);", ";", 32),
    (r"fill\(shared, .*?\);", ";", 32),
    (r"tile\.high \+ 1 - tile\.first\[end", "tile.high + 2 - tile.first[end", 32),
]
SWAPPED = "luce_shfl(value, luce_lane() ^ mask ^ (luce_lane() / 2 == 3))"


def _mutations() -> Iterator[ParameterSet]:
    """Source, offset, old text, new text, lanes."""
    for name in sorted(CHECKS):
        text = (KERNELS / name).read_text(encoding="utf-8")
        code = re.sub(r"//[^\n]*", lambda comment: " " * len(comment[0]), text)
        waits = r"luce_sync(_lanes)?\(\);|luce_(?:copy_wait|bulk_wait_read|cluster_wait|cluster_receive)<.*?>\(.*?\);"
        waits += r"|luce_(?:take|gate_[a-z]+)\(.*?\);"
        edits = [(waits, ";", 32), (r"\bLUCE_LANES\b", "32", 64)]
        edits += FENCES if name == "attention_wgmma.h" else []
        if name == "norm.cu":
            edits.append((r"\bi < d;", "i <= d;", 32))
        if name == "reduce.h":
            edits += [(re.escape("luce_shfl_xor(value, mask)"), SWAPPED, lanes) for lanes in (32, 64)]
        for pattern, new, lanes in edits:
            for match in re.finditer(pattern, code):
                at = match.start()
                if not any(name == source and text.startswith(place, at) for source, place in HARMLESS):
                    after = match.expand(new)
                    old = " ".join(match[0].split())
                    id = f"{name}:{text.count(chr(10), 0, at) + 1} {old} to {after}, {lanes} lanes"
                    yield pytest.param(name, at, match[0], after, lanes, id=id)


def _copy(folder: Path) -> Path:
    kernels = folder / "kernels"
    shutil.copytree(KERNELS, kernels, ignore=shutil.ignore_patterns("*.md"))
    (kernels / "reductions.cu").write_text(REDUCTIONS, encoding="utf-8")
    return kernels


@pytest.mark.parametrize("lanes", [32, 64])
@pytest.mark.parametrize("name", sorted(CHECKS))
def test_the_sources_as_they_are_pass(name: str, lanes: int, tmp_path: Path) -> None:
    CHECKS[name](EmulatedDevice(lanes, _copy(tmp_path)))


@pytest.mark.parametrize(("name", "offset", "old", "new", "lanes"), list(_mutations()))
def test_a_mutation_is_caught(name: str, offset: int, old: str, new: str, lanes: int, tmp_path: Path) -> None:
    path = _copy(tmp_path) / name
    text = path.read_text(encoding="utf-8")
    path.write_text(text[:offset] + new + text[offset + len(old) :], encoding="utf-8")
    with pytest.raises((DeviceError, AssertionError)) as caught:
        CHECKS[name](EmulatedDevice(lanes, path.parent))
    assert "g++ failed" not in str(caught.value)
