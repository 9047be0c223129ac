"""Seconds and bytes of ranges of layers, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from luce.planner.figures import DeviceFigures, LinkFigures
from luce.planner.problem import ExpertWork, HeadWork, LayerWork, Load, ModelWork, Offload, Problem
from luce.planner.shard_tables import handover_rows, kept_positions, shard_seconds, shard_tables

GPU = DeviceFigures(
    "cuda:0", "here", False, 10_000, 100.0, ((1, 1e6),), 0.0, 1.0, LinkFigures(0, 1), bus=LinkFigures(0, 1e9)
)
CPU = replace(GPU, name="cpu:0", host=True, read=10.0, expand=2.0, free=100_000)
LAYER = LayerWork(bytes=100, macs=1, launches=0, kv=2, attention=0, slot=30, unpacked=400)
MOE = replace(LAYER, experts=ExpertWork(1000, 1, 4, 1, 0))
LOAD = Load(sequences=3, context=10, prompt=4)


def problem(layers: tuple[LayerWork, ...], *devices: DeviceFigures, offload: Offload = "off") -> Problem:
    model = ModelWork(8, (0, *(5,) * (len(layers) - 1)), 7, HeadWork(50, 1, 0), layers)
    return Problem(model, LOAD, devices, {}, "decode", offload, reserve=0.0)


def test_bytes_are_weights_states_buffers_and_ends() -> None:
    three = (LAYER,) * 3
    tables = shard_tables(problem(three, GPU), replace(GPU, workspace=11), 4)
    own = 100 + 3 * (2 * 10 + 30)
    assert tables.bytes[0, 1] == 11 + own + 7
    assert tables.bytes[1, 2] == 11 + own + 5 * handover_rows(4)
    assert tables.bytes[1, 3] == 11 + 2 * own + 5 * handover_rows(4) + 50
    on_cpu = shard_tables(problem(three, CPU), CPU, 4)
    # The table of embeddings stays in the file; weights take twice their bytes.
    assert on_cpu.bytes[0, 3] == 3 * (200 + 150) + 100
    assert (on_cpu.pooled == on_cpu.bytes).all()
    assert (on_cpu.busy == on_cpu.prompt).all()


def test_handovers_have_two_places_for_a_piece_and_a_half_with_replies() -> None:
    assert handover_rows(512) == 2 * (768 + 128)


def test_windows_keep_their_positions_and_a_chunk() -> None:
    assert kept_positions(LAYER, 10_000, 512) == 10_000
    assert kept_positions(replace(LAYER, window=1024), 10_000, 512) == 1536
    assert kept_positions(replace(LAYER, window=1024), 900, 512) == 900


def test_only_ranges_with_layers_that_have_room_fit() -> None:
    tables = shard_tables(problem((LAYER,) * 3, GPU), replace(GPU, free=560), 4)
    # One layer takes 250 bytes, the embedding 7, the head 50, a handover 5 x 268.
    assert tables.fits.tolist() == [[False, True, True, False], [False] * 4, [False] * 4]


def test_the_first_layers_with_room_stay_unpacked() -> None:
    layers = (replace(LAYER, unpacked=300), replace(LAYER, unpacked=900), replace(LAYER, unpacked=200))
    need = 3 * 250 + 7 + 50
    device = replace(GPU, free=need + 2 * 600, unpack=10.0)
    tables = shard_tables(problem(layers, device), device, 4)
    # Half of the rest is 600: the first one, not the second, and the third.
    assert tables.unpacked[0, 3] == 900
    packed = replace(device, unpack=None)
    assert tables.prompt[0, 3] == pytest.approx(shard_tables(problem(layers, packed), packed, 4).prompt[0, 3] + 90)


def test_the_fewest_last_experts_go_to_the_cpu() -> None:
    layers = (MOE, LAYER, MOE, MOE)
    whole = 4 * 250 + 3 * 1000 + 7 + 50
    for missing, away in ((0, 0), (1, 1), (1000, 1), (1001, 2), (3000, 3), (3001, -1)):
        device = replace(GPU, free=whole - missing)
        tables = shard_tables(problem(layers, device, CPU, offload="auto"), device, 4)
        assert tables.offloaded[0, 4] == away
        assert tables.fits[0, 4] == (away >= 0)
        if away >= 0:
            assert tables.pooled[0, 4] == away * 1000 * 2
            assert (tables.busy[0, 4] > 0) == (away > 0)


def test_a_number_of_layers_is_those_at_the_end_of_the_model() -> None:
    layers = (MOE, LAYER, MOE, MOE)
    tables = shard_tables(problem(layers, GPU, CPU, offload=2), GPU, 4)
    assert (tables.offloaded[0, 4], tables.offloaded[0, 3], tables.offloaded[0, 2]) == (2, 1, 0)
    elsewhere = replace(GPU, machine="b")
    alone = shard_tables(problem(layers, elsewhere, CPU, offload=2), elsewhere, 4)
    assert (alone.fits[0, 2], alone.fits[0, 3]) == (True, False)
    on_cpu = shard_tables(problem(layers, CPU, offload=2), CPU, 4)
    assert (on_cpu.offloaded[0, 4], on_cpu.fits[0, 4]) == (0, True)


@pytest.mark.parametrize("offload", ["off", 1, 2])
def test_the_parts_of_a_shard_add_up_to_the_tables(offload: Offload) -> None:
    device = replace(GPU, unpack=10.0, free=6000, decode_ratio=1.25, prompt_ratio=0.75)
    found = problem((MOE, LAYER, MOE, MOE), device, CPU, offload=offload)
    tables = shard_tables(found, device, 4)
    for start, end in ((0, 4), (0, 2), (1, 4), (2, 3)):
        away, unpacked = int(tables.offloaded[start, end]), float(tables.unpacked[start, end])
        decode, piece = shard_seconds(found, device, range(start, end), away, unpacked, 4)
        assert decode.total == pytest.approx(tables.decode[start, end])
        assert piece.total == pytest.approx(tables.prompt[start, end])
