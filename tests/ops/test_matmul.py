"""matmul against float64, and matmul_vec, matmul_int8, quantise, matmul_tile, fp16 and dequant of kernels/.

Every format and row count, sums of real length, and equal bits where luce.ops.matmul promises them.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from luce.gguf.quants import dequantize
from luce.ops import weight as weight_module
from luce.ops.embedding import embed
from luce.ops.matmul import adds_row, matmul, norms_row
from luce.ops.matmul_prefill import BLAS_ROWS
from luce.ops.weight import KERNEL_TYPES, Weight, WeightPart, upload_weight
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support import op_checks_matmul as checks
from tests.support.devices import EMULATED, emulated_32, emulated_only, emulated_wgmma, on_devices
from tests.support.emulated import EmulatedDevice
from tests.support.quant_blocks import FORMATS, PLAIN, block_cols, decoded, random_tensor, whole_blocks
from tests.support.quantised import INT8, seen

if TYPE_CHECKING:
    from luce.models.spec import Activation

# The device whose rows of weights come by bulk copies.
BULK = ("emulated, wgmma",)
# Row counts one below, at and above what a variant of matmul_vec holds would compile them all for every format; each
# format meets one variant here, and one format meets all of them below.
FEW = {name: (1, 2, 4)[i % 3] for i, name in enumerate(FORMATS)}

bf16_tiles = on_devices(host=[], gpu=[], emulated_devices=("emulated, mma",))


@pytest.mark.parametrize("n", [1, 8, 9, 33])
def test_product_of_stacked_tensors(n: int) -> None:
    tensors = [random_tensor("Q4_K", 5, 512, 1), random_tensor("F32", 1, 512, 2), random_tensor("Q8_0", 31, 512, 3)]
    wide = np.random.default_rng(n).standard_normal((n, 520)).astype(np.float32)
    x = wide[:, 3:515]
    device = HostDevice()
    actual = matmul(device, x, upload_weight(device, tensors))
    w = np.concatenate([decoded(t) for t in tensors]).astype(np.float64)
    expected = np.einsum("nk,rk->nr", x.astype(np.float64), w)
    size = np.einsum("nk,rk->nr", np.abs(x).astype(np.float64), np.abs(w))
    assert actual.dtype == np.float32
    assert (np.abs(actual - expected) <= 2.0**-24 * 32 * size).all()


def test_inner_dimensions_must_agree() -> None:
    device = HostDevice()
    weight = upload_weight(device, [random_tensor("F32", 3, 8, 0)])
    with pytest.raises(ValueError, match="x has 9 features, the weight 8"):
        matmul(device, np.zeros((1, 9), np.float32), weight)


def test_kernel_types_are_those_of_the_checks() -> None:
    assert {t.name for t in KERNEL_TYPES} == set(FORMATS)


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
@emulated_only
def test_types_without_a_kernel_become_fp16(device: Device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_module, "KERNEL_TYPES", KERNEL_TYPES - {GGMLQuantizationType[name]})
    tensor = random_tensor(name, 3, 512, 4)
    weight = upload_weight(device, [tensor])
    assert weight.parts[0].type.name == "F16"
    tokens = device.upload(np.array([2, 0, 1], np.int32))
    actual = device.download(embed(device, weight, tokens))
    expected = dequantize(tensor.raw, tensor.type)[[2, 0, 1]].astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(actual, expected)


@emulated_only
def test_weights_stay_as_the_file_holds_them(device: Device) -> None:
    tensors = [random_tensor("Q6_K", 3, 256, 5), random_tensor("BF16", 2, 256, 6)]
    weight = upload_weight(device, tensors)
    assert (weight.rows, weight.cols) == (5, 256)
    assert [(p.first, p.rows, p.type) for p in weight.parts] == [(0, 3, tensors[0].type), (3, 2, tensors[1].type)]
    for part, tensor in zip(weight.parts, tensors, strict=True):
        np.testing.assert_array_equal(device.download(part.data), tensor.raw)
    assert weight.nbytes == 3 * 210 + 2 * 512


@on_devices(
    "name, rows, cols, n",
    host=[],
    emulated=[
        # Few rows.
        *((name, 9, max(64, 5 * block_cols(name)), FEW[name]) for name in FORMATS),
        # Many rows.
        *((name, 131, whole_blocks(name, 96), 17) for name in FORMATS),
        # Tiles of every shape.
        *(("Q8_0", rows, 96, n) for rows, n in [(1, 65), (128, 64), (129, 130)]),
        # Enough rows for a BLAS library, and columns that it does not take.
        *((name, 131, 256, BLAS_ROWS) for name in ("F32", "F16", "Q4_0", "Q6_K")),
        *(("F16", 3, cols, BLAS_ROWS) for cols in (3, 71)),
    ],
    gpu=[
        *((name, 133, 2816, n) for name in FORMATS for n in (1, 2, 3, 7, 16, 17, 33, 100, BLAS_ROWS + 8)),
        # Products of real size.
        *((name, 1024, 17408, n) for name in ("Q4_K", "Q6_K", "BF16") for n in (1, 16, 512)),
    ],
)
def test_product(device: Device, name: str, rows: int, cols: int, n: int) -> None:
    checks.check_product(device, name, rows=rows, cols=cols, n=n)


@on_devices(
    "name, rows, cols, n",
    host=[],
    emulated=[
        *((name, 3, cols, n) for name, n, cols in itertools.product(PLAIN, [FEW["F32"], 17], [1, 3, 71])),
        ("F32", 3, 71, BLAS_ROWS),
    ],
    gpu=[(name, 5, cols, n) for name, n, cols in itertools.product(PLAIN, [1, 16, 33, BLAS_ROWS], [1, 3, 71, 1027])],
)
def test_rows_of_any_length(device: Device, name: str, rows: int, cols: int, n: int) -> None:
    checks.check_product(device, name, rows=rows, cols=cols, n=n)


@pytest.mark.parametrize("n", [1, 8, 9, 16])
@pytest.mark.parametrize(("rows", "cols"), [(37, 352), (1, 32), (4099, 32)])
@bf16_tiles
def test_bfloat16_in_tiles(device: Device, rows: int, cols: int, n: int) -> None:
    checks.check_product(device, "BF16", rows=rows, cols=cols, n=n)


@bf16_tiles
def test_rows_in_tiles_do_not_depend_on_their_neighbours(device: Device) -> None:
    checks.check_neighbours(device, "BF16", rows=37, cols=352, counts=[1, 2, 8, 9, 16])


@bf16_tiles
def test_infinities_in_tiles(device: Device) -> None:
    tensor, x = random_tensor("BF16", 5, 64, seed=3), np.ones((3, 64), np.float32)
    x[1, 7], x[2, 9] = np.inf, np.nan
    actual = device.download(matmul(device, device.upload(x), upload_weight(device, [tensor])))
    assert np.isfinite(actual[0]).all() and np.isnan(actual[2]).all()
    np.testing.assert_array_equal(actual[1], np.where(decoded(tensor)[:, 7] > 0, np.inf, -np.inf))


@on_devices(
    "name, rows, cols, counts",
    host=[("Q4_K", 37, 768, [1, 2, 5, 8])],
    emulated=[
        ("F16", 11, 1280, checks.each_few()),
        ("Q5_1", 11, 320, checks.each_few()),
        ("F32", 9, 71, [1, 16, 17, 40]),
        # Products of int8.
        *(
            (name, rows, cols, [1, 2, 3, 8, 9, 16])
            for name, rows, cols in [
                *[("Q4_K", 37, 1280), ("Q5_K", 9, 768), ("Q6_K", 21, 1280), ("Q8_0", 19, 1312), ("Q4_0", 7, 96)],
                *[("Q4_K", 18, 2304), ("Q6_K", 21, 4352), ("Q4_0", 18, 2080)],  # eight chains
            ]
        ),
    ],
    gpu=[
        *((name, 133, 2816, checks.each_few()) for name in FORMATS),
        # Blocks of three tiles.
        *((name, 4300, 6144, [1, 3, 8, 9, 16]) for name in INT8),
        ("Q4_K", 300, 2816, [17, 63, 64, 65, 128, BLAS_ROWS - 1]),
        ("F32", 257, 2048, [1, 16, 17, 64, BLAS_ROWS - 1]),
    ],
)
def test_rows_do_not_depend_on_their_neighbours(
    device: Device, name: str, rows: int, cols: int, counts: list[int]
) -> None:
    checks.check_neighbours(device, name, rows, cols, counts)


@on_devices(
    "rows, cols, n",
    host=[],
    emulated=[
        (257, 1100, 144),  # two parts, and a feature beyond two tiles
        (130, 68, 260),  # a tile of two features, three of rows
        (3, 71, 145),  # off 16-byte boundaries
        (129, 1, BLAS_ROWS),
        (1, 192, BLAS_ROWS),
    ],
    gpu=[(257, 2048, 2048), (256, 2048, 1000), (1030, 5120, 300), (5, 1027, BLAS_ROWS), (129, 1026, 145)],
    emulated_devices=("emulated, wgmma",),
)
def test_float_weights_by_groups_of_waves(device: Device, rows: int, cols: int, n: int) -> None:
    checks.check_halves(device, rows, cols, n)


@emulated_wgmma
def test_special_rows_of_float_weights_by_groups_of_waves(device: Device) -> None:
    checks.check_infinities(device, BLAS_ROWS)
    checks.check_row_stride(device, "F32", BLAS_ROWS, 36)
    checks.check_range(device, "F32", BLAS_ROWS)


@on_devices(
    "rows, cols, counts",
    host=[],
    emulated=[(129, 1028, [144, 150, 257])],
    gpu=[(257, 2048, [144, 300, 1000, 2048]), (1030, 1027, [144, 333])],
    emulated_devices=("emulated, wgmma",),
)
def test_neighbours_leave_the_bits_of_rows_by_float_weights(
    device: Device, rows: int, cols: int, counts: list[int]
) -> None:
    checks.check_neighbours(device, "F32", rows, cols, counts)


@pytest.mark.parametrize(("name", "cols"), [("Q4_K", 2304), ("Q5_K", 2048)])
@emulated_32
def test_three_tiles_a_block(device: Device, name: str, cols: int) -> None:
    with checks.tiles(3):
        checks.check_neighbours(device, name, rows=70, cols=cols, counts=[1, 16])


@pytest.mark.parametrize(("name", "cols"), [("Q8_0", 1312), ("Q4_0", 2080)])
@emulated_32
def test_little_shared_memory(device: Device, name: str, cols: int) -> None:
    device.shared_limit = 64 << 10
    checks.check_neighbours(device, name, rows=20, cols=cols, counts=[1, 8, 16])


@pytest.mark.parametrize("name", INT8)
@emulated_32
def test_steps_that_end_with_the_row(device: Device, name: str) -> None:
    for n in (3, 16):
        checks.check_product(device, name, rows=20, cols=4096, n=n)


@pytest.mark.parametrize("name", INT8)
@pytest.mark.parametrize("n", [1, 7, 16])
def test_int8_sums_are_the_same_on_all_emulated_devices(name: str, n: int) -> None:
    devices = [EmulatedDevice(32), EmulatedDevice(64)]
    for rows, cols in ((18, 5 * block_cols(name)), (3, block_cols(name))):
        checks.check_same_everywhere(devices, name, rows, cols, n)


@pytest.mark.parametrize("name", INT8)
@pytest.mark.parametrize("n", [1, 2, 16])
@emulated_wgmma
def test_int8_sums_are_the_same_where_rows_come_by_bulk_copies(device: Device, name: str, n: int) -> None:
    # Four chains, and eight in three steps; missing and cut off units; rows that begin anywhere; the end of memory.
    for rows, units in ((19, 5), (11, 18)):
        checks.check_same_everywhere([device, EmulatedDevice(32)], name, rows, units * 256 + block_cols(name) % 256, n)


@pytest.mark.parametrize("name", INT8)
@pytest.mark.parametrize("lanes", [32, 64])
@on_devices(host=[], emulated=[])
def test_int8_sums_are_the_same_on_a_gpu(device: Device, name: str, lanes: int) -> None:
    for n in (1, 2, 8, 16):
        checks.check_same_everywhere([device, EmulatedDevice(lanes)], name, 40, 5 * block_cols(name), n)


@pytest.mark.parametrize("group", [32, 128])
@on_devices(
    "n, cols",
    host=[],
    emulated=[(1, 32), (2, 512), (5, 320), (16, 96), (29, 160)],
    gpu=[(1, 5120), (5, 320), (16, 17408), (29, 5120)],
)
def test_quantise(device: Device, n: int, cols: int, group: int) -> None:
    checks.check_quantise(device, n, cols, group)


@on_devices("name", INT8, host=[])
def test_nan_stays_in_its_row(device: Device, name: str) -> None:
    checks.check_nan_in_int8(device, name)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@on_devices("n, cols", host=[], emulated=[(1, 32), (3, 352)], gpu=[(n, 17408) for n in (1, 2, 7, 16)])
def test_quantised_gate(device: Device, n: int, cols: int, activation: Activation, group: int) -> None:
    checks.check_quantised_gate(device, activation, n, cols, group)


@on_devices("n", host=[], emulated=[2, 17], gpu=[1, 2, 16, 17, 100])
def test_parts_lie_side_by_side(device: Device, n: int) -> None:
    checks.check_parts(device, n)


# Rows that end within a section, a thread's place of norm.cu's block, and a chain's second units; tiles that end within
# a block.
NORMED = [("Q8_0", 5, 992), ("Q4_0", 50, 1760), ("Q6_K", 17, 1024), ("Q4_K", 97, 1280), ("Q5_K", 1030, 2048)]


@on_devices("name, rows, cols", NORMED, host=[], emulated_devices=(*EMULATED, *BULK))
def test_product_that_norms_its_row(device: Device, name: str, rows: int, cols: int) -> None:
    checks.check_norm_within(device, [name], [rows], cols)


@pytest.mark.parametrize(("names", "rows"), [(("Q5_K", "Q4_K"), (100, 30)), (("Q4_K", "Q6_K"), (50, 17))])
@on_devices("cols", host=[], emulated=[1024], gpu=[1024, 1792])
def test_parts_that_norm_their_row(device: Device, names: tuple[str, ...], rows: tuple[int, ...], cols: int) -> None:
    checks.check_norm_within(device, names, rows, cols)


def test_rows_that_products_do_not_norm() -> None:
    device = EmulatedDevice()

    def normed(cols: int, *parts: tuple[str, int], rows: int = 1) -> bool:
        made = [WeightPart(None, GGMLQuantizationType[name], 0, count) for name, count in parts]
        return norms_row(device, rows, Weight(sum(part.rows for part in made), cols, tuple(made)))

    assert normed(2048, ("Q5_K", 8192), ("Q4_K", 4160))
    assert not normed(2048, ("Q5_K", 8192), ("Q4_K", 4160), rows=2)
    assert normed(2048, ("Q4_K", 16384)) and not normed(2048, ("Q4_K", 16385))
    assert not normed(2304, ("Q4_K", 1040))  # three units a chain
    assert not normed(4096, ("Q4_K", 1040)) and not normed(768, ("Q4_K", 16))  # eight chains, two
    assert not normed(2048, ("Q4_K", 8704), ("Q6_K", 512))  # eight chains of the second
    assert not normed(1024, ("Q4_K", 16), ("Q5_K", 16))  # two launches
    assert not normed(1024, ("Q4_K", 16), ("BF16", 16))
    assert not normed(1024, ("F32", 16)) and not normed(1024, ("Q5_0", 16))
    device.shared_limit = 48 << 10
    assert not normed(2048, ("Q5_K", 8192))


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        (("Q4_0",), (17,)),
        (("Q8_0",), (5,)),
        (("Q6_K",), (31,)),
        (("Q5_K", "Q4_K"), (17, 18)),
        (("Q8_0", "Q6_K"), (3, 20)),
    ],
)
@on_devices("cols", host=[], emulated=[1024], gpu=[1024, 4096])
def test_product_added_to_a_row(device: Device, names: tuple[str, ...], rows: tuple[int, ...], cols: int) -> None:
    checks.check_added(device, names, rows, cols)


def test_products_that_are_not_added() -> None:
    device = EmulatedDevice()
    part = WeightPart(None, GGMLQuantizationType.Q4_K, 0, 16)
    weight = Weight(16, 256, (part,))
    assert adds_row(device, 1, weight) and not adds_row(device, 2, weight) and not adds_row(HostDevice(), 1, weight)
    weight.bias = np.zeros(16, np.float32)
    assert not adds_row(device, 1, weight)
    assert not adds_row(device, 1, Weight(16, 256, (WeightPart(None, GGMLQuantizationType.BF16, 0, 16),)))


@pytest.mark.parametrize(("first", "second"), [("Q5_K", "Q4_K"), ("Q4_K", "Q6_K")])
@on_devices("n", host=[], emulated=[1, 5, 16], gpu=[1, 2, 8, 16], emulated_devices=(*EMULATED, *BULK))
def test_two_formats_in_one_launch(device: Device, n: int, first: str, second: str) -> None:
    checks.check_pair(device, first, second, n)


@on_devices("n, cols", host=[], emulated=[(1, 32), (19, 1027)], gpu=[(2048, 2048), (1025, 2051)])
def test_many_rows_and_one_row_of_weights(device: Device, n: int, cols: int) -> None:
    checks.check_row(device, n, cols)


@on_devices(
    "name, cols, n",
    host=[],
    emulated=[
        *((*format, n) for format, n in itertools.product([("F32", 37), ("Q4_K", 256)], [3, 18])),
        ("F32", 37, BLAS_ROWS),
    ],
    gpu=[
        (*format, n)
        for format, n in itertools.product([("F32", 37), ("F16", 91), ("Q4_K", 256), ("Q8_0", 96)], [1, 3, 16, 18])
    ],
)
def test_row_stride(device: Device, name: str, cols: int, n: int) -> None:
    checks.check_row_stride(device, name, n, cols)


@on_devices("n", host=[], emulated=[3, 19, BLAS_ROWS], gpu=[3, 16, 19, BLAS_ROWS])
def test_infinities(device: Device, n: int) -> None:
    checks.check_infinities(device, n)


@on_devices("n", [19, BLAS_ROWS], host=[])
def test_rows_beyond_the_range_of_fp16(device: Device, n: int) -> None:
    checks.check_range(device, "Q4_K", n)
    checks.check_outliers(device, n)


@on_devices("rows, cols", host=[], emulated=[(3, 2176), (130, 3072)], gpu=[])
def test_columns_in_parts(device: Device, rows: int, cols: int) -> None:
    checks.check_product(device, "Q8_0", rows=rows, cols=cols, n=18)
    checks.check_neighbours(device, "Q8_0", rows=3, cols=cols, counts=[17, 18, 70])


@on_devices("features", [1, 1000], host=[])
def test_slices_of_features(device: Device, features: int) -> None:
    checks.check_slices(device, BLAS_ROWS, features)


@on_devices(
    "shape, slots, top",
    host=[],
    emulated=[((5, 7), False, 15), ((4, 1024), False, 15), ((4, 2100), False, -2), ((4, 3, 72), True, 8)],
    gpu=[((5, 7), False, 15), ((40, 17408), False, 8), ((50, 8, 512), True, 15)],
)
def test_fp16_rows(device: Device, shape: tuple[int, ...], slots: bool, top: int) -> None:
    checks.check_fp16_rows(device, shape, slots=slots, top=top)


@on_devices(
    "name, cols",
    host=[],
    emulated=[(name, 2 * max(256, block_cols(name))) for name in FORMATS if name != "F32"],
    gpu=[(name, 2816) for name in FORMATS if name != "F32"],
)
def test_dequantised_weights(device: Device, name: str, cols: int) -> None:
    checks.check_dequantised(device, name, cols)


@on_devices(host=[])
def test_empty(device: Device) -> None:
    checks.check_empty(device)


@on_devices("name", host=[], emulated=[], gpu=["Q4_K", "F16"])
def test_equal_steps_give_equal_bits(device: Device, name: str) -> None:
    tensor = random_tensor(name, 1024, 5120, seed=1)
    x = device.upload(np.random.default_rng(2).standard_normal((600, 5120)).astype(np.float32))
    weight = upload_weight(device, [tensor])
    results = [device.download(matmul(device, x, weight)) for _ in range(3)]
    assert (results[0] == results[1]).all()
    assert (results[0] == results[2]).all()


@on_devices(host=[], emulated=[])
def test_a_library_waits_for_weights_on_their_way(device: Device) -> None:
    rng = np.random.default_rng(4)
    x, matrix = (rng.standard_normal((rows, 8192)).astype(np.float32) for rows in (200, 4096))
    there, results = device.upload(x), []
    for wait in (lambda: None, device.synchronize):
        weight, out = device.load(matrix), device.empty((200, 4096))
        wait()
        device.gemm(there, weight, out)
        results.append(device.download(out))
        # What the next array finds in this memory.
        device.write(weight, np.zeros_like(matrix))
        del weight
    np.testing.assert_array_equal(*results)


@on_devices("n", host=[], emulated=[], gpu=[1, 17])
def test_weights_beyond_two_gigabytes(device: Device, n: int) -> None:
    tensor = random_tensor("Q8_0", 1, 32768, seed=9)
    rows = 2**31 // tensor.raw.shape[1] + 100
    data = device.zeros((rows, tensor.raw.shape[1]), np.uint8)
    data[rows - 1] = device.upload(tensor.raw[0])
    weight = Weight(rows, 32768, (WeightPart(data, tensor.type, 0, rows),))
    x = np.random.default_rng(1).standard_normal((n, 32768)).astype(np.float32)
    actual = device.download(matmul(device, device.upload(x), weight))
    w = decoded(tensor)[0].astype(np.float64)
    x = seen(device, "Q8_0", x)
    limit = checks.product_limit(x, w[None], fp16=checks.rounds_to_fp16(device, "Q8_0", n, 32768))[:, 0]
    assert (np.abs(actual[:, -1] - x.astype(np.float64) @ w) <= limit).all()
    assert not actual[:, :-1].any()


@on_devices("n", [1, 16, 17])
def test_bias(device: Device, n: int) -> None:
    checks.check_bias(device, n)
