"""How a snapshot's tensors go to the shards: in small shares, to each in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest

from luce.kvcache.disk import reader
from luce.kvcache.disk.reader import Rows, by_layers
from luce.shard.saved_state import layer_of


@dataclass(frozen=True)
class Sized:
    """Rows of which nobody reads but the size."""

    nbytes: int


@pytest.mark.parametrize("most", [1, 30, 45, 1000])
@pytest.mark.parametrize("shards", [(range(9),), (range(4), range(4, 5), range(5, 9))], ids=["one", "three"])
def test_every_tensor_comes_once_with_its_layer(
    most: int, shards: tuple[range, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_SHARE_BYTES", most)
    # Layers 2 and 6 have none; all of a layer go together.
    share = {f"blk.{layer}.{name}": cast("Rows", Sized(10)) for layer in (8, 0, 1, 3, 4, 5, 7) for name in ("k", "v")}
    found = list(by_layers(share, shards))
    assert sorted(name for _, part in found for name in part) == sorted(share)
    assert sorted(layer for layers, _ in found for layer in layers) == list(range(9))
    for layers, part in found:
        assert {layer_of(name) for name in part} <= set(layers)
        assert sum(rows.nbytes for rows in part.values()) <= most + 19, "one layer more at most"
    owners = [next(number for number, own in enumerate(shards) if layers.start in own) for layers, _ in found]
    assert owners[: len(shards)] == list(range(len(shards))), "each shard has something to do"
    for number, own in enumerate(shards):
        mine = [layers for (layers, _), owner in zip(found, owners, strict=True) if owner == number]
        assert (mine[0].start, mine[-1].stop) == (own.start, own.stop)


def test_a_shard_hears_of_what_is_missing() -> None:
    share = {"blk.0.k": cast("Rows", Sized(10))}
    assert list(by_layers(share, (range(2), range(2, 4)))) == [(range(2), share), (range(2, 4), {})]
