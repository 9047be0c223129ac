"""Replayed steps give the bits of eager ones, on a device that captures launches: a hybrid model, one of experts, and
one that hands keys and values on. All families replay on real GPUs (test_reference_gpu.py); emulated, a file takes
minutes.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.runtime.device import Array, DeviceName
from luce.runtime.draws import Draw, RowDraws
from luce.runtime.step import Span, Step
from luce.shard import graphs
from luce.shard.graphs import MAX_REPLIES, MAX_ROWS, MAX_SPAN
from luce.shard.shard import TransientActivation
from tests.support.capturing import CapturingDevice
from tests.support.drive import Driver
from tests.support.emulated import EmulatedDevice
from tests.support.golden_checks import check_replayed
from tests.support.make_driver import MakeDriver
from tests.support.op_checks_sample import drawn_token
from tests.support.reference import Reference

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("name", ["qwen35-a-Q8_0", "qwen35moe-a-Q4_0", "gemma4-e-Q4_0"])
def test_bits(name: str, make_driver: MakeDriver) -> None:
    reference, device = Reference(name), CapturingDevice()
    check_replayed(reference, make_driver(reference, [device]), make_driver(reference, [EmulatedDevice()]))
    # Four shapes recur, each eager, then captured, then replayed.
    assert device.captured == 4 and device.launched == 8


def test_shards_send_what_they_replay(make_driver: MakeDriver) -> None:
    # On one device, so that both shards' graphs share their memory.
    reference, device = Reference("gemma4-e-Q4_0"), CapturingDevice()
    check_replayed(reference, make_driver(reference, [device, device]), make_driver(reference, [EmulatedDevice()]))
    assert device.captured == 8 and device.launched == 16


@pytest.mark.parametrize("name", ["qwen35-a-Q8_0", "gemma4-e-Q4_0"])
def test_microbatches_of_prompts(name: str, make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "LONG_ROWS", 32)
    reference, devices, plain = Reference(name), [], []
    for index in range(2):
        for made in (devices, plain):
            made.append((CapturingDevice if made is devices else EmulatedDevice)())
            made[-1].name = DeviceName("cuda", index)
    ours, theirs = (make_driver(reference, each, chunk=128, microbatch=32) for each in (devices, plain))
    prompt, last = reference.expected["prompt_long"][:128], np.array([1], np.int32)

    def read(driver: Driver) -> NDArray[np.float32]:
        sequence = driver.start()
        driver.feed((sequence, prompt), wanted=False)
        return driver.feed((sequence, last))[0]

    expected = read(theirs)
    # Two microbatches of one shape each time: the first runs eagerly, the second is captured, the others are replayed.
    for _ in range(3):
        np.testing.assert_array_equal(read(ours), expected)
    for device in devices:
        assert device.launched >= 4


def test_a_device_that_cannot_capture_runs_on(make_driver: MakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    reference, device = Reference("qwen3-a-MIX"), CapturingDevice(refuses=True)
    with caplog.at_level(logging.WARNING, logger="luce"):
        check_replayed(reference, make_driver(reference, [device]), make_driver(reference, [EmulatedDevice()]))
    assert device.launched == 0
    first = caplog.messages[0]
    assert first == "steps of 1 rows run launch by launch: cuda:0: captures nothing today"
    assert caplog.messages.count(first) == 1, "it is tried once for each shape"


def test_what_is_captured(make_driver: MakeDriver) -> None:
    reference, device = Reference("qwen3-a-MIX"), CapturingDevice()
    ids = reference.expected["prompt_17"]

    def captures(*lengths: int) -> bool:
        before = device.captured
        driver = make_driver(reference, [device], slots=2 * len(lengths))
        for _ in range(2):
            driver.feed(*((driver.start(), ids[:n]) for n in lengths))
        return device.captured > before

    assert captures(1) and captures(MAX_SPAN) and captures(MAX_SPAN, 3) and captures(*[1] * MAX_ROWS)
    assert not captures(MAX_SPAN + 1)


@pytest.mark.parametrize(
    ("sequences", "rows", "gemm", "captured"),
    [
        (MAX_REPLIES, 1, True, 1),
        (MAX_REPLIES + 1, 1, True, 0),
        (MAX_ROWS + 1, 1, False, 0),
        (MAX_ROWS // 2, 2, False, 1),
        (MAX_ROWS // 2 + 1, 2, True, 0),
    ],
)
def test_more_replies_are_captured_where_products_can_be(sequences: int, rows: int, gemm: bool, captured: int) -> None:
    device, tokens = CapturingDevice(), np.arange(sequences * rows, dtype=np.int32)
    device.captures_gemm = gemm
    replayer = graphs.GraphRunner(device, lambda step, inputs: (device.empty(1),), ())
    step = Step.of_spans([Span(slot, slot * rows, rows, 0) for slot in range(sequences)], tokens, ())
    results = [replayer.run(step, ()) for _ in range(3)]
    assert (device.captured, isinstance(results[-1], TransientActivation)) == (captured, captured == 1)


def test_one_warning_where_memory_is_short_for_many_replies(caplog: pytest.LogCaptureFixture) -> None:
    device = CapturingDevice(refuses=True)
    replayer = graphs.GraphRunner(device, lambda step, inputs: (device.empty(1),), ())
    with caplog.at_level(logging.WARNING, logger="luce"):
        for count in (MAX_ROWS - 1, MAX_ROWS, MAX_ROWS + 1, MAX_ROWS + 2):
            spans = [Span(slot, slot, 1, 0) for slot in range(count)]
            for _ in range(2):
                replayer.run(Step.of_spans(spans, np.zeros(count, np.int32), ()), ())
    rows = [int(message.split()[2]) for message in caplog.messages]
    assert rows == [MAX_ROWS - 1, MAX_ROWS, MAX_ROWS + 1]


@pytest.mark.parametrize(("long", "gemm", "captured"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_long_steps_are_captured_where_products_can_be(long: bool, gemm: bool, captured: int) -> None:
    device, rows = CapturingDevice(), np.arange(300, dtype=np.int32)
    device.captures_gemm = gemm
    replayer = graphs.GraphRunner(device, lambda step, inputs: (device.empty(1),), (), long=long)
    step = Step.of_spans([Span(0, 0, 300, 0)], rows, ())
    results = [replayer.run(step, ()) for _ in range(3)]
    assert (device.captured, isinstance(results[-1], TransientActivation)) == (captured, captured == 1)


def test_a_staged_step_runs_with_its_newest_tokens(make_driver: MakeDriver) -> None:
    reference, device, written = Reference("qwen3-a-MIX"), CapturingDevice(), []
    driver, eager = make_driver(reference, [device], slots=2), make_driver(reference, [EmulatedDevice()], slots=2)
    ids, stage, forward = reference.expected["prompt_17"], driver.backend.stage, driver.backend.forward
    ours, theirs = ([made.start() for _ in range(2)] for made in (driver, eager))
    write = device.write

    def noted(array: Array, values: NDArray[Any]) -> None:
        written.append(values.size)
        write(array, values)

    def run(step: Step, number: int, at: int) -> list[int]:
        """The sizes of the copies to the device."""
        written.clear()
        (expected,) = eager.feed((theirs[number], ids[at : at + 4]))
        np.testing.assert_array_equal(forward(step).logits, expected)
        return list(written)

    device.write = noted  # type: ignore[method-assign]
    for number in range(2):
        # Eager and captured.
        step = driver.step((ours[number], ids[:4]))
        stage(step)
        assert run(step, number, 0) == [graphs.StepShape.of(step, (8,)).size]
    step = driver.step((ours[0], ids[4:8]))
    step.tokens[:] = 1
    stage(step)
    step.tokens[:] = ids[4:8]
    assert run(step, 0, 4) == [4]
    # Another step of the shape comes between, or comes instead.
    first, second = driver.step((ours[0], ids[8:12])), driver.step((ours[1], ids[4:8]))
    stage(first)
    assert run(second, 1, 4) > [4] and run(first, 0, 8) > [4]
    # A step that is staged runs once with what is there.
    first, second = driver.step((ours[0], ids[12:16])), driver.step((ours[1], ids[8:12]))
    stage(first)
    stage(second)
    assert run(second, 1, 8) == [4] and run(first, 0, 12) > [4]


def test_some_rows_are_drawn(make_driver: MakeDriver) -> None:
    reference, device = Reference("qwen3-a-MIX"), CapturingDevice()
    driver, eager = make_driver(reference, [device]), make_driver(reference, [EmulatedDevice()])
    ids = reference.expected["prompt_17"]
    ours, theirs = driver.start(), eager.start()
    draws = [Draw(1, 2.0, 64), None, Draw(2, 1.0, 9, 0.8), Draw(3, 3.0, 40, 1.0, 0.1)]
    # Eager, captured, replayed: what is drawn is not in the graph, whose ids it replaces.
    for at in range(0, 12, 4):
        (logits,) = eager.feed((theirs, ids[at : at + 4]))
        step = driver.step((ours, ids[at : at + 4]))
        output = driver.backend.forward(replace(step, needs_logits=np.zeros(4, np.bool_), draws=RowDraws.of(draws)))
        positions = range(at + 1, at + 5)
        expected = [
            int(row.argmax()) if draw is None else drawn_token(row, draw, position)
            for row, draw, position in zip(logits, draws, positions, strict=True)
        ]
        assert output.ids.tolist() == expected
    assert device.launched == 2


def test_some_rows_want_candidates(make_driver: MakeDriver) -> None:
    reference, device = Reference("qwen3-a-MIX"), CapturingDevice()
    driver, eager = make_driver(reference, [device]), make_driver(reference, [EmulatedDevice()])
    ids = reference.expected["prompt_17"]
    ours, theirs = driver.start(), eager.start()
    # Three rounds: eager, captured, replayed. Rows want their logits, their candidates, both or neither.
    for at in range(0, 12, 4):
        (logits,) = eager.feed((theirs, ids[at : at + 4]))
        step = driver.step((ours, ids[at : at + 4]))
        output = driver.backend.forward(
            replace(step, needs_logits=np.arange(4) < 2, needs_candidates=np.arange(4) % 2 == 0)
        )
        np.testing.assert_array_equal(output.ids, logits.argmax(axis=1))
        np.testing.assert_array_equal(output.logits, logits[:2])
        assert output.candidates is not None
        expected = np.argsort(-logits[::2], axis=1, kind="stable")[:, :64]
        np.testing.assert_array_equal(output.candidates.ids, expected)
        np.testing.assert_array_equal(output.candidates.logits, np.take_along_axis(logits[::2], expected, axis=1))
    assert device.launched == 2
