"""The emulated device held against the GPU: bit-equal where no math library is involved, close elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.ops.embedding import embed
from luce.ops.matmul import FEW_ROWS, matmul
from luce.ops.norm import add_rms_norm, head_rms_norm, rms_norm
from luce.ops.qkv import HeadNorms, Rotation, prepare_queries
from luce.ops.sample import argmax
from luce.ops.weight import upload_weight
from luce.runtime.device import Device
from tests.support.emulated import EmulatedDevice
from tests.support.make_driver import MakeDriver, make_driver
from tests.support.op_checks_matmul import product_limit, rounds_to_fp16
from tests.support.quant_blocks import decoded, random_tensor
from tests.support.quantised import seen
from tests.support.reference import Reference, errors

__all__ = ["make_driver"]
pytestmark = pytest.mark.gpu

Result = NDArray[np.generic]


@pytest.fixture
def twin(gpu: Device) -> Iterator[EmulatedDevice]:
    """An emulated device with as many lanes as the GPU, and products in hardware for the same types."""
    device = EmulatedDevice(gpu.lanes, products=gpu.products & {"F16", "BF16"})
    yield device
    device.close()


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def same_bits(gpu: Device, twin: Device, work: Callable[[Device], Result]) -> None:
    np.testing.assert_array_equal(work(gpu), work(twin))


#: of up to 16 rows, BF16 alone is multiplied by tensor cores
FORMATS = ["F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("rows", [1, 5, FEW_ROWS])
@pytest.mark.parametrize("format", FORMATS)
def test_matmul(gpu: Device, twin: Device, format: str, rows: int) -> None:
    tensor, x = random_tensor(format, 70, 768, seed=1), normal(rows, 768)
    same_bits(gpu, twin, lambda d: d.download(matmul(d, d.upload(x), upload_weight(d, [tensor]))))


@pytest.mark.parametrize(
    ("format", "rows"), [("BF16", 1), ("BF16", 5), ("BF16", FEW_ROWS), *((format, 40) for format in ("BF16", *FORMATS))]
)
def test_matmul_by_tensor_cores(gpu: Device, twin: Device, format: str, rows: int) -> None:
    # In what order they add products is their business; both come as close to float64 as float32 sums can.
    tensor, x = random_tensor(format, 70, 768, seed=1), normal(rows, 768)
    results = [d.download(matmul(d, d.upload(x), upload_weight(d, [tensor]))) for d in (gpu, twin)]
    assert errors(*results).max() < 1e-10
    w, met = decoded(tensor), seen(gpu, format, x)
    limit = product_limit(met, w, fp16=rounds_to_fp16(gpu, format, rows, x.shape[1]))
    for result in results:
        assert (np.abs(result - met @ w.astype(np.float64).T) <= limit).all()


def test_embed(gpu: Device, twin: Device) -> None:
    tensor, tokens = random_tensor("Q6_K", 50, 512, seed=2), np.array([3, 49, 0, 3], np.int32)
    same_bits(gpu, twin, lambda d: d.download(embed(d, upload_weight(d, [tensor]), d.upload(tokens))))


def test_norms(gpu: Device, twin: Device) -> None:
    x, delta, weight = normal(5, 1000), normal(5, 1000, seed=1), normal(1000, seed=2)

    def heads(d: Device) -> Result:
        values = d.upload(x.reshape(5, 10, 100))
        head_rms_norm(d, values, d.upload(weight[:100]), 1e-6)
        return d.download(values)

    same_bits(gpu, twin, lambda d: d.download(rms_norm(d, d.upload(x), d.upload(weight), 1e-6)))
    same_bits(gpu, twin, lambda d: d.download(add_rms_norm(d, d.upload(x), d.upload(delta), d.upload(weight), 1e-6)))
    same_bits(gpu, twin, heads)


@pytest.mark.parametrize("adjacent", [False, True])
def test_rope(gpu: Device, twin: Device, adjacent: bool) -> None:
    angles = np.random.default_rng(3).uniform(0, 6, (5, 24))
    table = np.stack((np.cos(angles), np.sin(angles)), axis=-1).astype(np.float32)

    def work(d: Device) -> Result:
        x = d.upload(normal(5, 3, 64))
        prepare_queries(d, x, HeadNorms(), Rotation(d.upload(table), adjacent))
        return d.download(x)

    same_bits(gpu, twin, work)


def test_argmax(gpu: Device, twin: Device) -> None:
    logits = np.round(normal(4, 5000), 1)
    same_bits(gpu, twin, lambda d: d.download(argmax(d, d.upload(logits))))


@pytest.mark.parametrize(("name", "limit"), [("qwen3-a-F32", 1e-7), ("qwen35-a-Q8_0", 1e-3)])
def test_models_agree(gpu: Device, twin: Device, make_driver: MakeDriver, name: str, limit: float) -> None:
    # exp, sin and cos differ by a unit in the last place between math libraries, and sums of tensor cores too; a random
    # network amplifies it, and where activations become bytes one of them may round the other way.
    reference = Reference(name)
    results = []
    for device in (gpu, twin):
        driver = make_driver(reference, [device])
        results.append(driver.feed((driver.start(), reference.expected["prompt_17"][:FEW_ROWS]))[0])
    assert np.median(errors(results[0], results[1])) < limit
