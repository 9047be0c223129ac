"""The reference's accept and rollback traces replay exactly, and its whole speculative runs come out of the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import luce
from luce.config.sampling import SamplingParams
from luce.engine.events import Event, Tokens
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support.daemons import devices
from tests.support.drafts import DraftReference, references
from tests.support.drive import Driver
from tests.support.make_driver import MakeDriver
from tests.support.reference import Reference, errors
from tests.support.warm import WARM

each_prompt = pytest.mark.parametrize("prompt", ["17", "long"])
each_trace = pytest.mark.parametrize("name", ["qwen35-a-draft-F32", "qwen35-b-draft-BF16"])
PLACES: dict[str, dict[str, Any]] = {
    "one": {"target_devices": "cpu:0"},
    "three": {"target_devices": "cpu:0,cpu:1,cpu:2"},
}


def replay(driver: Driver, target: Reference, expected: dict[str, Any], prompt: str, kind: str) -> None:
    """Every step of a trace: which rows count, what follows them, and the logits that say so."""
    trace = {
        key.removeprefix(f"trace_{prompt}_"): v for key, v in expected.items() if key.startswith(f"trace_{prompt}")
    }
    limit = target.limits(kind)
    compared = []
    sequence = driver.start()
    driver.feed((sequence, expected[f"prompt_{prompt}"]))
    seed, found = int(expected[f"seed_{prompt}"]), []
    for step, width in enumerate(trace["width"].tolist()):
        block = trace["block"][step][:width]
        assert (sequence.length, seed) == (trace["committed"][step], trace["seed"][step]) and block[0] == seed
        (logits,) = driver.verify((sequence, block))
        best = logits.argmax(axis=1)
        right = best == trace["argmax"][step][:width]
        sure = trace["argmax_margin"][step][:width] > 5 * limit["nmse_median"] ** 0.5 * logits.std()
        assert right[sure].all()
        compared.append(sure)
        accepted = 1 + next((i for i in range(width - 1) if block[i + 1] != best[i]), width - 1)
        # By a row that is not sure another number may count.
        assert accepted == trace["accept"][step] or not right[: trace["accept"][step]].all()
        count = int(trace["commit"][step])
        driver.accept(sequence, count)
        found.append(logits[count - 1])
        seed = int(trace["argmax"][step][count - 1])
        assert seed == trace["next_seed"][step]
    assert np.concatenate(compared).mean() > (0.1 if kind == "int8_activations" else 0.4)
    found.append(driver.feed((sequence, np.array([seed], np.int32)))[0][0])
    each = errors(np.array(found), np.concatenate((trace["next_logits"], trace["final_logits"][None])))
    assert np.median(each) <= limit["nmse_median"] and np.quantile(each, 0.9) <= limit["nmse_p90"]


@each_prompt
@each_trace
def test_traces(name: str, prompt: str, make_driver: MakeDriver) -> None:
    reference = DraftReference(name)
    for count in (1, 3):
        driver = make_driver(reference.target, [HostDevice(i) for i in range(count)], verify_rows=16)
        replay(driver, reference.target, reference.expected, prompt, "f32")
    with devices("cpu:0,cpu:1", target_shard_ipc_bin=(("", WARM),)) as opened:
        driver = make_driver(reference.target, opened, verify_rows=16)
        replay(driver, reference.target, reference.expected, prompt, "f32")
        driver.backend.close()


@pytest.mark.gpu
@each_prompt
@each_trace
def test_traces_on_a_gpu(name: str, prompt: str, make_driver: MakeDriver, gpu: Device) -> None:
    reference = DraftReference(name)
    target = reference.target
    replay(make_driver(target, [gpu], verify_rows=16), target, reference.expected, prompt, target.kind(16))


@pytest.mark.parametrize(
    ("reference", "place"),
    [(reference, "one") for reference in references()] + [(DraftReference("qwen35-a-draft-fit-F32"), "three")],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_runs(reference: DraftReference, place: str) -> None:
    """How many rows of every block count, and the 32 tokens."""
    settings = {"max_ctx": 512, "draft": str(reference.path), "verify_width": 8, "cache_ram": 0, **PLACES[place]}
    with luce.load(reference.target.path, **settings) as model:
        for prompt in ("17", "long"):
            steps: list[list[int]] = []

            def collect(event: Event, steps: list[list[int]] = steps) -> None:
                if isinstance(event, Tokens):
                    steps.append([token.id for token in event.tokens])

            ids = reference.expected[f"prompt_{prompt}"].tolist()
            params = SamplingParams(max_tokens=33, ignore_eos=True)
            model.engine.submit(ids, params, output=model.reply_text(), on_event=collect)
            assert model.engine.wait_idle(60)
            tokens = [token for step in steps for token in step]
            assert tokens[:32] == reference.expected[f"spec_{prompt}_tokens"].tolist()
            # The seed of the first step comes with the prompt; the last step is cut by the budget here and there.
            accepted = reference.expected[f"spec_{prompt}_accept"].tolist()
            assert [len(step) for step in steps[1:]][: len(accepted) - 1] == accepted[:-1]


def test_a_daemon_beside_the_draft() -> None:
    reference = DraftReference("qwen35-a-draft-fit-F32")
    settings = {"target_devices": "cpu:0,cpu:1", "target_shard_ipc_bin": str(WARM), "verify_width": 8}
    with luce.load(reference.target.path, max_ctx=512, draft=str(reference.path), **settings) as model:
        ids = reference.expected["prompt_17"].tolist()
        generation = model.generate(ids, max_tokens=32, temperature=0, ignore_eos=True)
        tokens = [token.id for token in generation]
        assert generation.finish is not None and generation.finish.timings.accepted >= 18
    assert tokens == reference.expected["spec_17_tokens"].tolist()
