"""The mixture-of-experts ops on the host device, and how expert weights are placed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from luce.ops.moe import expert_matmul, route
from luce.ops.weight import upload_experts
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support import op_checks_moe as checks
from tests.support.quant_blocks import decoded, random_tensor

HOST = HostDevice()


@pytest.mark.parametrize("family", checks.FAMILIES)
@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (4, 4), (128, 8), (256, 8), (512, 16)])
def test_route(family: str, experts: int, top_k: int) -> None:
    checks.check_random_routes(HOST, experts, top_k, family)


@pytest.mark.parametrize("family", checks.FAMILIES)
@pytest.mark.parametrize(("experts", "top_k"), [(5, 3), (256, 8)])
def test_ties_go_to_the_lowest_number(family: str, experts: int, top_k: int) -> None:
    checks.check_ties(HOST, experts, top_k, family)


def test_nan_is_chosen_last() -> None:
    checks.check_nan(HOST, 40, 4)


def test_a_row_is_routed_alone() -> None:
    checks.check_route_company(HOST, 64, 4, "all", rows=5)


@pytest.mark.parametrize(("experts", "top_k"), [(513, 1), (64, 17), (4, 5), (4, 0)])
def test_route_has_limits(experts: int, top_k: int) -> None:
    rest: dict[str, Any] = {"bias": None, "normalise": True, "scale": 1.0, "expert_scale": None}
    with pytest.raises(ValueError, match=f"route: {top_k} of {experts} experts"):
        route(HOST, np.zeros((1, experts), np.float32), top_k=top_k, gating="softmax", **rest)


@pytest.mark.parametrize("n", [1, 9, 40])
@pytest.mark.parametrize("per_slot", [False, True])
def test_product(n: int, per_slot: bool) -> None:
    ids = checks.random_ids(n, 3, 6)
    checks.check_product(HOST, [("Q4_K", 5), ("F32", 7)], ids, experts=6, cols=256, per_slot=per_slot)


def test_product_of_one_tensor_and_one_expert_for_all() -> None:
    checks.check_product(HOST, [("Q8_0", 75)], np.full((20, 1), 3, np.int32), experts=4, cols=64)


def test_company_of_few_rows_does_not_matter() -> None:
    checks.check_product_company(HOST, "Q4_0", [1, 3, 8], experts=5, k=2, cols=96)


@pytest.mark.parametrize("n", [3, 20])
def test_strides(n: int) -> None:
    checks.check_strides(HOST, n, cols=24)


def test_combine() -> None:
    checks.check_combine(HOST, 5, 8, 33)
    checks.check_combine_order(HOST)


@pytest.mark.parametrize("family", checks.FAMILIES)
def test_block(family: str) -> None:
    checks.check_block(HOST, family, 6)


def test_empty() -> None:
    checks.check_empty(HOST)


def test_shapes_must_agree() -> None:
    weight = upload_experts(HOST, [random_tensor("F32", 12, 8, 0)], 4)
    x, routing = np.zeros((2, 8), np.float32), checks.routed(HOST, np.zeros((2, 3), np.int32), 4)
    with pytest.raises(ValueError, match="x has 9 features, the weight 8"):
        expert_matmul(HOST, np.zeros((2, 9), np.float32), weight, 4, routing)
    with pytest.raises(ValueError, match=r"x is for \[2, 2\] rows and slots, ids for \[2, 3\]"):
        expert_matmul(HOST, np.zeros((2, 2, 8), np.float32), weight, 4, routing)
    with pytest.raises(ValueError, match="12 rows of weights are not of 5 experts"):
        expert_matmul(HOST, x, weight, 5, routing)


@pytest.mark.parametrize(("gate_rows", "up_rows"), [(2, 4), (200, 100)])
def test_host_weights_are_stacked_expert_by_expert(gate_rows: int, up_rows: int) -> None:
    gate, up = random_tensor("Q4_K", 3 * gate_rows, 256, 1), random_tensor("F16", 3 * up_rows, 256, 2)
    weight = upload_experts(HOST, [gate, up], 3)
    assert (weight.rows, weight.cols) == (3 * (gate_rows + up_rows), 256)
    halves = [decoded(gate).reshape(3, gate_rows, 256), decoded(up).reshape(3, up_rows, 256)]
    np.testing.assert_array_equal(weight.matrix, np.concatenate(halves, axis=1))


def test_kernel_weights_stay_as_the_file_holds_them(emulated: Device) -> None:
    tensors = [random_tensor("Q6_K", 3 * 2, 256, 5), random_tensor("Q8_0", 3 * 4, 256, 6)]
    weight = upload_experts(emulated, tensors, 3)
    assert [(p.first // 3, p.rows // 3) for p in weight.parts] == [(0, 2), (2, 4)]
    for part, tensor in zip(weight.parts, tensors, strict=True):
        np.testing.assert_array_equal(emulated.download(part.data), tensor.raw)
