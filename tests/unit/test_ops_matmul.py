"""matmul on the host device against float64, and how weights are placed."""

from __future__ import annotations

import numpy as np
import pytest

from luce.gguf.quants import dequantize
from luce.ops.embedding import embed
from luce.ops.matmul import matmul
from luce.ops.weight import KERNEL_TYPES, upload_weight
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support import op_checks_matmul as checks
from tests.support.quant_blocks import FORMATS, decoded, random_tensor


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


def test_company_of_few_rows_does_not_matter_on_the_host() -> None:
    checks.check_company(HostDevice(), "Q4_K", rows=37, cols=768, counts=[1, 2, 5, 8])


def test_inner_dimensions_must_agree() -> None:
    device = HostDevice()
    weight = upload_weight(device, [random_tensor("F32", 3, 8, 0)])
    with pytest.raises(ValueError, match="x has 9 features, the weight 8"):
        matmul(device, np.zeros((1, 9), np.float32), weight)


def test_kernel_types_are_those_of_the_checks() -> None:
    assert {t.name for t in KERNEL_TYPES} == set(FORMATS)


@pytest.mark.parametrize("name", ["IQ2_XS", "IQ3_S"])
def test_types_without_a_kernel_become_half_precision(emulated: Device, name: str) -> None:
    tensor = random_tensor(name, 3, 512, 4)
    weight = upload_weight(emulated, [tensor])
    assert weight.parts[0].type.name == "F16"
    tokens = emulated.upload(np.array([2, 0, 1], np.int32))
    actual = emulated.download(embed(emulated, weight, tokens))
    expected = dequantize(tensor.raw, tensor.type)[[2, 0, 1]].astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(actual, expected)


def test_weights_stay_as_the_file_holds_them(emulated: Device) -> None:
    tensors = [random_tensor("Q6_K", 3, 256, 5), random_tensor("BF16", 2, 256, 6)]
    weight = upload_weight(emulated, tensors)
    assert (weight.rows, weight.cols) == (5, 256)
    assert [(p.first, p.rows, p.type) for p in weight.parts] == [(0, 3, tensors[0].type), (3, 2, tensors[1].type)]
    for part, tensor in zip(weight.parts, tensors, strict=True):
        np.testing.assert_array_equal(emulated.download(part.data), tensor.raw)
    assert weight.nbytes == 3 * 210 + 2 * 512
