"""Layers to devices: by weights as layer-split servers agree on, and by bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce.backend.layer_assignment import DeviceBudget, fill_layers, plan_layers, split_layers
from luce.errors import UsageError
from luce.models.spec import Attention, GatedMLP, ModelSpec, Rope, SandwichLayer
from luce.shard.sizes import activation_bytes, mirrored
from tests.support.reference import Reference

# Layers, weights, where the shards end.
VECTORS: list[tuple[int, tuple[float, ...], list[int]]] = [
    (64, (0.08, 0.46, 0.46), [5, 35, 64]),
    (64, (0.5, 0.5), [32, 64]),
    (40, (1, 1), [20, 40]),
    (35, (1, 1), [18, 35]),
    (5, (1, 1), [3, 5]),
    (64, (1000, 1, 1), [62, 63, 64]),
    (4, (1, 1, 1, 100), [1, 2, 3, 4]),
    (35, (1, 1, 1, 1), [9, 18, 26, 35]),
]


def ends(ranges: Sequence[range]) -> list[int]:
    assert ranges[0].start == 0
    assert all(before.stop == after.start for before, after in pairwise(ranges))
    assert all(len(layers) for layers in ranges)
    return [layers.stop for layers in ranges]


@pytest.mark.parametrize(("layers", "weights", "expected"), VECTORS)
def test_vectors(layers: int, weights: tuple[float, ...], expected: list[int]) -> None:
    assert ends(split_layers(layers, len(weights), weights)) == expected
    if len(set(weights)) == 1:
        assert ends(split_layers(layers, len(weights))) == expected


@pytest.mark.parametrize(
    ("layers", "devices", "weights", "message"),
    [
        (3, 4, (1, 1, 1, 1), "--target-devices: bad layer split for 4 devices and 3 layers"),
        (0, 1, (), "--target-devices: bad layer split for 1 devices and 0 layers"),
        (4, 0, (), "--target-devices: bad layer split for 0 devices and 4 layers"),
        (4, 2, (1,), "--target-layer-split 1: 1 weights for 2 devices"),
        (4, 2, (1e308, 1e308), "--target-layer-split: the weights add up to inf"),
    ],
)
def test_impossible_splits(layers: int, devices: int, weights: tuple[float, ...], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        split_layers(layers, devices, weights)
    assert (str(caught.value), caught.value.exit_code) == (message, 2)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8), st.integers(0, 60))
def test_splits_tile_the_layers(weights: list[float], more: int) -> None:
    layers = len(weights) + more
    assert ends(split_layers(layers, len(weights), weights))[-1] == layers


def sharing(sliding: Sequence[bool], own: int) -> ModelSpec:
    """A Gemma 4 E model: layers from `own` on read the last layer of their kind below it."""
    blocks = []
    for layer, slides in enumerate(sliding):
        donor = None
        if layer >= own:
            donor = max(other for other in range(own) if sliding[other] == slides)
        attention = Attention(
            heads=8,
            kv_heads=1,
            head_dim=256 if slides else 512,
            rope=Rope(256, 1e4),
            scale=1.0,
            donor=donor,
            window=512 if slides else None,
        )
        blocks.append(SandwichLayer(attention, GatedMLP(6144)))
    return ModelSpec("gemma4", 1536, 262144, 131072, 1e-6, tuple(blocks), tied_head=True, per_layer=256)


#: 35 layers, four sliding and one full in turn; the last 20 borrow from 13 and 14
E2B = sharing([bool((layer + 1) % 5) for layer in range(35)], 15)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1, 1), [14, 35]),
        ((1, 1, 1), [12, 14, 35]),
        ((1, 1, 1, 1), [9, 14, 26, 35]),
        ((14, 21), [14, 35]),
        ((13, 22), [13, 35]),
        ((15, 20), [14, 35]),
        ((1,), [35]),
        ((1,) * 35, list(range(1, 36))),
    ],
)
def test_alignment(weights: tuple[float, ...], expected: list[int]) -> None:
    assert ends(plan_layers(E2B, len(weights), weights)) == expected


def test_alignment_is_for_shared_keys_and_values_only() -> None:
    alone = sharing([True] * 35, 35)
    assert ends(plan_layers(alone, 2, (1, 1))) == [18, 35]
    assert ends(plan_layers(Reference("qwen35-a-F32").spec, 2, (1, 1))) == [4, 8]


def test_mirrors_and_traffic() -> None:
    assert mirrored(E2B, range(35)) == ()
    assert mirrored(E2B, range(14, 35)) == (13,)
    assert mirrored(E2B, range(15, 18)) == (13,)
    assert mirrored(E2B, range(18, 35)) == (13, 14)
    assert mirrored(E2B, range(15)) == ()
    # The stream and the token's embedding in float32; K and V of a sliding and of a full layer.
    ends, sliding, full = 2 * 1536, 2 * 256, 2 * 512
    assert activation_bytes(E2B, 13) == 4 * ends
    assert activation_bytes(E2B, 14) == 4 * (ends + sliding)
    assert activation_bytes(E2B, 18) == 4 * (ends + sliding + full)
    # Layers 30 to 33 slide, 34 does not.
    assert activation_bytes(E2B, 34) == 4 * (ends + full)
    assert activation_bytes(E2B, 35) == 0
    assert activation_bytes(replace(E2B, per_layer=0), 13) == 4 * 1536


def rooms(*free: int, weights: Sequence[int], state: int = 0, spare: int = -1) -> list[DeviceBudget]:
    """Devices with that much free; the one of number `spare` is the CPU."""
    count = len(weights)
    return [DeviceBudget(size, tuple(weights), (state,) * count, last_resort=i == spare) for i, size in enumerate(free)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # Equal devices: equal bytes, and the odd layer goes to the first.
        (rooms(100, 100, weights=[1] * 64), [32, 64]),
        (rooms(100, 100, weights=[1] * 5), [3, 5]),
        (rooms(10**11, 10**11, 10**11, weights=[10**9] * 9), [3, 6, 9]),
        # Bytes, not numbers: 15 layers of 1 and 20 of 2 are 55.
        (rooms(100, 100, weights=[1] * 15 + [2] * 20), [21, 35]),
        # State counts like weights.
        (rooms(100, 100, weights=[0] * 4, state=1), [2, 4]),
        # In proportion to what is free.
        (rooms(24, 8, weights=[1] * 16), [12, 16]),
        (rooms(8, 24, weights=[1] * 16), [4, 16]),
        (rooms(80, 40, 20, 20, weights=[1] * 32), [16, 24, 28, 32]),
        # Proportion gives way where a device would not hold its part.
        (rooms(10, 30, weights=[9, 2, 1, 1, 1, 1]), [1, 6]),
        (rooms(11, 10, weights=[6, 4, 4, 6]), [2, 4]),
        (rooms(20, 4, weights=[5, 4, 4, 3]), [3, 4]),
        # The CPU gets one layer, or what the GPUs cannot hold, however much memory it has.
        (rooms(100, 1000, weights=[1] * 20, spare=1), [19, 20]),
        (rooms(15, 1000, weights=[1] * 20, spare=1), [15, 20]),
        (rooms(12, 1000, 6, weights=[1] * 20, spare=1), [12, 14, 20]),
        # Nothing fits: the least too much.
        (rooms(10, 5, weights=[4] * 8), [5, 8]),
        (rooms(0, -8, weights=[4] * 8), [4, 8]),
        (rooms(-40, 32, weights=[4] * 8), [1, 8]),
    ],
)
def test_by_bytes(given: list[DeviceBudget], expected: list[int]) -> None:
    assert ends(fill_layers(given, [None] * len(given[0].weights))) == expected


def test_mirrors_take_room() -> None:
    # Layers 2 and 3 read the keys and values of 0. After a boundary, both shards have them.
    sizes = (1, 1, 1, 1)
    given = [DeviceBudget(8, sizes, (4, 0, 0, 0)), DeviceBudget(5, sizes, (4, 0, 0, 0))]
    assert ends(fill_layers(given, [None, None, None, None])) == [1, 4]
    assert ends(fill_layers(given, [None, None, 0, 0])) == [3, 4]


def test_more_devices_than_layers() -> None:
    with pytest.raises(UsageError, match="bad layer split for 3 devices and 2 layers"):
        fill_layers(rooms(1, 1, 1, weights=[1, 1]), [None, None])


sizes = st.integers(0, 50)


@given(
    st.integers(1, 4).flatmap(
        lambda count: st.lists(st.tuples(st.integers(-20, 200), sizes, st.booleans()), min_size=count, max_size=count)
    ),
    st.lists(st.tuples(sizes, sizes), min_size=4, max_size=7),
    st.data(),
)
def test_no_other_split_is_better(
    devices: list[tuple[int, int, bool]], layers: list[tuple[int, int]], data: st.DataObject
) -> None:
    count = len(layers)
    donors = [data.draw(st.sampled_from([None, *range(i)])) if i > 2 else None for i in range(count)]
    buffers = tuple(data.draw(st.integers(0, 9)) for _ in layers) if data.draw(st.booleans()) else ()
    given = [
        DeviceBudget(free, tuple(w + more for w, _ in layers), tuple(s for _, s in layers), spare, buffers)
        for free, more, spare in devices
    ]

    def cost(bounds: Sequence[int]) -> tuple[int, int, Fraction]:
        over, spared, squares = 0, 0, Fraction(0)
        for room, (start, stop) in zip(given, pairwise(bounds), strict=True):
            stateful = {*range(start, stop), *(d for d in donors[start:stop] if d is not None and d < start)}
            used = sum(room.weights[start:stop]) + sum(room.state[layer] for layer in stateful)
            used += buffers[start] if buffers else 0
            over += max(0, used - room.free)
            spared += (stop - start) * room.last_resort
            squares += Fraction(used * used, max(1, room.free))
        return over, spared, squares

    found = [0, *ends(fill_layers(given, donors))]
    best = min(cost([0, *inner, count]) for inner in combinations(range(1, count), len(given) - 1))
    assert cost(found) == best
