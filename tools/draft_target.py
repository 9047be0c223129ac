"""A target and its drafter, opened for the engines of measurements."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from luce.assembly import open_backend
from luce.backend.layersplit import LayerSplitBackend
from luce.backend.placement import default_context
from luce.config.resolve import resolve
from luce.config.settings import Config
from luce.draft.drafter import Drafter
from luce.draft.open import open_drafter
from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.remote.open import open_placement

#: seconds to wait for a reply at most
REPLY_TIMEOUT = 600


class Silent:
    """Takes a reply without making text of it."""

    stopped = None
    texts = ()

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@contextlib.contextmanager
def opened(target: str, **fields: Any) -> Iterator[tuple[LayerSplitBackend, Drafter | None]]:
    """A target and the drafter of --draft."""
    config: Config = resolve({"parallel": 1, **fields})
    with ExitStack() as stack:
        file = stack.enter_context(open_gguf(Path(target)))
        spec = read_spec(Source(target, file.metadata, file.tensors))
        devices = open_placement(config)
        for device in devices:
            stack.callback(device.close)
        context = default_context(spec, config.max_ctx)
        prepared = open_drafter(stack, config, file, spec, devices, context=context)
        ring = None if prepared is None else prepared.ring
        claims = () if prepared is None else prepared.claims
        backend = open_backend(stack, file, spec, devices, config, ring=ring, claims=claims)
        drafter = None if prepared is None else prepared.open(backend.shards[0], backend.shards[-1])
        if drafter is not None:
            stack.callback(drafter.close)
        yield backend, drafter
