"""What the tables of settings share (option_checks_layers, _drafts, _server): each setting has a check of what it does
where the layers are split over devices of this process, or with some in a daemon.

Checks that compare with the same model share what it did: these functions remember their results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import luce
from luce.api import Model
from luce.backend.layersplit import LayerSplitBackend
from luce.runtime.step import Output, Step
from tests.support.drafts import DraftReference
from tests.support.reference import Reference
from tests.support.warm import WARM

FIT = DraftReference("qwen35-a-draft-fit-F32")
#: a recurrent model with its drafts, and one that pages
RECURRENT, PLAIN = FIT.target, Reference("qwen3-a-F32")
PROMPT = RECURRENT.expected["prompt_17"].tolist()
GREEDY = RECURRENT.expected["greedy_17"][:8].tolist()
LONG = (PROMPT * 50)[:800]
#: where the layers are: in this process, and with those of two devices in a daemon
HERE_ALL: dict[str, Any] = {"target_devices": "cpu:0,cpu:1,cpu:2"}
DAEMON: dict[str, Any] = {**HERE_ALL, "target_shard_ipc_bin": str(WARM)}

Patch, Log = pytest.MonkeyPatch, pytest.LogCaptureFixture
Check = Callable[[Patch, Path, Log], None]


class Table(dict[str, Check]):
    """The check of each setting. Called with names of settings, it registers their check."""

    def __call__(self, *names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """A check of several settings gets the name."""

        def register(function: Callable[..., None]) -> Callable[..., None]:
            for name in names:
                assert name not in self
                self[name] = functools.partial(function, name) if len(names) > 1 else function
            return function

        return register


def load(reference: Reference = RECURRENT, **settings: Any) -> Model:
    return luce.load(reference.path, **{"max_ctx": 256, "kv_cache_dir": "off", **settings})


def reply(model: Model, prompt: list[int] = PROMPT, n: int = 8, **sampling: Any) -> list[int]:
    generation = model.generate(prompt, max_tokens=n, ignore_eos=True, **sampling)
    return [token.id for token in generation]


@contextmanager
def steps() -> Iterator[list[Step]]:
    """The steps that begin meanwhile."""
    seen: list[Step] = []
    forward = LayerSplitBackend.forward

    def recorded(self: LayerSplitBackend, step: Step, queued: Callable[[], None]) -> Output:
        seen.append(step)
        return forward(self, step, queued)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerSplitBackend, "forward", recorded)
        yield seen
