"""Checks of matmul on any device against float64, and of its promises of equal bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from luce.ops import matmul_int8, matmul_prefill, matmul_rows_wgmma
from luce.ops.activation import gated_activation
from luce.ops.fp16 import to_fp16
from luce.ops.matmul import FEW_ROWS, MANY_ROWS, add_product, adds_row, matmul, matmul_row, norms_row
from luce.ops.matmul_prefill import copy_bytes, store_copy
from luce.ops.norm import Unnormed, rms_norm
from luce.ops.quantise import quantise, quantise_gated
from luce.ops.weight import RawTensor, upload_weight
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support.op_checks_norm import EPS, formula
from tests.support.quant_blocks import decoded, random_tensor
from tests.support.quantised import goes_in_int8, quantised, same_rows, seen, unpacked

if TYPE_CHECKING:
    from luce.models.spec import Activation

Matrix = NDArray[np.float32]


def _x(n: int, cols: int, seed: int) -> Matrix:
    return np.random.default_rng(seed).standard_normal((n, cols)).astype(np.float32)


def _product(device: Device, x: Matrix, tensors: Sequence[RawTensor]) -> Matrix:
    return device.download(matmul(device, device.upload(x), upload_weight(device, tensors)))


def product_limit(x: NDArray[np.floating], w: Matrix, *, fp16: bool) -> NDArray[np.float64]:
    """How far float32 sums of the products of the rows of x and w may be from those of float64.

    With `fp16` both factors are rounded to 11 bits, which errs by at most 2^-11 of each, on average half of that: a
    sum's error has a standard deviation of about 0.6 * 2^-11 times the root of the sum of its squared terms. Weights
    below 2^-14 lose more.
    """
    x64, w64 = np.abs(x).astype(np.float64), np.abs(w).astype(np.float64)
    limit = (4 + np.sqrt(x.shape[1])) * 2.0**-24 * (x64 @ w64.T) + 1e-30
    if fp16:
        limit += 4 * 2.0**-11 * np.sqrt(x64**2 @ (w64**2).T) + 2.0**-25 * x64.sum(axis=1, keepdims=True)
    return limit


def rounds_to_fp16(device: Device, name: str, n: int, cols: int = 0) -> bool:
    """Whether products of n rows with weights in this format are of fp16; `cols` as in goes_in_int8."""
    return not device.host and n > FEW_ROWS and name != "F32" and not goes_in_int8(device, name, n, cols)


def check_product(device: Device, name: str, rows: int, cols: int, n: int) -> None:
    """Against float64 of gguf's values, and the NumPy reference."""
    tensor = random_tensor(name, rows, cols, seed=rows * 31 + cols)
    x = _x(n, cols, seed=n)
    w = decoded(tensor).astype(np.float64)
    limit = product_limit(x, w, fp16=rounds_to_fp16(device, name, n, cols))
    actual = _product(device, x, [tensor])
    assert actual.dtype == np.float32
    assert actual.shape == (n, rows)
    met = seen(device, name, x)
    error = np.abs(actual - met @ w.T)
    assert (error <= limit).all(), f"{(error / limit).max():.1f} times the limit"
    reference = _product(HostDevice(), met.astype(np.float32), [tensor])
    assert (np.abs(actual - reference.astype(np.float64)) <= 2 * limit).all()


def check_neighbours(device: Device, name: str, rows: int, cols: int, counts: Sequence[int]) -> None:
    """The first rows of x have the same bits in every batch size of `counts`, and at every place in the batch."""
    tensor = random_tensor(name, rows, cols, seed=5)
    x = _x(max(counts), cols, seed=6)
    whole = _product(device, x, [tensor])
    for n in counts:
        np.testing.assert_array_equal(_product(device, x[:n], [tensor]), whole[:n], err_msg=f"{n} rows")
        turned = np.roll(x[:n], 1, axis=0)
        np.testing.assert_array_equal(_product(device, turned, [tensor]), np.roll(whole[:n], 1, axis=0))


@contextlib.contextmanager
def tiles(count: int) -> Iterator[None]:
    """Blocks have `count` tiles wherever a kernel supports that."""
    matmul_int8.dense_shape.cache_clear()
    try:
        with mock.patch.object(matmul_int8, "tiles_per_block", lambda *_: count):
            yield
    finally:
        matmul_int8.dense_shape.cache_clear()


def check_parts(device: Device, n: int) -> None:
    """A weight of several tensors and formats is the products of each side by side, bit for bit; of rows that are
    quantised for some of them too."""
    tensors = [
        random_tensor("Q4_K", 7, 512, 1),
        random_tensor("F16", 1, 512, 2),
        random_tensor("Q8_0", 130, 512, 3),
        random_tensor("Q6_K", 12, 512, 4),
    ]
    x = _x(n, 512, seed=8)
    apart = np.concatenate([_product(device, x, [t]) for t in tensors], axis=1)
    np.testing.assert_array_equal(_product(device, x, tensors), apart)
    for group in (32, 128) if 0 < n <= FEW_ROWS and not device.host else ():
        rows = quantise(device, device.upload(x), group)
        together = device.download(matmul(device, rows, upload_weight(device, tensors)))
        np.testing.assert_array_equal(together, apart)


@contextlib.contextmanager
def launched(device: Device) -> Iterator[list[str]]:
    """The kernels that the device launches within."""
    kernels, launch = list[str](), type(device).launch

    def record(self: Device, source: str, kernel: str, *args: Any, **options: Any) -> None:
        kernels.append(kernel)
        launch(self, source, kernel, *args, **options)

    with mock.patch.object(type(device), "launch", record):
        yield kernels


def check_company(device: Device, names: Sequence[str], rows: int, cols: int, counts: Sequence[int]) -> None:
    """Rows have the bits in company that they have alone, by the kernel for so many; more than MANY_ROWS in a step of
    short prompts."""
    tensors = [random_tensor(name, rows, cols, seed=5 + number) for number, name in enumerate(names)]
    weight, x = upload_weight(device, tensors), _x(max(counts), cols, seed=6)
    alone = [device.download(matmul(device, device.upload(x[at : at + 1]), weight)) for at in range(max(counts))]
    with launched(device) as kernels:
        for n in counts:
            device.batch_invariant = n > MANY_ROWS
            together = device.download(matmul(device, device.upload(x[:n]), weight))
            np.testing.assert_array_equal(together, np.concatenate(alone[:n]), err_msg=f"{n} rows")
    device.batch_invariant = False
    grouped = sum(matmul_rows_wgmma.serves(device, part.type) for part in weight.parts)
    assert kernels.count("matmul_rows_wgmma") == len(counts) * grouped
    assert kernels.count("matmul_rows") == len(counts) * (len(weight.parts) - grouped)


def check_grouped_waves(
    device: Device, tensors: Sequence[RawTensor], x: Matrix, *, deal: tuple[int, int] | None = None, first: int = 0
) -> NDArray[np.float32]:
    """Products by groups of four waves have the bits of those by single waves. Returns them.

    `deal`: so many tiles of each part are taken as a whole, of the others so many chains together; None: as the device
    deals them. `first`: of the weight's rows that are multiplied.
    """
    weight, dealt = upload_weight(device, tensors), matmul_rows_wgmma.dealt
    weight = weight.cut(range(first, weight.rows))

    def dealing(tiles: int, turns: int, units: int, bits: int, blocks: int) -> matmul_rows_wgmma.Dealing:
        if deal is None:
            return dealt(tiles, turns, units, bits, blocks)
        whole, together = min(deal[0], tiles) * turns, deal[1]
        split = tiles * turns - whole
        own = split * ((1 << bits) - together)
        return matmul_rows_wgmma.Dealing(whole, together, whole + split + -(-own // together))

    with mock.patch.object(matmul_rows_wgmma, "dealt", dealing), launched(device) as kernels:
        together = device.download(matmul(device, device.upload(x), weight))
    assert kernels.count("matmul_rows_wgmma") == len(tensors)
    assert deal is None or kernels.count("add_chains") == sum(deal[0] * 128 < part.rows for part in weight.parts)
    with mock.patch.object(matmul_rows_wgmma, "serves", lambda *_: False), launched(device) as kernels:
        alone = device.download(matmul(device, device.upload(x), weight))
    assert kernels.count("matmul_rows") == len(tensors)
    np.testing.assert_array_equal(together, alone)
    return together


def check_largest_sums(device: Device, name: str, n: int) -> None:
    """Sections whose sums of integers are the largest there are, of either sign, and those that cancel."""
    cols = 1280
    tensor = random_tensor(name, 5, cols, seed=7)
    blocks = tensor.raw.reshape(5, cols // 256, -1)
    if name == "Q6_K":
        # Four bits and two bits of all numbers, and scales: parts of the same and of different signs, and odd products.
        largest = ((0, 0, -128), (15, 3, 127), (0, 3, -128), (15, 0, -128), (0, 0, 127))
        for row, (four, two, scale) in enumerate(largest):
            blocks[row, :, :128], blocks[row, :, 128:192] = four * 17, two * 85
            blocks[row, :, 192:208] = scale & 255
    else:
        # All numbers, scales and minimums.
        blocks[:, :, 4:] = 255
        blocks[2, :, 2:4] = 0  # no minimums
    x = np.full((n, cols), 127, np.float32)
    x[1::3] *= -1
    x[2::3, ::2] *= -1
    x[5::7, 64::128] = 126  # odd sums
    assert np.isfinite(check_grouped_waves(device, [tensor], x)).all()


def check_nan_in_groups(device: Device, name: str) -> None:
    """An infinity or a NaN makes NaN of its own row's results, and of no other's."""
    x = _x(40, 1280, seed=19)
    x[1, 77], x[33, 255] = np.inf, np.nan
    actual = check_grouped_waves(device, [random_tensor(name, 5, 1280, seed=18)], x)
    np.testing.assert_array_equal(np.isnan(actual).all(axis=1), np.isin(np.arange(40), (1, 33)))
    assert np.isfinite(np.delete(actual, (1, 33), axis=0)).all()


def check_bias(device: Device, n: int) -> None:
    """A weight with a bias gives the product, and each element's sum with it rounded once; so do rows of it."""
    tensors = [random_tensor("Q8_0", 40, 64, 1), random_tensor("F32", 7, 64, 2)]
    x, weight = device.upload(_x(n, 64, 3)), upload_weight(device, tensors)
    plain = device.download(matmul(device, x, weight))
    bias = np.random.default_rng(4).standard_normal(47).astype(np.float32)
    weight.bias = device.upload(bias)
    np.testing.assert_array_equal(device.download(matmul(device, x, weight)), plain + bias)
    own = device.download(matmul(device, x, weight.cut(range(40, 47))))
    np.testing.assert_allclose(own, (plain + bias)[:, 40:], rtol=1e-5, atol=1e-5)


def check_pair(device: Device, first: str, second: str, n: int) -> None:
    """Two tensors whose formats share a launch give the products of each, bit for bit; neither fills its last block."""
    tensors = [random_tensor("F16", 1, 1536, 1), random_tensor(first, 37, 1536, 2), random_tensor(second, 18, 1536, 3)]
    x = _x(n, 1536, seed=9)
    with launched(device) as kernels:
        together = _product(device, x, tensors)
    assert kernels.count("matmul_int8_pair") == 1 and "matmul_int8" not in kernels
    apart = np.concatenate([_product(device, x, [t]) for t in tensors], axis=1)
    np.testing.assert_array_equal(together, apart)


def check_norm_within(device: Device, names: Sequence[str], rows: Sequence[int], cols: int) -> None:
    """A product that norms its row: one launch, the bits of norm and product apart, and the formula in float64."""
    tensors = [
        random_tensor(name, count, cols, seed) for seed, (name, count) in enumerate(zip(names, rows, strict=True))
    ]
    weight = upload_weight(device, tensors)
    rng = np.random.default_rng(cols)
    x, factors = 3 * _x(1, cols, seed=17), rng.uniform(0.2, 3, cols).astype(np.float32)
    x[0, 64:96] = 0  # a scale of its own in some formats
    on_device = device.upload(x), device.upload(factors)
    assert norms_row(device, 1, weight)
    with launched(device) as kernels:
        actual = device.download(matmul(device, Unnormed(*on_device, EPS), weight))
    assert kernels == ["norm_matmul_int8" + "_pair" * (len(names) - 1)]
    apart = matmul(device, rms_norm(device, *on_device, EPS), weight)
    np.testing.assert_array_equal(actual, device.download(apart))
    y = formula(x, factors)
    for tensor, own in zip(tensors, np.split(actual, np.cumsum(rows)[:-1], axis=1), strict=True):
        w, group = decoded(tensor).astype(np.float64), 32 if tensor.type.name in ("Q4_0", "Q8_0") else 128
        largest = np.abs(np.pad(y, ((0, 0), (0, -cols % group))).reshape(-1, group)).max(axis=1)
        step = np.repeat(largest / 127, group)[:cols]
        assert (np.abs(own - y @ w.T) <= 0.51 * np.abs(w) @ step).all()


def check_added(device: Device, names: Sequence[str], rows: Sequence[int], cols: int) -> None:
    """A product that is added where it is made: the float32 sum of what was there and of the product."""
    tensors = [
        random_tensor(name, count, cols, seed) for seed, (name, count) in enumerate(zip(names, rows, strict=True))
    ]
    weight, x = upload_weight(device, tensors), device.upload(_x(1, cols, seed=21))
    before = _x(1, sum(rows), seed=22)
    before[0, ::3] = -0.0
    assert adds_row(device, 1, weight)
    to = device.upload(before)
    with launched(device) as kernels:
        add_product(device, x, weight, to)
    assert "add" not in kernels
    np.testing.assert_array_equal(device.download(to), before + device.download(matmul(device, x, weight)))


def check_row(device: Device, n: int, cols: int) -> None:
    """Many rows times one row of weights, against float64."""
    tensor, x = random_tensor("F32", 1, cols, seed=13), _x(n, cols, seed=14)
    actual = device.download(matmul_row(device, device.upload(x), upload_weight(device, [tensor])))
    w = decoded(tensor)
    assert actual.shape == (n, 1)
    assert (np.abs(actual - x.astype(np.float64) @ w.T) <= product_limit(x, w, fp16=False)).all()


def check_row_stride(device: Device, name: str, n: int, cols: int) -> None:
    """Slices of a wider x, on and off 16-byte boundaries, give the bits of a copy."""
    tensor = random_tensor(name, 9, cols, seed=11)
    weight = upload_weight(device, [tensor])
    for before, after in ((4, 3), (1, 2), (8, 4)):
        wide = _x(n, before + cols + after, seed=12)
        own = slice(before, before + cols)
        sliced = device.download(matmul(device, device.upload(wide)[:, own], weight))
        np.testing.assert_array_equal(sliced, _product(device, wide[:, own].copy(), [tensor]))


def check_infinities(device: Device, n: int) -> None:
    """An infinity in the last column and a NaN in one row stay where they belong: padding makes no NaN of them."""
    weight = upload_weight(device, [random_tensor("F32", 5, 13, seed=3)])
    w = decoded(random_tensor("F32", 5, 13, seed=3))
    x = _x(n, 13, seed=4)
    x[-1, -1] = np.inf
    x[0, 2] = np.nan
    actual = device.download(matmul(device, device.upload(x), weight))
    assert np.isnan(actual[0]).all()
    np.testing.assert_array_equal(actual[-1], np.where(w[:, -1] > 0, np.inf, -np.inf))
    assert np.isfinite(actual[1:-1]).all()


def check_range(device: Device, name: str, n: int) -> None:
    """Rows far beyond the range of fp16, above and below, are as exact as others; zeros stay zeros."""
    cols = 512
    tensor = random_tensor(name, 11, cols, seed=21)
    w = decoded(tensor)
    # Two rows each near the largest and the smallest float32.
    powers = np.concatenate([np.linspace(-140, 110, n - 3).round(), [118, -149, 0]])
    x = (_x(n, cols, seed=22) * 2.0 ** powers[:, None]).astype(np.float32)
    x[-1] = 0
    actual = _product(device, x, [tensor])
    limit = product_limit(x, w, fp16=True) + 2.0**-149
    error = np.abs(actual - x.astype(np.float64) @ w.astype(np.float64).T)
    # Denormal x have fewer bits to begin with, and lose none; products below 2^-126 round to multiples of 2^-149.
    assert (error <= limit + cols * 2.0**-149).all()
    assert not actual[-1].any()


def check_outliers(device: Device, n: int) -> None:
    """A value a million times larger than the rest of its row, multiplied by zeros, costs the others no bits."""
    cols = 256
    tensor = random_tensor("Q8_0", 5, cols, seed=23)
    tensor.raw[:, 2 + 7] = 0
    x = _x(n, cols, seed=24)
    x[:, 7] *= 2.0**20
    actual = _product(device, x, [tensor])
    x[:, 7] = 0
    w = decoded(tensor)
    error = np.abs(actual - x.astype(np.float64) @ w.astype(np.float64).T)
    assert (error <= product_limit(x, w, fp16=True)).all()


def check_same_everywhere(devices: Sequence[Device], name: str, rows: int, cols: int, n: int) -> None:
    """Sums of int8 products have the same bits on devices with and without tensor cores, of 32 and 64 lanes."""
    tensor = random_tensor(name, rows, cols, seed=15)
    x = _x(n, cols, seed=16)
    first, *others = (_product(device, x, [tensor]) for device in devices)
    for other in others:
        np.testing.assert_array_equal(other, first)


def check_quantise(device: Device, n: int, cols: int, group: int) -> None:
    """The values, scales and sums of the definition; padded rows are zeros."""
    wide = _x(n, cols + 5, seed=17) * np.float32(2.0) ** np.random.default_rng(3).integers(-30, 30, (n, 1))
    wide = wide.astype(np.float32)
    wide[0, 3 : 3 + 128] = 0
    wide[-1, 3 : 3 + 128] *= np.float32(1e-38)
    made = quantise(device, device.upload(wide)[:, 3 : 3 + cols], group)
    expected, actual = quantised(wide[:, 3 : 3 + cols], group), unpacked(device, made)
    assert made.shape == (n, cols)
    for name in ("values", "sums", "scales"):
        np.testing.assert_array_equal(getattr(actual, name)[:n], getattr(expected, name), err_msg=name)
        assert not getattr(actual, name)[n:].any()


def check_nan_in_int8(device: Device, name: str) -> None:
    """An infinity or a NaN makes NaN of its own row's results, and of no other's."""
    tensor = random_tensor(name, 5, 256, seed=18)
    x = _x(4, 256, seed=19)
    clean = _product(device, x, [tensor])
    x[1, 77], x[2, 255] = np.inf, np.nan
    actual = _product(device, x, [tensor])
    assert np.isnan(actual[1:3]).all()
    np.testing.assert_array_equal(actual[[0, 3]], clean[[0, 3]])


def check_quantised_gate(device: Device, activation: Activation, n: int, cols: int, group: int) -> None:
    """The int8 rows of quantise of the gated activation; padded rows are zeros."""
    both = device.upload(_x(n, 2 * cols + 3, seed=33))
    gate, up = both[:, 1 : 1 + cols], both[:, cols + 3 :]
    made = quantise_gated(device, gate, up, activation, group)
    again = quantise(device, gated_activation(device, gate, up, activation), group)
    same_rows(device, made, again)


def check_halves(device: Device, rows: int, cols: int, n: int) -> None:
    """Float weights on tensor cores: as exact as sums of floats, whatever the size of rows, features and slices."""
    rng = np.random.default_rng(cols)
    x, w = (rng.standard_normal((count, cols), np.float32) for count in (n, rows))
    for values in (x, w):
        values *= np.float32(2) ** rng.integers(-30, 30, (len(values), 1))
        values[::3] *= np.float32(2) ** (np.arange(cols) // 64 % 5 * 6)
    x[1] = 0
    weight = upload_weight(device, [RawTensor("", w.view(np.uint8), GGMLQuantizationType.F32, cols)])
    with launched(device) as kernels:
        actual = device.download(matmul(device, device.upload(x), weight))
    assert kernels.count("matmul_halves") == 1
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    # Splitting errs by about 2^-24 of each factor, and adding by as much of a slice's sum: at most 15 times 2^-24 of
    # the root below. Sums of 2048 products one by one err by up to 130 times, and without lower parts by over 1000.
    limit = 48 * 2.0**-24 * np.sqrt(x64**2 @ (w64**2).T)
    error = np.abs(actual - x64 @ w64.T)
    assert (error <= limit).all(), f"{np.max(error / (limit + 1e-40)):.1f} times the limit"


def check_slices(device: Device, n: int, features: int) -> None:
    """Parts of several types, F32 among them, with a buffer for `features` features; and the same bits with an fp16
    copy of the weights, which makes their quant blocks superfluous."""
    names = {"Q4_K": 7, "F16": 1, "F32": 3, "Q8_0": 130, "Q6_K": 12}
    tensors = [random_tensor(name, rows, 512, seed) for seed, (name, rows) in enumerate(names.items())]
    x = _x(n, 512, seed=8)
    with mock.patch.object(matmul_prefill, "BUFFER_BYTES", features * 512 * 2):
        actual = _product(device, x, tensors)
        weight = upload_weight(device, tensors)
        assert copy_bytes(device, weight) == 2 * weight.rows * weight.cols
        store_copy(device, weight)
        for part in weight.parts:
            if part.type.name not in ("F16", "F32"):
                device.write(part.data, np.zeros(part.data.shape, np.uint8))
        kept = device.download(matmul(device, device.upload(x), weight))
    np.testing.assert_array_equal(kept, actual)
    w = np.concatenate([decoded(t) for t in tensors])
    error = np.abs(actual - x.astype(np.float64) @ w.astype(np.float64).T)
    assert (error <= product_limit(x, w, fp16=True)).all()
    exact = slice(8, 11)
    assert (error[:, exact] <= product_limit(x, w[exact], fp16=False)).all()


def check_fp16_rows(device: Device, shape: Sequence[int], *, slots: bool, top: int) -> None:
    """The rounding and the scale that fp16.cu promises, for rows of all sizes; padding is zero."""
    *count, cols = shape
    rng = np.random.default_rng(cols)
    wide = rng.standard_normal((*count, cols + 3)).astype(np.float32)
    size = 2.0 ** rng.integers(-160, 120, count)[..., None]
    size.reshape(-1)[::2] = 1
    wide = (wide * size).astype(np.float32)
    x = wide[..., 1 : 1 + cols]
    x[0] = 0
    x[-1, ..., 0] = np.inf
    x[-1, ..., cols - 1] = np.nan
    there = device.upload(wide)
    made = to_fp16(device, there[:, :, 1 : 1 + cols] if slots else there[:, 1 : 1 + cols], top)
    assert made.top == top
    values, scale = device.download(made.values), device.download(made.scale)
    x = x.reshape(-1, cols)
    assert (values.dtype, values.shape) == (np.float16, (len(x), -(-cols // 128) * 128))
    most = np.where(np.isfinite(x), np.abs(x), 0).max(axis=1).astype(np.float64)
    plain = (most == 0) | ((most >= 2.0**-7) & (most < 2.0**top))
    assert plain.any() and not plain.all()
    np.testing.assert_array_equal(scale[plain], 1)
    np.testing.assert_array_equal(np.frexp(scale)[0], 0.5)
    # 2^-126 and less would take a factor beyond float32's range.
    normal = ~plain & (most >= 2.0**-112)
    assert ((most / scale)[normal] >= 2.0 ** (top - 1)).all() and ((most / scale)[normal] < 2.0**top).all()
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(values[:, :cols], (x / scale[:, None].astype(np.float64)).astype(np.float16))
    assert not values[:, cols:].any()


def check_dequantised(device: Device, name: str, cols: int) -> None:
    """Every format as fp16: float32 values to nearest, infinities included."""
    tensor = random_tensor(name, 3, cols, seed=2, wild=True)
    out = device.empty((3, cols), np.float16)
    args = (device.upload(tensor.raw), out, np.int32(cols))
    device.launch("dequant", "dequant", (3,), (128,), args, defines={"QTYPE": name})
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(device.download(out), decoded(tensor).astype(np.float16))


def check_empty(device: Device) -> None:
    """No rows in, none out."""
    weight = upload_weight(device, [random_tensor("F32", 5, 8, seed=3)])
    assert matmul(device, device.zeros((0, 8)), weight).shape == (0, 5)


def each_few() -> list[int]:
    """The numbers of rows of the kernels for few rows."""
    return list(range(1, FEW_ROWS + 1))
