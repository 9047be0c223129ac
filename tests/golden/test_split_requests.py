"""Requests on a split: the pieces in which prompts are read, where a kept prefix is gone on from; failing starts."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import luce
from luce import api
from luce.api import Model
from luce.backend.layersplit import LayerSplitBackend
from luce.config.sampling import SamplingParams
from luce.engine.events import Failed, Finished, FinishReason, Tokens
from luce.engine.speculate import Speculator
from luce.errors import DeviceError
from luce.layers.build import LayerBuilder
from luce.runtime.device import Memory
from luce.runtime.host import HostDevice
from luce.runtime.step import Output, Step
from tests.support.daemons import children, within
from tests.support.drafts import DraftReference
from tests.support.warm import WARM

FIT = DraftReference("qwen35-a-draft-fit-F32")
SPLITS: dict[str, dict[str, Any]] = {
    "two": {"target_devices": "cpu:0,cpu:1"},
    "three": {"target_devices": "cpu:0,cpu:1,cpu:2", "target_layer_split": "1,5,2"},
    "daemon": {"target_devices": "cpu:0,cpu:1", "target_shard_ipc_bin": str(WARM)},
}
#: (position, rows) of the spans of a prompt
Read = list[tuple[int, int]]


class Watched:
    """A model that tells what it ran."""

    def __init__(self, model: Model, steps: list[Step]) -> None:
        self.model = model
        self._steps = steps

    def ask(self, prompt: Sequence[int], boundaries: Sequence[int] = ()) -> tuple[list[int], Read]:
        """The reply's 12 tokens, and how the prompt was read."""
        self._steps.clear()
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        output = self.model.reply_text((), prompt)
        self.model.engine.submit(prompt, params, output=output, on_event=events.put, boundaries=boundaries)
        reply: list[int] = []
        while not isinstance(event := events.get(timeout=60), Finished):
            assert not isinstance(event, Failed), event
            if isinstance(event, Tokens):
                reply += [token.id for token in event.tokens]
        spans = [(span.position, span.rows) for step in self._steps for span in step.spans]
        return reply, [span for span in spans if span[0] < len(prompt)]


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[Watched]:
    steps: list[Step] = []
    forward = LayerSplitBackend.forward

    def recorded(self: LayerSplitBackend, step: Step, queued: Callable[[], None]) -> Output:
        steps.append(step)
        return forward(self, step, queued)

    with monkeypatch.context() as patch:
        patch.setattr(LayerSplitBackend, "forward", recorded)
        with luce.load(FIT.target.path, max_ctx=256, kv_cache_dir="off", **settings) as model:
            yield Watched(model, steps)


@pytest.fixture(scope="module")
def prompts() -> tuple[list[int], list[int]]:
    """Two prompts of four tokens that part before the last one."""
    first = FIT.target.expected["prompt_17"][:4].tolist()
    return first, [*first[:3], first[3] + 1]


@pytest.fixture(scope="module")
def replies(prompts: tuple[list[int], list[int]]) -> list[list[int]]:
    """What one device says without a draft, and without a cache."""
    with luce.load(FIT.target.path, target_device="cpu:0", max_ctx=256, cache_ram=0) as model:
        asked = [model.generate(p, max_tokens=12, temperature=0, ignore_eos=True) for p in prompts]
        return [[token.id for token in reply] for reply in asked]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("draft", [{}, {"draft": str(FIT.path)}], ids=["plain", "dflash"])
def test_a_prefix_that_is_kept_on_the_way(
    split: str,
    draft: dict[str, Any],
    prompts: tuple[list[int], list[int]],
    replies: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[int] = []
    monkeypatch.setattr(Speculator, "resume", lambda self, slot, end, tail: begun.append(end))
    with watched(monkeypatch, **SPLITS[split], **draft) as model:
        assert model.ask(prompts[0], [3]) == (replies[0], [(0, 3), (3, 1)])
        # Not read again, and not reset: the fourth token alone, and drafting continues there.
        assert model.ask(prompts[1], [3]) == (replies[1], [(3, 1)])
        stats = model.model.engine.stats()
    assert begun == ([3] if draft else [])
    assert stats.cache.reused_tokens == 3 and (not draft or (stats.draft is not None and stats.draft.steps > 0))


@pytest.mark.parametrize("split", SPLITS)
def test_a_prompt_in_chunks(split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = FIT.target.expected["prompt_17"].tolist()
    with watched(monkeypatch, **SPLITS[split], chunk=3, cache_ram=0) as model:
        assert model.ask(prompt[:8])[1] == [(0, 3), (3, 3), (6, 2)]
        reply, read = model.ask(prompt)
    assert reply == FIT.target.expected["greedy_17"][:12].tolist()
    assert read == [(at, 3) for at in range(0, 15, 3)] + [(15, 2)]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("draft", [{}, {"draft": str(FIT.path)}], ids=["plain", "dflash"])
def test_sampled_replies(split: str, draft: dict[str, Any], tmp_path: Path) -> None:
    # Penalties count the whole prompt, also where only its last token is read.
    prompt = FIT.target.expected["prompt_17"].tolist()
    sampling = {"temperature": 0.9, "top_k": 20, "repetition_penalty": 1.2, "presence_penalty": 0.3, "seed": 5}

    def ask(model: Model) -> tuple[list[int], str]:
        generation = model.generate(prompt, max_tokens=24, ignore_eos=True, **sampling)
        reply = [token.id for token in generation]
        assert generation.finish is not None
        return reply, generation.finish.timings.cache_tier

    with luce.load(FIT.target.path, target_device="cpu:0", max_ctx=256, cache_ram=0, **draft) as model:
        reply, _ = ask(model)
    assert len(set(reply)) > 5 and reply != FIT.target.expected["greedy_17"][:24].tolist()
    kept = {"max_ctx": 256, "kv_cache_dir": str(tmp_path), "kv_cache_min_tokens": 1}
    tiers = []
    for _ in range(2):
        with luce.load(FIT.target.path, **SPLITS[split], **draft, **kept) as model:
            for _ in range(2):
                found, tier = ask(model)
                assert found == reply
                tiers.append(tier)
    assert tiers == ["none", "ram", "disk", "ram"]


def fail(*args: Any, **options: Any) -> None:
    raise DeviceError("cpu:0: lost its way")


@pytest.mark.parametrize("where", ["plan", "load", "engine"])
def test_a_start_that_fails_here_leaves_no_daemon(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if where == "plan":
        monkeypatch.setattr(HostDevice, "memory", lambda self: Memory(1, 1))
    elif where == "load":
        monkeypatch.setattr(LayerBuilder, "layer", fail)
    else:
        monkeypatch.setattr(api, "Engine", fail)
    threads = set(threading.enumerate())
    with pytest.raises(DeviceError):
        luce.load(FIT.target.path, **SPLITS["daemon"], max_ctx=256)
    assert within(60, lambda: not children() and not set(threading.enumerate()) - threads)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("stage", ["prompt", "reply"])
def test_a_stop_in_the_middle(split: str, stage: str) -> None:
    threads, begun = set(threading.enumerate()), {"prompt": threading.Event(), "reply": threading.Event()}
    prompt = FIT.target.expected["prompt_long"].tolist()
    model = luce.load(FIT.target.path, **SPLITS[split], chunk=16, kv_cache_dir="off")
    reply = model.generate(
        prompt, max_tokens=2000, temperature=0, ignore_eos=True, on_progress=lambda done, total: begun["prompt"].set()
    )

    def read() -> None:
        for _ in reply:
            begun["reply"].set()

    working = [threading.Thread(target=read)]
    working[0].start()
    assert begun[stage].wait(60)
    working += [threading.Thread(target=model.close) for _ in range(2)]
    for thread in working[1:]:
        thread.start()
    for thread in working:
        thread.join(60)
    assert within(60, lambda: not children() and not set(threading.enumerate()) - threads)
    assert reply.finish is not None and reply.finish.reason == FinishReason.SHUTDOWN
    model.close()
