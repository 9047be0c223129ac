"""Reference models with a prefix cache on the disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import luce
from luce.api import Model
from tests.support.daemons import key_file
from tests.support.reference import Reference
from tests.support.warm import WARM
from tools.listening_daemon import listener


def load(path: Path, directory: Path, **more: Any) -> Model:
    fields = {
        "target_devices": "cpu:0",
        "max_ctx": 256,
        "kv_cache_min_tokens": 1,
        "kv_cache_dir": str(directory),
        **more,
    }
    return luce.load(path, **fields)


def ask(model: Model, prompt: list[int], n: int) -> tuple[list[int], int, str]:
    """(greedy reply, tokens from the cache, tier)."""
    generation = model.generate(prompt, max_tokens=n, temperature=0, ignore_eos=True)
    tokens = [token.id for token in generation]
    assert generation.finish is not None
    return tokens, generation.finish.timings.cached_tokens, generation.finish.timings.cache_tier


def saved(model: Model, prompt: list[int]) -> int:
    """How much of a prompt is on the disk after its reply: up to its last boundary where states are large, else all."""
    spec = model.spec
    exact = spec.recurrent or any(group.window is not None for group in spec.page_groups)
    return [len(prompt), *(model.chat.boundaries(prompt) if exact else ())][-1]


#: shards in this process, in child processes, on another machine, of which a daemon may have two
PLACEMENTS: dict[str, dict[str, Any]] = {
    "one": {"target_devices": "cpu:0"},
    "three": {"target_devices": "cpu:0,cpu:1,cpu:2"},
    "daemons": {"target_devices": "cpu:0,cpu:1,cpu:2", "target_shard_ipc_bin": WARM, "isolate_shards": True},
    "daemon of two, by stream": {
        "target_devices": "cpu:0,cpu:1,cpu:2",
        "target_shard_ipc_bin": WARM,
        "shard_transport": "stream",
    },
    "network": {"target_devices": "cpu:0,{0}cpu:0,{0}cpu:1"},
}


@contextmanager
def placed(reference: Reference, directory: Path, placement: str, **more: Any) -> Iterator[Model]:
    fields = {"shard_start_timeout": 60, **PLACEMENTS[placement], **more}
    with ExitStack() as opened:
        if placement == "network":
            key = key_file(directory.parent / "key")
            port, _ = opened.enter_context(listener(reference.path, key, python=WARM))
            address = f"tcp://127.0.0.1:{port}/"
            fields |= {"target_devices": fields["target_devices"].format(address), "shard_key_file": key}
        yield opened.enter_context(load(reference.path, directory, **fields))
