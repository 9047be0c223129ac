"""What shards say of themselves, whatever device they are on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from luce.shard.local import LocalShard
from luce.shard.shard import ShardInfo


def tell_shares_prompts(monkeypatch: pytest.MonkeyPatch, *, shares: bool) -> None:
    """Let shards of this process say whether short prompts may share a step. CPUs could, but would not gain from it."""
    infos: dict[int, ShardInfo] = {}

    def write(shard: LocalShard, info: ShardInfo) -> None:
        infos[id(shard)] = ShardInfo(tuple(replace(part, shares_prompts=shares) for part in info.devices))

    monkeypatch.setattr(LocalShard, "info", property(lambda shard: infos[id(shard)], write), raising=False)
