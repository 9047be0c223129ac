"""Replies whose steps are queued one ahead (luce.engine.overlap), over real shards: the reference files' tokens."""

from __future__ import annotations

from typing import Any

import pytest

import luce
from luce.api import Model
from luce.backend.layersplit import LayerSplitBackend
from luce.runtime.device import Device
from tests.support.constraints import Turns
from tests.support.covering import each_kind
from tests.support.generate import ask
from tests.support.reference import Reference
from tests.support.replies import submit

TOKENS = 32
DRAWN = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.5, "top_k": 40, "top_p": 0.95, "seed": 11}


def masked(model: Model, prompt: list[int], **sampling: Any) -> list[int]:
    """A reply whose masks depend on how many tokens it has."""
    own = Turns(model.spec.vocab, *range(3, model.spec.vocab, 2))
    reply, _ = submit(model.engine, prompt, constraint=own, **sampling)
    reply.finished()
    return reply.ids


def watched(model: Model, *, asynchronous: bool) -> list[bool]:
    """Whether the backend queued each step that it was asked to queue behind another one."""
    backend, answers = model.engine.parts.backend, list[bool]()
    assert isinstance(backend, LayerSplitBackend)
    follow = backend.follow

    def noted(step: object) -> bool:
        answers.append(follow(step))  # type: ignore[arg-type]
        return answers[-1]

    backend.follow = noted  # type: ignore[method-assign]
    # What a CPU computes is there when the call returns: its shards can be asked as GPUs are.
    backend.asynchronous = asynchronous
    return answers


def check(reference: Reference, devices: str) -> list[list[int]]:
    """Holds replies to those of steps that wait for their tokens. Returns the greedy reply to the long prompt first."""
    prompt, short = (reference.expected[f"prompt_{key}"].tolist() for key in ("long", "17"))
    found = []
    for asynchronous in (False, True):
        with luce.load(reference.path, target_devices=devices, max_ctx=256, chunk=50) as model:
            answers = watched(model, asynchronous=asynchronous)
            whole, (first, _) = ask(model, prompt, TOKENS), ask(model, short, 20)
            found.append([whole[0], first, ask(model, [*short, *first, *prompt[:9]], 20)[0]])
            greedy = len(answers)
            found[-1].append([token.id for token in model.generate(short, **DRAWN)])
            drawn = len(answers)
            found[-1].append(masked(model, short, max_tokens=TOKENS, ignore_eos=True))
            found[-1].append(masked(model, short, **DRAWN))
            counts = greedy - TOKENS, drawn - greedy - TOKENS // 2, len(answers) - drawn - TOKENS
            assert min(counts) > 0 if asynchronous else not answers
            assert all(answers)
    assert found[0] == found[1] and len({tuple(ids[:20]) for ids in found[0][1:]}) == 5
    return found[1]


@each_kind()
def test_on_the_cpu(reference: Reference) -> None:
    assert check(reference, "cpu:0")[0] == reference.expected["greedy_long"].tolist()


@pytest.mark.parametrize("name", ["qwen35-a-F32", "gemma4-e-F32", "qwen35moe-a-F32"])
def test_through_two_shards(name: str) -> None:
    check(Reference(name), "cpu:0,cpu:1")


@pytest.mark.gpu
@each_kind()
def test_on_a_gpu(reference: Reference, gpu: Device) -> None:
    check(reference, str(gpu.name))
