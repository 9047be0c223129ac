"""moe, moe_matmul and moe_int8 of kernels/ on the emulated device."""

from __future__ import annotations

import numpy as np
import pytest

from luce.ops.matmul import FEW_ROWS
from luce.runtime.device import Device
from tests.support import op_checks_moe as checks
from tests.support.quant_blocks import block_cols

# The others differ in quants.h alone, which the kernels of matmul try in all formats.
FORMATS = ("F32", "F16", "Q4_0", "Q8_0", "Q4_K", "Q6_K")


@pytest.mark.parametrize("family", checks.FAMILIES)
@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (4, 4), (33, 3), (128, 8), (256, 8), (512, 16)])
def test_route(emulated: Device, family: str, experts: int, top_k: int) -> None:
    checks.check_random_routes(emulated, experts, top_k, family)


@pytest.mark.parametrize("top_k", range(1, 9))
def test_route_to_one_to_eight(emulated: Device, top_k: int) -> None:
    checks.check_random_routes(emulated, 64, top_k, "qwen35moe", rows=2)


@pytest.mark.parametrize("family", checks.FAMILIES)
@pytest.mark.parametrize(("experts", "top_k"), [(5, 3), (256, 8)])
def test_ties_go_to_the_lowest_number(emulated: Device, family: str, experts: int, top_k: int) -> None:
    checks.check_ties(emulated, experts, top_k, family)


def test_nan_is_chosen_last(emulated: Device) -> None:
    checks.check_nan(emulated, 70, 4)


def test_a_row_is_routed_alone(emulated: Device) -> None:
    checks.check_route_company(emulated, 100, 4, "all", rows=4)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", [2, FEW_ROWS + 1])
def test_product(emulated: Device, name: str, n: int) -> None:
    ids = checks.random_ids(n, 2, 5)
    checks.check_product(emulated, [(name, 11)], ids, experts=5, cols=max(96, block_cols(name)))


@pytest.mark.parametrize("n", [3, FEW_ROWS + 4])
@pytest.mark.parametrize("per_slot", [False, True])
def test_gate_and_up_of_two_tensors(emulated: Device, n: int, per_slot: bool) -> None:
    ids = checks.random_ids(n, 3, 6)
    checks.check_product(emulated, [("Q4_K", 9), ("F16", 130)], ids, experts=6, cols=256, per_slot=per_slot)


@pytest.mark.parametrize("n", [1, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("cols", [1, 3, 71])
def test_columns_of_any_number(emulated: Device, n: int, cols: int) -> None:
    checks.check_product(emulated, [("F32", 3)], checks.random_ids(n, 2, 4), experts=4, cols=cols)


@pytest.mark.parametrize(("n", "k"), [(17, 1), (32, 1), (33, 1), (100, 1), (70, 3)])
def test_the_same_experts_for_all_rows(emulated: Device, n: int, k: int) -> None:
    ids = np.tile(np.array([[5, 0, 3]], np.int32)[:, :k], (n, 1))
    checks.check_product(emulated, [("Q8_0", 4)], ids, experts=7, cols=32)


@pytest.mark.parametrize(("experts", "k"), [(4, 4), (40, 7), (256, 8)])
def test_many_experts(emulated: Device, experts: int, k: int) -> None:
    checks.check_product(emulated, [("Q8_0", 2)], checks.random_ids(50, k, experts), experts=experts, cols=32)


def test_company_of_few_rows_does_not_matter(emulated: Device) -> None:
    checks.check_product_company(emulated, "Q4_K", range(1, FEW_ROWS + 1), experts=5, k=2, cols=512)


def test_company_of_many_rows_does_not_matter(emulated: Device) -> None:
    checks.check_product_company(emulated, "Q8_0", [17, 32, 65], experts=4, k=2, cols=96)


@pytest.mark.parametrize("n", [3, 18])
@pytest.mark.parametrize("cols", [24, 37])
def test_strides(emulated: Device, n: int, cols: int) -> None:
    checks.check_strides(emulated, n, cols=cols)


@pytest.mark.parametrize("n", [3, 19])
def test_infinities(emulated: Device, n: int) -> None:
    checks.check_infinities(emulated, n)


@pytest.mark.parametrize(("n", "k", "rows"), [(1, 1, 1), (3, 8, 257), (5, 4, 600)])
def test_combine(emulated: Device, n: int, k: int, rows: int) -> None:
    checks.check_combine(emulated, n, k, rows)


def test_combine_adds_the_slots_in_order(emulated: Device) -> None:
    checks.check_combine_order(emulated)


@pytest.mark.parametrize("family", ["qwen35moe", "gemma4", "laguna"])
@pytest.mark.parametrize("n", [2, 20])
def test_block(emulated: Device, family: str, n: int) -> None:
    checks.check_block(emulated, family, n)


def test_empty(emulated: Device) -> None:
    checks.check_empty(emulated)


@pytest.mark.parametrize(("types", "n", "k", "inner", "cols", "shared"), [
    (("Q4_K", "Q6_K"), 2, 3, 256, 256, "gated"), (("Q4_K", "Q4_K"), 1, 2, 512, 512, ""),
    (("Q8_0", "Q8_0"), 3, 2, 96, 160, "plain"), (("Q4_0", "Q8_0"), 1, 8, 32, 64, "gated"),
    (("Q5_K", "Q5_K"), 1, 1, 256, 256, "plain"),
])  # fmt: skip
def test_expert_mlp(
    emulated: Device, types: tuple[str, str], n: int, k: int, inner: int, cols: int, shared: str
) -> None:
    checks.check_expert_mlp(emulated, types, n, k, experts=9, inner=inner, cols=cols, shared=shared)


def test_experts_with_gates_and_ups_in_one_tensor(emulated: Device) -> None:
    checks.check_expert_mlp(emulated, ("Q8_0", "Q4_0"), 2, 2, experts=4, inner=64, cols=128, shared="", together=True)
