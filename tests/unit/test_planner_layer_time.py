"""Seconds of a layer, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from luce.planner.figures import DeviceFigures, LinkFigures
from luce.planner.layer_time import (
    ExpertPlace,
    Pass,
    arithmetic_rate,
    expert_time,
    head_time,
    layer_time,
    product_time,
)
from luce.planner.problem import ExpertWork, HeadWork, LayerWork

DEVICE = DeviceFigures("cuda:0", "here", False, 10**9, 100.0, ((1, 10.0), (100, 1000.0)), 0.5, 1.0, LinkFigures(0, 1))
LAYER = LayerWork(bytes=200, macs=30, launches=4, kv=6, attention=5, slot_moved=50)


def test_the_rate_is_linear_in_logarithms_and_constant_outside() -> None:
    assert [arithmetic_rate(DEVICE, rows) for rows in (1, 10, 100, 5000)] == pytest.approx([10, 100, 1000, 1000])


def test_a_product_takes_the_longer_one_of_reading_and_arithmetic() -> None:
    assert product_time(DEVICE, 1, 200, 5).memory == 2.0
    assert product_time(DEVICE, 1, 200, 50).arithmetic == 10.0
    assert product_time(replace(DEVICE, expand=7.0), 1, 200, 5).memory == 14.0


def test_a_row_of_a_reply_reads_the_keys_and_values_that_it_sees() -> None:
    seconds = layer_time(DEVICE, LAYER, Pass("decode", 1, 1000))
    # Keys and values: 6 x 1000 / 100; states: 50 / 100; the product's arithmetic takes 2 x 30 / 10.
    assert (seconds.launches, seconds.memory, seconds.arithmetic) == pytest.approx((2.0, 60.5, 6.0))
    assert seconds.total == pytest.approx(68.5)
    windowed = layer_time(DEVICE, replace(LAYER, window=100), Pass("decode", 1, 1000))
    assert windowed.memory == pytest.approx(6.5)
    faster = layer_time(replace(DEVICE, state_read=600.0), LAYER, Pass("decode", 1, 1000))
    assert faster.memory == pytest.approx(10.5)


def test_a_row_takes_time_beside_what_it_reads_where_that_is_measured() -> None:
    device = replace(DEVICE, layer=7.0, recurrence_row=10.0)
    seconds = layer_time(device, LAYER, Pass("decode", 1, 1000))
    # Keys and values: 6 x 1000 / 100; states: 50 / 10.
    assert (seconds.launches, seconds.memory) == pytest.approx((9.0, 65.0))
    work = Pass("prompt", 100, 1000)
    assert layer_time(device, LAYER, work) == layer_time(DEVICE, LAYER, work)


def test_what_servers_observed_corrects_the_times_of_its_phase() -> None:
    device = replace(DEVICE, decode_ratio=1.5, prompt_ratio=0.5)
    experts = ExpertWork(bytes=1600, macs=1, count=4, used=1, launches=2)
    for layer in (LAYER, replace(LAYER, experts=experts)):
        for work, ratio in ((Pass("decode", 1, 10), 1.5), (Pass("prompt", 100, 10), 0.5)):
            assert layer_time(device, layer, work).total == pytest.approx(ratio * layer_time(DEVICE, layer, work).total)
    head = HeadWork(1000, 1, 3)
    assert head_time(device, head, 1).total == pytest.approx(1.5 * head_time(DEVICE, head, 1).total)
    # Experts elsewhere take as long as observed of that CPU; their way does not change.
    cpu, layer = replace(DEVICE, host=True, decode_ratio=2.0), replace(LAYER, experts=experts)
    away, plain = (
        layer_time(DEVICE, layer, Pass("decode", 1, 10), ExpertPlace(place, LinkFigures(3.0, 20.0), 40))
        for place in (cpu, replace(cpu, decode_ratio=1.0))
    )
    assert (away.cpu_experts, away.bus, away.memory) == (2 * plain.cpu_experts, plain.bus, plain.memory)


def test_rows_of_a_prompt_compute_their_attention() -> None:
    seconds = layer_time(DEVICE, LAYER, Pass("prompt", 100, 1000))
    # Attention: 2 x 5 x 100 x 1000 / 1000; the product: 2 x 30 x 100 / 1000.
    assert (seconds.memory, seconds.arithmetic) == pytest.approx((0.0, 1006.0))
    # Measured attention: 2 x 5 x 100 x 1000 / 2000; measured states: 100 x 50 / 25.
    measured = layer_time(replace(DEVICE, attention=2000.0, recurrence=25.0), LAYER, Pass("prompt", 100, 1000))
    assert measured.arithmetic == pytest.approx(6 + 500 + 200)
    # Activations: 100 x 40 / 8.
    between = layer_time(replace(DEVICE, elementwise=8.0), replace(LAYER, activations=40), Pass("prompt", 100, 1000))
    assert between.memory == pytest.approx(500.0)
    between = layer_time(replace(DEVICE, elementwise=8.0), replace(LAYER, activations=40), Pass("decode", 1, 1000))
    assert between.memory == pytest.approx(60.5)


def test_experts_are_read_as_far_as_rows_touch_them() -> None:
    experts = ExpertWork(bytes=1600, macs=1, count=4, used=1, launches=2)
    # Two rows touch 1 - (3/4)^2 of the bytes.
    assert expert_time(DEVICE, experts, 2).memory == pytest.approx(1600 * 7 / 16 / 100)
    assert expert_time(DEVICE, experts, 2).launches == 1.0
    assert expert_time(replace(DEVICE, routing=3.0), experts, 2).launches == 4.0


def test_experts_that_reach_a_share_of_the_speed_take_longer() -> None:
    experts = ExpertWork(bytes=1600, macs=1, count=4, used=1, launches=0)
    device = replace(DEVICE, gather=((1, 0.5), (16, 0.125)))
    # Between 1 and 16 rows, 4 are halfway in the logarithms.
    assert expert_time(device, experts, 4).memory == pytest.approx(4 * expert_time(DEVICE, experts, 4).memory)


def test_experts_elsewhere_cost_the_cpu_and_two_crossings() -> None:
    experts = ExpertWork(bytes=1600, macs=1, count=4, used=1, launches=2)
    cpu = replace(DEVICE, name="cpu:0", host=True, read=10.0)
    layer = replace(LAYER, experts=experts)
    away = layer_time(DEVICE, layer, Pass("decode", 1, 10), ExpertPlace(cpu, LinkFigures(3.0, 20.0), 40))
    assert away.cpu_experts == pytest.approx(1600 / 4 / 10 + 1.0)
    assert away.bus == pytest.approx(2 * (3.0 + 40 / 20))
    assert away.memory == layer_time(DEVICE, LAYER, Pass("decode", 1, 10)).memory


def test_the_head_is_a_product_with_launches() -> None:
    assert head_time(DEVICE, HeadWork(1000, 1, 3), 1).total == pytest.approx(10.0 + 1.5)
