"""--prompt-precision int8: near the logits of fp16, the same bits on a split, refused by devices that cannot do it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.backend.layersplit import LayerSplitBackend
from luce.backend.serving_options import ServingOptions
from luce.errors import DeviceError
from luce.gguf.reader import open_gguf
from luce.kvcache.page_table import PageTables
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.ops import half_products
from luce.ops.matmul_prefill import BLAS_ROWS
from luce.runtime.device import Array, Device
from luce.runtime.gpu import GpuDevice
from luce.runtime.host import HostDevice
from luce.runtime.step import Span, Step
from tests.support.daemons import devices
from tests.support.emulated import EmulatedDevice
from tests.support.warm import WARM
from tools.compare_precision import difference, text_logits

REFERENCE = Path(__file__).parents[1] / "reference"
DENSE, DELTANET = REFERENCE / "qwen3-a-MIX.gguf", REFERENCE / "qwen35-b-Q4_K_M.gguf"
MIXTURE = REFERENCE / "laguna-b-Q4_K_M.gguf"
TOKENS = np.random.default_rng(0).integers(0, 200, BLAS_ROWS, np.int32)


def _logits(
    path: Path, devices: Sequence[Device], precision: str, *, unpack: bool | None = None
) -> NDArray[np.float32]:
    """On several devices with copies of weights, if not said otherwise."""
    with open_gguf(path) as file:
        spec = read_spec(Source(str(path), file.metadata, file.tensors))
        options = ServingOptions(
            context=256, chunk=256, prompt_precision=precision, unpack=len(devices) > 1 if unpack is None else unpack
        )
        backend = LayerSplitBackend(file, spec, devices, options)
        try:
            model: Any = SimpleNamespace(backend=backend)
            return text_logits(model, [TOKENS])
        finally:
            backend.close()


def _logits_of_sequences(device: Device) -> NDArray[np.float32]:
    """The tokens are those of as many sequences, of which one step has a row each."""
    with open_gguf(DELTANET) as file:
        spec = read_spec(Source(str(DELTANET), file.metadata, file.tensors))
        options = ServingOptions(context=64, chunk=256, slots=BLAS_ROWS)
        backend = LayerSplitBackend(file, spec, [device], options)
        try:
            pages = PageTables.over(backend, 256)
            for slot in range(BLAS_ROWS):
                pages.reserve(slot, 1)
                pages.extend(slot, 0, 1)
            spans, wanted = [Span(slot, slot, 1, 0) for slot in range(BLAS_ROWS)], np.arange(BLAS_ROWS, dtype=np.int32)
            step = Step.of_spans(spans, TOKENS, pages.views, wanted, needs_logits=True)
            return np.array(backend.forward(step).logits)
        finally:
            backend.close()


@pytest.fixture(scope="module")
def int8() -> NDArray[np.float32]:
    """The logits on one emulated device, which keeps no copies of weights."""
    return _logits(DENSE, [EmulatedDevice()], "int8")


@pytest.mark.emulated
def test_logits_are_near_those_of_fp16(int8: NDArray[np.float32]) -> None:
    found = difference(_logits(DENSE, [EmulatedDevice()], "fp16"), int8, TOKENS[1:])
    assert 1e-6 < found.nmse_median < 1e-2 and found.top > 0.9


@pytest.mark.emulated
@pytest.mark.parametrize(
    "path, shapes",
    [
        (DENSE, {(384, 64), (64, 128), (64, 192)}),
        (DELTANET, {(1544, 256), (1536, 256), (512, 256), (256, 512), (256, 256)}),
    ],
)
def test_products_of_halves_are_near_those_of_floats(
    monkeypatch: pytest.MonkeyPatch, path: Path, shapes: set[tuple[int, int]]
) -> None:
    """They add less to the error of logits than the other rounding to fp16 does (4e-6). `shapes`: their weights'."""
    exact, floats = _logits(path, [HostDevice()], "fp16"), _logits(path, [EmulatedDevice()], "fp16")
    monkeypatch.setattr(half_products, "LEAST_FEATURES", 16)
    device, found_shapes = EmulatedDevice(), set()

    def gemm(x: Array, weight: Array, out: Array) -> None:
        if out.dtype == np.float16:
            found_shapes.add(weight.shape)
        EmulatedDevice.gemm(device, x, weight, out)

    monkeypatch.setattr(device, "gemm", gemm)
    halves = _logits(path, [device], "fp16")
    assert found_shapes == shapes
    first, found = (difference(exact, logits, TOKENS[1:]) for logits in (floats, halves))
    assert 1e-6 < first.nmse_median < found.nmse_median < 2 * first.nmse_median and found.top == 1


@pytest.mark.emulated
def test_many_replies_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeltaNet and attention read halves of long sequences alone, and other layers of these too."""
    floats = _logits_of_sequences(EmulatedDevice())
    monkeypatch.setattr(half_products, "LEAST_FEATURES", 16)
    found = difference(floats, _logits_of_sequences(EmulatedDevice()), TOKENS)
    assert 1e-7 < found.nmse_median < 1e-5 and found.top > 0.98


@pytest.mark.emulated
def test_prompts_on_a_split_have_the_bits_of_one_device(int8: NDArray[np.float32]) -> None:
    """Which keeps copies of weights."""
    split = _logits(DENSE, [EmulatedDevice(), EmulatedDevice()], "int8")
    np.testing.assert_array_equal(split, int8)


def _four_waves() -> EmulatedDevice:
    return EmulatedDevice(products=("F16", "BF16", "WGMMA"))


@pytest.mark.emulated
def test_experts_as_int8_are_near_those_of_fp16() -> None:
    """With copies and without, on one device and on a split, to the same bits."""
    exact = _logits(MIXTURE, [_four_waves()], "fp16")
    alone = _logits(MIXTURE, [_four_waves()], "int8", unpack=True)
    found = difference(exact, alone, TOKENS[1:])
    assert 1e-6 < found.nmse_median < 2e-2, found
    np.testing.assert_array_equal(_logits(MIXTURE, [_four_waves()], "int8"), alone)
    np.testing.assert_array_equal(_logits(MIXTURE, [_four_waves(), _four_waves()], "int8"), alone)


def test_a_device_without_such_products_refuses() -> None:
    with pytest.raises(DeviceError, match=r"cpu:0: --prompt-precision int8: it has no library for such products"):
        _logits(DENSE, [HostDevice()], "int8")


def test_a_daemon_gets_the_setting() -> None:
    with (
        devices("cpu:0,cpu:1", target_shard_ipc_bin=(("", WARM),)) as opened,
        pytest.raises(DeviceError, match=r"cpu:1: --prompt-precision int8: it has no library"),
    ):
        _logits(DENSE, opened[1:], "int8")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3-b-Q4_K_M", "qwen35-b-Q4_K_M", "gemma4-eb-Q4_K_M", "laguna-b-Q4_K_M"])
def test_on_a_gpu(name: str) -> None:
    path = REFERENCE / f"{name}.gguf"
    devices = [GpuDevice("cuda", 0) for _ in range(3)]
    try:
        exact, alone = (_logits(path, devices[:1], precision, unpack=True) for precision in ("fp16", "int8"))
        found = difference(exact, alone, TOKENS[1:])
        assert 1e-6 < found.nmse_median < 2e-2, found
        np.testing.assert_array_equal(_logits(path, devices, "int8"), alone)
    finally:
        for device in devices:
            device.close()
