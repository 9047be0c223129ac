"""The mixture-of-experts ops on the GPU: every format, shapes of the published models, equal bits where promised."""

from __future__ import annotations

import numpy as np
import pytest

from luce.ops.matmul import FEW_ROWS
from luce.runtime.device import Device
from tests.support import op_checks_moe as checks
from tests.support.quant_blocks import FORMATS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", checks.FAMILIES)
@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (4, 4), (33, 3), (128, 8), (256, 8), (512, 16)])
def test_route(gpu: Device, family: str, experts: int, top_k: int) -> None:
    checks.check_random_routes(gpu, experts, top_k, family, rows=600)


@pytest.mark.parametrize("family", checks.FAMILIES)
@pytest.mark.parametrize(("experts", "top_k"), [(5, 3), (256, 8)])
def test_ties_go_to_the_lowest_number(gpu: Device, family: str, experts: int, top_k: int) -> None:
    checks.check_ties(gpu, experts, top_k, family)


def test_nan_is_chosen_last(gpu: Device) -> None:
    checks.check_nan(gpu, 70, 4)


def test_a_row_is_routed_alone(gpu: Device) -> None:
    checks.check_route_company(gpu, 256, 8, "all", rows=40)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", [1, FEW_ROWS, FEW_ROWS + 1, 300])
def test_product(gpu: Device, name: str, n: int) -> None:
    checks.check_product(gpu, [(name, 133)], checks.random_ids(n, 4, 12), experts=12, cols=768)


@pytest.mark.parametrize("n", [1, 16, 512])
@pytest.mark.parametrize(("rows", "cols", "per_slot"), [(256, 2048, False), (1024, 512, True)])
def test_shapes_of_a_model(gpu: Device, n: int, rows: int, cols: int, per_slot: bool) -> None:
    parts = [("Q4_K", rows)] if per_slot else [("Q4_K", rows), ("Q6_K", rows)]
    checks.check_product(gpu, parts, checks.random_ids(n, 8, 64), experts=64, cols=cols, per_slot=per_slot)


@pytest.mark.parametrize("n", [1, 5, 17, 2048])
def test_many_experts(gpu: Device, n: int) -> None:
    checks.check_product(gpu, [("Q8_0", 20)], checks.random_ids(n, 8, 256), experts=256, cols=256)


@pytest.mark.parametrize("n", [1, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("cols", [1, 3, 71, 1027])
def test_columns_of_any_number(gpu: Device, n: int, cols: int) -> None:
    checks.check_product(gpu, [("F32", 3), ("F16", 5)], checks.random_ids(n, 2, 4), experts=4, cols=cols)


@pytest.mark.parametrize(("n", "k"), [(17, 1), (32, 1), (33, 1), (1000, 1), (70, 3)])
def test_the_same_experts_for_all_rows(gpu: Device, n: int, k: int) -> None:
    ids = np.tile(np.array([[5, 0, 3]], np.int32)[:, :k], (n, 1))
    checks.check_product(gpu, [("Q8_0", 140)], ids, experts=7, cols=512)


@pytest.mark.parametrize("name", FORMATS)
def test_company_of_few_rows_does_not_matter(gpu: Device, name: str) -> None:
    checks.check_product_company(gpu, name, range(1, FEW_ROWS + 1), experts=20, k=8, cols=1280)


def test_company_of_many_rows_does_not_matter(gpu: Device) -> None:
    checks.check_product_company(gpu, "Q4_K", [17, 32, 65, 400], experts=20, k=8, cols=1280)


@pytest.mark.parametrize("n", [3, 18])
@pytest.mark.parametrize("cols", [24, 37])
def test_strides(gpu: Device, n: int, cols: int) -> None:
    checks.check_strides(gpu, n, cols=cols)


@pytest.mark.parametrize("n", [3, 19])
def test_infinities(gpu: Device, n: int) -> None:
    checks.check_infinities(gpu, n)


@pytest.mark.parametrize(("n", "k", "rows"), [(1, 1, 1), (3, 8, 257), (600, 8, 2816)])
def test_combine(gpu: Device, n: int, k: int, rows: int) -> None:
    checks.check_combine(gpu, n, k, rows)


def test_combine_adds_the_slots_in_order(gpu: Device) -> None:
    checks.check_combine_order(gpu)


@pytest.mark.parametrize("family", ["qwen35moe", "gemma4", "laguna"])
@pytest.mark.parametrize("n", [2, 20, 200])
def test_block(gpu: Device, family: str, n: int) -> None:
    checks.check_block(gpu, family, n)


def test_empty(gpu: Device) -> None:
    checks.check_empty(gpu)


@pytest.mark.parametrize("n", [1, 17])
def test_weights_beyond_two_gigabytes(gpu: Device, n: int) -> None:
    checks.check_far_expert(gpu, n)


@pytest.mark.parametrize(
    "types", [("Q4_K", "Q4_K"), ("Q4_K", "Q6_K"), ("Q5_K", "Q8_0"), ("Q8_0", "Q8_0"), ("Q4_0", "Q4_0")]
)
@pytest.mark.parametrize(("n", "shared"), [(1, "gated"), (5, "plain"), (16, "")])
def test_expert_mlp(gpu: Device, types: tuple[str, str], n: int, shared: str) -> None:
    checks.check_expert_mlp(gpu, types, n, 8, experts=20, inner=512, cols=1280, shared=shared)


def test_experts_with_gates_and_ups_in_one_tensor(gpu: Device) -> None:
    checks.check_expert_mlp(gpu, ("Q4_K", "Q6_K"), 3, 4, experts=9, inner=768, cols=512, shared="gated", together=True)
