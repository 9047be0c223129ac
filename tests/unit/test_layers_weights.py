"""The copies of matrices that a loader stores: which ones have room, and what they take."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from luce.errors import OutOfMemoryError
from luce.gguf.reader import GGUFFile, open_gguf
from luce.layers import weights
from luce.layers.routed_experts import RoutedExperts, load_experts
from luce.layers.weights import WeightLoader
from luce.models.spec import ModelSpec
from luce.ops import moe_prefill_int8
from luce.ops.matmul_prefill import BLAS_ROWS
from tests.support.emulated import EmulatedDevice
from tests.support.reference import Reference

pytestmark = pytest.mark.emulated
MIXTURE = Reference("qwen35moe-b-Q4_K_M")
QUERIES = "blk.0.attn_qkv.weight"


class Loaded:
    """A matrix and the experts of two layers."""

    def __init__(self, file: GGUFFile, spec: ModelSpec, *, int8: bool, four_waves: bool = True) -> None:
        self.device = EmulatedDevice(products=("F16", "BF16", *(("WGMMA",) if four_waves else ())))
        self.loader = WeightLoader(file, self.device, int8=int8)
        cols, rows = file.tensors[QUERIES].shape
        self.matrix = self.loader.matrix([QUERIES], cols, [rows])
        self.layers: list[RoutedExperts] = []
        for layer in range(2):
            moe = spec.mixture(layer)
            assert moe is not None
            self.layers.append(load_experts(file, self.loader, self.device, layer, moe, spec.hidden))
        self.dense = rows * (cols + 4 if int8 else 2 * cols)
        self.down = moe.experts * spec.hidden * (moe.hidden + 4)
        self.experts = moe.experts * 2 * moe.hidden * (spec.hidden + 4) + self.down

    def stored(self) -> list[tuple[bool, bool]]:
        """Of each layer, whether its gates and ups have a copy, and its downs."""
        return [(e.gate_up.int8_experts is not None, e.down.int8_experts is not None) for e in self.layers]


@pytest.fixture
def file() -> Iterator[GGUFFile]:
    with open_gguf(MIXTURE.path) as opened:
        yield opened


BOTH, NONE = (True, True), (False, False)


def test_experts_have_copies_behind_the_matrices(file: GGUFFile) -> None:
    for layers, short in ((0, 1), (1, 0), (1, 1), (2, 0)):
        own = Loaded(file, MIXTURE.spec, int8=True)
        took = own.dense + layers * own.experts
        spare = took + (own.down - 1 if short else 0)
        assert own.loader.store_copies(spare) == took
        assert own.matrix.copy is not None
        assert own.stored() == [BOTH] * layers + [NONE] * (2 - layers)
        assert [own.loader.copied(layer) & {"experts"} for layer in range(2)] == [
            {"experts"} if layer < layers else set() for layer in range(2)
        ]
        # Those without make them for each step: the bits are the same.
        assert all(e.multiplies_int8(BLAS_ROWS) for e in own.layers)


def test_a_second_call_takes_no_more_memory(file: GGUFFile) -> None:
    own = Loaded(file, MIXTURE.spec, int8=True)
    spare = own.dense + 2 * own.experts
    with mock.patch.object(own.device, "reserve") as reserve:
        first = own.loader.store_copies(spare)
        copies = [(e.gate_up.int8_experts, e.down.int8_experts) for e in own.layers]
        assert own.loader.store_copies(spare) == first == spare
        assert [call.args for call in reserve.call_args_list] == [(spare,), (0,)]
    for each, (gate_up, down) in zip(own.layers, copies, strict=True):
        assert each.gate_up.int8_experts is gate_up
        assert each.down.int8_experts is down


@pytest.mark.parametrize(("int8", "four_waves"), [(False, True), (True, False)])
def test_without_such_products_experts_have_none(file: GGUFFile, int8: bool, four_waves: bool) -> None:
    own = Loaded(file, MIXTURE.spec, int8=int8, four_waves=four_waves)
    assert own.loader.store_copies(1 << 40) == own.dense
    assert own.stored() == [NONE, NONE]
    assert not any(e.multiplies_int8(BLAS_ROWS) for e in own.layers)


def test_a_device_without_memory_keeps_what_it_has(file: GGUFFile) -> None:
    own, made = Loaded(file, MIXTURE.spec, int8=True), list[object]()
    store = moe_prefill_int8.store_experts

    def once(*args: object, **named: bool) -> None:
        if made:
            raise OutOfMemoryError("full")
        made.append(args)
        store(*args, **named)  # type: ignore[arg-type]

    with mock.patch.object(weights.moe_prefill_int8, "store_experts", once):
        size = own.loader.store_copies(1 << 40)
    copy = own.layers[0].gate_up.int8_experts
    assert copy is not None
    assert size == own.dense + copy.values.nbytes + copy.scale.nbytes
    assert own.stored() == [(True, False), NONE]


def test_what_is_forgotten_has_no_copies(file: GGUFFile) -> None:
    own = Loaded(file, MIXTURE.spec, int8=True)
    own.loader.forget()
    assert own.loader.store_copies(1 << 40) == 0
    assert own.stored() == [NONE, NONE]
