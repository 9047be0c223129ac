"""Splitting a snapshot's tensors: in small parts, for each shard in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest

from luce.kvcache.disk.reader import StoredTensor, by_layers
from luce.shard.saved_state import layer_of


@dataclass(frozen=True)
class Sized:
    """A stored tensor with nothing but a size."""

    nbytes: int


@pytest.mark.parametrize("most", [1, 30, 45, 1000])
@pytest.mark.parametrize("shards", [(range(9),), (range(4), range(4, 5), range(5, 9))], ids=["one", "three"])
def test_every_tensor_comes_once_with_its_layer(most: int, shards: tuple[range, ...]) -> None:
    # Layers 2 and 6 have no tensors; all tensors of a layer stay together.
    share = {
        f"blk.{layer}.{name}": cast("StoredTensor", Sized(10)) for layer in (8, 0, 1, 3, 4, 5, 7) for name in ("k", "v")
    }
    found = list(by_layers(share, shards, most))
    assert sorted(name for _, part in found for name in part) == sorted(share)
    assert sorted(layer for layers, _ in found for layer in layers) == list(range(9))
    for layers, part in found:
        assert {layer_of(name) for name in part} <= set(layers)
        assert sum(tensor.nbytes for tensor in part.values()) <= most + 19, "one layer more at most"
    owners = [next(number for number, own in enumerate(shards) if layers.start in own) for layers, _ in found]
    assert owners[: len(shards)] == list(range(len(shards))), "each shard has something to do"
    for number, own in enumerate(shards):
        mine = [layers for (layers, _), owner in zip(found, owners, strict=True) if owner == number]
        assert (mine[0].start, mine[-1].stop) == (own.start, own.stop)


def test_a_shard_without_tensors_gets_an_empty_part() -> None:
    share = {"blk.0.k": cast("StoredTensor", Sized(10))}
    assert list(by_layers(share, (range(2), range(2, 4)))) == [(range(2), share), (range(2, 4), {})]
