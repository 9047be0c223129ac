"""The reference files that stand for all: no kind of layer is missing, and the nightly check has the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from luce.models.spec import Attention, Layer
from tests.support.covering import covering, each_kind, kinds
from tests.support.reference import Reference, references


def test_every_kind_is_there() -> None:
    assert set().union(*map(kinds, covering())) == set().union(*map(kinds, references()))
    assert len(covering()) < len(references())


def test_files_that_are_left_out_run_in_the_nightly_check() -> None:
    params = each_kind().args[1]
    assert [param.values[0] for param in params] == [*references()]
    left_out = {param.values[0] for param in params if param.marks == [pytest.mark.repeated]}
    assert left_out == {*references()} - {*covering()}


@pytest.mark.parametrize(
    ("changes", "known"),
    [({"sinks": True}, False), ({"window": 32}, False), ({"head_dim": 256}, True), ({"scale": 0.5}, True)],
    ids=str,
)
def test_a_part_that_no_layer_has_is_a_kind_and_another_size_is_none(changes: dict[str, Any], known: bool) -> None:
    reference, changed = Reference("llama-a-F32"), Reference("llama-a-F32")
    layer = reference.spec.layers[0]
    assert isinstance(layer, Layer) and isinstance(layer.mixer, Attention)
    other = replace(layer, mixer=replace(layer.mixer, **changes))
    vars(changed)["spec"] = replace(reference.spec, layers=(other, *reference.spec.layers[1:]))
    assert (kinds(changed) <= kinds(reference)) == known
