"""The settings of daemons: what they mean, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from luce.config.resolve import resolve
from luce.errors import UsageError

GOOD = [
    ("target_shard_ipc_bin", "/opt/rocm-env", (("", Path("/opt/rocm-env")),)),
    ("target_shard_ipc_bin", "hip=/a,cuda=/b", (("hip", Path("/a")), ("cuda", Path("/b")))),
    ("shard_env", ["hip:A=1", "cuda:B="], ("hip:A=1", "cuda:B=")),
    ("shard_env", "hip:A=1,2,hip:B=x=y", ("hip:A=1,2", "hip:B=x=y")),
    ("isolate_shards", "true", True),
    ("shard_transport", "stream", "stream"),
    ("shard_activations", "bf16", "bf16"),
]
BAD = [
    ("target_shard_ipc_bin", "hip=/a,hip=/b"),
    ("target_shard_ipc_bin", "vulkan=/a"),
    ("target_shard_ipc_bin", "hip="),
    ("target_shard_ipc_bin", "hip=/a,/b"),
    ("shard_env", "A=1"),
    ("shard_env", "vulkan:A=1"),
    ("shard_env", "hip:1A=1"),
    ("shard_env", "hip:A"),
    ("shard_transport", "pigeon"),
    ("shard_activations", "f8"),
    ("shard_timeout", "0"),
    ("shard_start_timeout", "-1"),
]


@pytest.mark.parametrize(("name", "given", "expected"), GOOD)
def test_values(name: str, given: Any, expected: Any) -> None:
    assert getattr(resolve({name: given}, env={}), name) == expected


@pytest.mark.parametrize(("name", "given"), BAD)
def test_refusals(name: str, given: str) -> None:
    with pytest.raises(UsageError, match="--" + name.replace("_", "-")) as caught:
        resolve({name: given}, env={})
    assert caught.value.param == name
