"""The mixture-of-experts ops and kernels/moe*.cu; how expert weights are placed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest

from luce.models.spec import Activation, ExpertGroups
from luce.ops import moe_rows
from luce.ops.matmul import FEW_ROWS
from luce.ops.matmul_prefill import BLAS_ROWS
from luce.ops.moe import RoutingOptions, expert_matmul, route
from luce.ops.moe_router import row_router
from luce.ops.weight import upload_experts, upload_weight
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support import op_checks_moe as checks
from tests.support import op_checks_moe_prefill as prefill_checks
from tests.support.devices import emulated_only, emulated_wgmma, on_devices
from tests.support.emulated import EmulatedDevice
from tests.support.quant_blocks import FORMATS, decoded, random_tensor, whole_blocks

HOST = HostDevice()
# The other formats differ in quants.h alone, and the op tests of matmul try all of them.
FEW_FORMATS = ("F32", "F16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ2_XXS", "NVFP4")
Parts = list[tuple[str, int]]

families = pytest.mark.parametrize("family", checks.FAMILIES)


@families
@on_devices(
    "experts, top_k, rows",
    host=[(*sizes, 5) for sizes in [(4, 1), (4, 4), (128, 8), (256, 8), (512, 16)]],
    emulated=[(*sizes, 5) for sizes in [(4, 1), (4, 4), (33, 3), (128, 8), (256, 8), (512, 16)]],
    gpu=[(*sizes, 600) for sizes in [(4, 1), (4, 4), (33, 3), (128, 8), (256, 8), (512, 16)]],
)
def test_route(device: Device, experts: int, top_k: int, rows: int, family: str) -> None:
    checks.check_random_routes(device, experts, top_k, family, rows)


@on_devices("top_k", host=[], emulated=range(1, 9), gpu=[])
def test_route_to_one_to_eight(device: Device, top_k: int) -> None:
    checks.check_random_routes(device, 64, top_k, "qwen35moe", rows=2)


@families
@on_devices("experts, top_k", [(5, 3), (256, 8)])
def test_ties_go_to_the_lowest_number(device: Device, experts: int, top_k: int, family: str) -> None:
    checks.check_ties(device, experts, top_k, family)


@on_devices(
    "score, used, count, experts, top_k, biased, rows",
    [(*case, 3) for case in checks.GROUPED],
    gpu=[(*case, 300) for case in checks.GROUPED],
)
def test_route_within_groups(
    device: Device,
    score: Literal["best", "two best"],
    used: int,
    count: int,
    experts: int,
    top_k: int,
    biased: bool,
    rows: int,
) -> None:
    checks.check_grouped(device, score, used, count, experts, top_k, rows, biased=biased)


@pytest.mark.parametrize(
    ("count", "used", "experts", "top_k"), [(3, 1, 8, 2), (4, 1, 8, 3), (8, 2, 8, 1), (2, 3, 8, 1)]
)
def test_groups_have_limits(count: int, used: int, experts: int, top_k: int) -> None:
    with pytest.raises(ValueError, match=f"route: {top_k} of {experts} experts in {used} of {count} groups"):
        options = RoutingOptions(top_k, "softmax", groups=ExpertGroups(count, used, "best"))
        route(HOST, np.zeros((1, experts), np.float32), options)


@on_devices("n, k, rows", [(1, 1, 1), (3, 4, 257), (5, 2, 600)], gpu=[(1, 1, 1), (3, 4, 257), (600, 4, 5760)])
def test_expert_bias(device: Device, n: int, k: int, rows: int) -> None:
    checks.check_expert_bias(device, n, k, rows)


@on_devices("experts", host=[40], emulated=[70], gpu=[70])
def test_nan_is_chosen_last(device: Device, experts: int) -> None:
    checks.check_nan(device, experts, 4)


@on_devices("experts, top_k, rows", host=[(64, 4, 5)], emulated=[(100, 4, 4)], gpu=[(256, 8, 40)])
def test_a_row_is_routed_alone(device: Device, experts: int, top_k: int, rows: int) -> None:
    checks.check_route_neighbours(device, experts, top_k, "all", rows=rows)


@pytest.mark.parametrize(("experts", "top_k"), [(513, 1), (64, 17), (4, 5), (4, 0)])
def test_route_has_limits(experts: int, top_k: int) -> None:
    with pytest.raises(ValueError, match=f"route: {top_k} of {experts} experts"):
        route(HOST, np.zeros((1, experts), np.float32), RoutingOptions(top_k, "softmax"))


@on_devices(
    "parts, n, k, experts, cols, per_slot",
    host=[
        ([("Q4_K", 5), ("F32", 7)], n, 3, 6, 256, per_slot)
        for n, per_slot in itertools.product([1, 9, 40], [False, True])
    ],
    emulated=[
        *(
            ([(name, 11)], n, 2, 5, whole_blocks(name, 96), False)
            for name, n in itertools.product(FEW_FORMATS, [2, FEW_ROWS + 1])
        ),
        # Gate and up of two tensors.
        *(
            ([("Q4_K", 9), ("F16", 130)], n, 3, 6, 256, per_slot)
            for n, per_slot in itertools.product([3, FEW_ROWS + 4], [False, True])
        ),
    ],
    gpu=[
        *(
            ([(name, 133)], n, 4, 12, 768, False)
            for name, n in itertools.product(FORMATS, [1, FEW_ROWS, FEW_ROWS + 1, 300])
        ),
        # Shapes of a model.
        *(([("Q4_K", 256), ("Q6_K", 256)], n, 8, 64, 2048, False) for n in (1, 16, 512)),
        *(([("Q4_K", 1024)], n, 8, 64, 512, True) for n in (1, 16, 512)),
    ],
)
def test_product(device: Device, parts: Parts, n: int, k: int, experts: int, cols: int, per_slot: bool) -> None:
    ids = checks.random_ids(n, k, experts)
    checks.check_product(device, parts, ids, experts=experts, cols=cols, per_slot=per_slot)


#: where four waves multiply a prompt's rows
WGMMA = ("emulated, wgmma",)


ROUTERS = [
    ("qwen35moe", 257, 2048, 256, 8, 128),
    ("qwen35moe", 257, 2048, 256, 8, 32),
    ("laguna", 512, 1536, 512, 8, 32),
    ("gemma4", 130, 1120, 128, 8, 128),
    ("all", 33, 96, 33, 3, 128),
    ("bare", 11, 64, 8, 1, 128),
]


@on_devices("family, rows, cols, experts, top_k, group", ROUTERS, host=[], emulated_devices=WGMMA)
def test_norm_product_and_choice_in_one_launch(
    device: Device, family: str, rows: int, cols: int, experts: int, top_k: int, group: int
) -> None:
    checks.check_norm_route(device, family, rows, cols, experts, top_k, group)


@emulated_wgmma
def test_a_choice_in_one_launch_within_groups_or_among_nan(device: Device) -> None:
    groups = ExpertGroups(8, 4, "two best")
    checks.check_norm_route(device, "laguna", 64, 96, 64, 6, 128, groups=groups)
    checks.check_norm_route(device, "qwen35moe", 64, 96, 64, 6, 128, value=np.nan)
    checks.check_norm_route(device, "laguna", 64, 96, 64, 6, 128, value=np.inf)


@emulated_wgmma
def test_numbers_between_blocks_are_taken_once(device: Device) -> None:
    """Slots that are not empty before a launch, and more numbers to take than blocks post."""
    checks.check_slots(device)


@pytest.mark.parametrize(
    ("rows", "cols", "type", "lanes"), [(8, 2080, "F32", 32), (8, 64, "F16", 32), (8, 64, "F32", 64)]
)
def test_routers_that_take_more_launches(rows: int, cols: int, type: str, lanes: int) -> None:
    device = EmulatedDevice(lanes, products=("WGMMA",) if lanes == 32 else ())
    assert row_router(device, upload_weight(device, [random_tensor(type, rows, cols, 0)]), rows) is None


@on_devices(
    "parts, n, k, experts, cols, per_slot",
    host=[],
    emulated=[
        *(([(name, 11)], BLAS_ROWS, 1, 3, whole_blocks(name, 96), False) for name in FEW_FORMATS),
        # Gate and up of two tensors and types; more features than a block has at a time, tiles of all sizes.
        ([("Q4_K", 9), ("F16", 270)], BLAS_ROWS, 2, 3, 256, False),
        # More slices than stay in shared memory, and columns that end within one.
        ([("Q8_0", 258)], BLAS_ROWS, 1, 5, 640 + 32, True),
        # More turns of features than a block has, the last of which are not whole.
        ([("Q8_0", 1283)], BLAS_ROWS, 1, 3, 160, False),
        # An odd number of columns, and rows longer than what a wave loads at once.
        ([("F16", 5)], BLAS_ROWS, 1, 3, 1091, False),
        ([("F32", 3), ("Q4_K", 515)], BLAS_ROWS + 3, 2, 70, 256, True),
    ],
    gpu=[
        *(([(name, 300)], BLAS_ROWS, 4, 12, 768, True) for name in FORMATS),
        *(([(name, 1283)], BLAS_ROWS, 4, 12, 512, True) for name in ("Q4_K", "Q6_K")),
    ],
    emulated_devices=WGMMA,
)
def test_product_of_a_prompt(
    device: Device, parts: Parts, n: int, k: int, experts: int, cols: int, per_slot: bool
) -> None:
    ids = checks.random_ids(n, k, experts)
    checks.check_product(device, parts, ids, experts=experts, cols=cols, per_slot=per_slot)


@on_devices(
    "types, n, k, experts, inner, cols, activation, together",
    host=[(("Q4_K", "Q4_K"), n, 2, 4, 32, 256, "silu", together) for n in (3, 20) for together in (False, True)],
    emulated=[
        (("Q4_K", "Q4_K"), BLAS_ROWS, 2, 3, 130, 256, "silu", False),
        (("Q6_K", "Q6_K"), BLAS_ROWS, 1, 3, 9, 256, "gelu", True),
        (("Q4_K", "Q4_K"), BLAS_ROWS, 1, 3, 9, 1280, "silu", False),
        (("Q4_K", "Q6_K"), BLAS_ROWS, 1, 3, 9, 256, "silu", False),
        (("F32", "F32"), BLAS_ROWS, 1, 3, 9, 32, "gelu", False),
    ],
    gpu=[
        (types, n, 8, 64, 512, 2048, activation, together)
        for types, activation, together in [
            (("Q4_K", "Q4_K"), "silu", False),
            (("Q6_K", "Q6_K"), "gelu", True),
            (("Q4_K", "Q5_K"), "silu", False),
        ]
        for n in (FEW_ROWS + 1, 500)
    ],
    emulated_devices=WGMMA,
)
def test_gates_and_ups(
    device: Device,
    types: tuple[str, str],
    n: int,
    k: int,
    experts: int,
    inner: int,
    cols: int,
    activation: Activation,
    together: bool,
) -> None:
    prefill_checks.check_gated(
        device, types, n, k, experts=experts, inner=inner, cols=cols, activation=activation, together=together
    )


@on_devices("biased, wide", [(True, False), (False, True)], emulated_devices=WGMMA)
def test_gates_and_ups_with_biases_and_of_wide_rows(device: Device, biased: bool, wide: bool) -> None:
    prefill_checks.check_gated(
        device, ("Q4_K", "Q4_K"), BLAS_ROWS, 2, experts=3, inner=9, cols=256, biased=biased, wide=wide
    )


@on_devices(
    "name, n, experts, inner, cols",
    host=[],
    emulated=[("Q4_K", BLAS_ROWS, 3, 9, 256)],
    gpu=[("Q4_K", BLAS_ROWS, 20, 512, 2048)],
    emulated_devices=WGMMA,
)
def test_gates_and_ups_do_not_depend_on_their_neighbours(
    device: Device, name: str, n: int, experts: int, inner: int, cols: int
) -> None:
    prefill_checks.check_gated_neighbours(device, name, n, experts=experts, inner=inner, cols=cols)


@on_devices(
    "name, counts, experts, k, cols",
    host=[],
    emulated=[("Q6_K", [BLAS_ROWS, 200], 4, 2, 256)],
    gpu=[("Q4_K", [BLAS_ROWS, 400, 2000], 20, 8, 1280)],
    emulated_devices=WGMMA,
)
def test_rows_of_a_prompt_do_not_depend_on_their_neighbours(
    device: Device, name: str, counts: Sequence[int], experts: int, k: int, cols: int
) -> None:
    checks.check_product_neighbours(device, name, counts, experts=experts, k=k, cols=cols)


@on_devices(
    "parts, n, cols",
    host=[],
    emulated=[([("F32", 3)], *case) for case in itertools.product([1, FEW_ROWS, FEW_ROWS + 1], [1, 3, 71])],
    gpu=[
        ([("F32", 3), ("F16", 5)], *case) for case in itertools.product([1, FEW_ROWS, FEW_ROWS + 1], [1, 3, 71, 1027])
    ],
)
def test_columns_of_any_number(device: Device, parts: Parts, n: int, cols: int) -> None:
    checks.check_product(device, parts, checks.random_ids(n, 2, 4), experts=4, cols=cols)


@on_devices(
    "n, k, rows, cols",
    host=[],
    emulated=[(*sizes, 4, 32) for sizes in [(17, 1), (32, 1), (33, 1), (100, 1), (70, 3)]],
    gpu=[(*sizes, 140, 512) for sizes in [(17, 1), (32, 1), (33, 1), (1000, 1), (70, 3)]],
)
def test_the_same_experts_for_all_rows(device: Device, n: int, k: int, rows: int, cols: int) -> None:
    ids = np.tile(np.array([[5, 0, 3]], np.int32)[:, :k], (n, 1))
    checks.check_product(device, [("Q8_0", rows)], ids, experts=7, cols=cols)


def test_product_of_one_tensor_and_one_expert_for_all() -> None:
    checks.check_product(HOST, [("Q8_0", 75)], np.full((20, 1), 3, np.int32), experts=4, cols=64)


@on_devices(
    "n, k, experts, rows, cols",
    host=[],
    emulated=[(50, 4, 4, 2, 32), (50, 7, 40, 2, 32), (50, 8, 256, 2, 32)],
    gpu=[(n, 8, 256, 20, 256) for n in (1, 5, 17, 2048)],
)
def test_many_experts(device: Device, n: int, k: int, experts: int, rows: int, cols: int) -> None:
    checks.check_product(device, [("Q8_0", rows)], checks.random_ids(n, k, experts), experts=experts, cols=cols)


@on_devices(
    "name, counts, experts, k, cols",
    host=[("Q4_0", [1, 3, 8], 5, 2, 96)],
    emulated=[("Q4_K", range(1, FEW_ROWS + 1), 5, 2, 512)],
    gpu=[(name, range(1, FEW_ROWS + 1), 20, 8, 1280) for name in FORMATS],
)
def test_few_rows_do_not_depend_on_their_neighbours(
    device: Device, name: str, counts: Sequence[int], experts: int, k: int, cols: int
) -> None:
    checks.check_product_neighbours(device, name, counts, experts=experts, k=k, cols=cols)


@on_devices(
    "name, counts, experts, k, cols",
    host=[],
    emulated=[("Q8_0", [17, 32, 65], 4, 2, 96)],
    gpu=[("Q4_K", [17, 32, 65, 400], 20, 8, 1280)],
)
def test_many_rows_do_not_depend_on_their_neighbours(
    device: Device, name: str, counts: Sequence[int], experts: int, k: int, cols: int
) -> None:
    checks.check_product_neighbours(device, name, counts, experts=experts, k=k, cols=cols)


@on_devices("n, cols", itertools.product([3, 18], [24, 37]), host=[(3, 24), (20, 24)])
def test_strides(device: Device, n: int, cols: int) -> None:
    checks.check_strides(device, n, cols=cols)


@on_devices("n", [3, 19], host=[])
def test_infinities(device: Device, n: int) -> None:
    checks.check_infinities(device, n)


@on_devices(
    "n, k, rows",
    host=[(5, 8, 33)],
    emulated=[(1, 1, 1), (3, 8, 257), (5, 4, 600)],
    gpu=[(1, 1, 1), (3, 8, 257), (600, 8, 2816)],
)
def test_combine(device: Device, n: int, k: int, rows: int) -> None:
    checks.check_combine(device, n, k, rows)


@on_devices()
def test_combine_adds_the_slots_in_order(device: Device) -> None:
    checks.check_combine_order(device)


@on_devices(
    "family, n",
    host=[(family, 6) for family in checks.FAMILIES],
    emulated=itertools.product(["qwen35moe", "gemma4", "laguna"], [2, 20]),
    gpu=itertools.product(["qwen35moe", "gemma4", "laguna"], [2, 20, 200]),
)
def test_layer(device: Device, family: str, n: int) -> None:
    checks.check_layer(device, family, n)


@on_devices()
def test_empty(device: Device) -> None:
    checks.check_empty(device)


@on_devices("n", host=[], emulated=[], gpu=[1, 17])
def test_weights_beyond_two_gigabytes(device: Device, n: int) -> None:
    checks.check_far_expert(device, n)


TYPES = [("Q4_K", "Q4_K"), ("Q4_K", "Q6_K"), ("Q5_K", "Q8_0"), ("Q8_0", "Q8_0"), ("Q4_0", "Q4_0")]


@on_devices(
    "types, n, k, experts, inner, cols, shared",
    host=[],
    emulated=[
        (("Q4_K", "Q6_K"), 2, 3, 9, 256, 256, "gated"),
        (("Q4_K", "Q4_K"), 1, 2, 9, 512, 512, ""),
        (("Q8_0", "Q8_0"), 3, 2, 9, 96, 160, "plain"),
        (("Q4_0", "Q8_0"), 1, 8, 9, 32, 64, "gated"),
        (("Q5_K", "Q5_K"), 1, 1, 9, 256, 256, "plain"),
    ],
    gpu=[
        (types, n, 8, 20, 512, 1280, shared)
        for types, (n, shared) in itertools.product(TYPES, [(1, "gated"), (5, "plain"), (16, "")])
    ],
)
def test_expert_mlp(
    device: Device, types: tuple[str, str], n: int, k: int, experts: int, inner: int, cols: int, shared: str
) -> None:
    checks.check_expert_mlp(device, types, n, k, experts=experts, inner=inner, cols=cols, shared=shared)


@on_devices(
    "types, n, k, experts, inner, cols, shared",
    host=[],
    emulated=[
        (("Q4_K", "Q6_K"), 17, 2, 9, 512, 512, "gated"),
        (("Q8_0", "Q8_0"), 18, 2, 3, 160, 544, "plain"),
        (("Q5_K", "Q4_0"), 19, 3, 49, 544, 512, ""),
        (("Q4_0", "Q5_K"), 41, 1, 2, 512, 512, "gated"),
    ],
    gpu=[
        (types, n, k, experts, 512, 1280, shared)
        for types, (n, k, experts, shared) in itertools.product(
            TYPES, [(17, 8, 256, "gated"), (64, 8, 256, "plain"), (143, 2, 8, "gated"), (100, 4, 20, "")]
        )
    ],
    emulated_devices=("emulated, 32 lanes",),
)
def test_experts_of_many_rows_have_the_bits_of_each_row_alone(
    device: Device, types: tuple[str, str], n: int, k: int, experts: int, inner: int, cols: int, shared: str
) -> None:
    if not moe_rows.serves(device):
        pytest.skip("the device has no such products")
    checks.check_expert_mlp(device, types, n, k, experts=experts, inner=inner, cols=cols, shared=shared)


# A copy ends with the memory of Q8_0, whose blocks begin at any even byte, but not with that of Q4_K.
@pytest.mark.parametrize("down", ["Q8_0", "Q4_K"])
@on_devices("n", host=[], emulated=[3, 17], gpu=[3, 17], emulated_devices=("emulated, 32 lanes",))
def test_experts_with_downs_that_end_within_a_tile(device: Device, n: int, down: str) -> None:
    if n > FEW_ROWS and not moe_rows.serves(device):
        pytest.skip("the device has no such products")
    sizes = {"experts": 3, "inner": 256, "cols": 96}
    checks.check_expert_mlp(device, ("Q8_0", down), n, 2, **sizes, shared="gated", outputs=41)


@on_devices(
    "types, n, k, experts, inner, cols, shared",
    host=[],
    emulated=[(("Q8_0", "Q4_0"), 2, 2, 4, 64, 128, "")],
    gpu=[(("Q4_K", "Q6_K"), 3, 4, 9, 768, 512, "gated")],
)
def test_experts_with_gates_and_ups_in_one_tensor(
    device: Device, types: tuple[str, str], n: int, k: int, experts: int, inner: int, cols: int, shared: str
) -> None:
    sizes = {"experts": experts, "inner": inner, "cols": cols}
    checks.check_expert_mlp(device, types, n, k, **sizes, shared=shared, together=True)


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
    parts = [decoded(gate).reshape(3, gate_rows, 256), decoded(up).reshape(3, up_rows, 256)]
    np.testing.assert_array_equal(weight.matrix, np.concatenate(parts, axis=1))


@emulated_only
def test_kernel_weights_stay_as_the_file_holds_them(device: Device) -> None:
    tensors = [random_tensor("Q6_K", 3 * 2, 256, 5), random_tensor("Q8_0", 3 * 4, 256, 6)]
    weight = upload_experts(device, tensors, 3)
    assert [(p.first // 3, p.rows // 3) for p in weight.parts] == [(0, 2), (2, 4)]
    for part, tensor in zip(weight.parts, tensors, strict=True):
        np.testing.assert_array_equal(device.download(part.data), tensor.raw)
