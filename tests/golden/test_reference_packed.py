"""Every reference file on the CPU with packed weights: logits and greedy tokens within the limits of int8 products, and
the same bits in any chunks and steps, over any number of shards, restored, and in draft trees."""

from __future__ import annotations

import pytest

from luce.runtime.cpu import CpuDevice
from tests.support.covering import each_kind
from tests.support.golden_checks import (
    TREES,
    check_batched,
    check_company,
    check_greedy_tokens,
    check_logits_in_chunks,
    check_restored,
    check_shards,
    check_tree,
    typical_error,
)
from tests.support.make_driver import MakeDriver
from tests.support.reference import Reference, references

each_file = pytest.mark.parametrize("reference", references(), ids=lambda r: r.name)


def kind(reference: Reference) -> str:
    """The limits of a file: float weights are multiplied in float32."""
    return "f32" if reference.name.endswith("F32") else "int8_activations"


@each_file
def test_logits(reference: Reference, make_driver: MakeDriver) -> None:
    check_logits_in_chunks(reference, make_driver(reference, [CpuDevice()]), kind(reference), 1000)


@each_kind()
def test_logits_and_greedy_tokens(reference: Reference, make_driver: MakeDriver) -> None:
    driver = make_driver(reference, [CpuDevice()])
    prompts = check_logits_in_chunks(reference, driver, kind(reference), 7)
    check_greedy_tokens(reference, driver, prompts, typical_error(reference, driver))


@each_kind()
def test_batched(reference: Reference, make_driver: MakeDriver) -> None:
    driver = make_driver(reference, [CpuDevice()], slots=5)
    check_batched(reference, driver, kind(reference), typical_error(reference, driver))


@each_kind()
@pytest.mark.parametrize("rows", [17, 40, 64])
def test_verified_rows_in_company(reference: Reference, rows: int, make_driver: MakeDriver) -> None:
    check_company(make_driver(reference, [CpuDevice()], slots=5, verify_rows=16), reference.spec.vocab, rows)


@each_kind()
def test_rows_of_trees_are_those_of_chains(reference: Reference, make_driver: MakeDriver) -> None:
    driver = make_driver(reference, [CpuDevice(i) for i in range(min(3, len(reference.spec.layers)))], verify_rows=16)
    for case, length in ((1, 64), (2, 60)):
        check_tree(driver, reference.spec.vocab, *TREES[case], length)


@each_kind()
def test_shards_change_nothing(reference: Reference, make_driver: MakeDriver) -> None:
    layers = len(reference.spec.layers)
    counts = sorted({1, 2, min(3, layers), layers})
    check_shards(reference, (make_driver(reference, [CpuDevice(i) for i in range(count)]) for count in counts))


@each_kind()
def test_save_and_restore(reference: Reference, make_driver: MakeDriver) -> None:
    # One shard per layer: every block that lends keys and values has mirrors elsewhere.
    check_restored(reference, make_driver(reference, [CpuDevice(i) for i in range(len(reference.spec.layers))]))
