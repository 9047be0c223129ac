"""Snapshots of every type of keys and values, in every placement."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.disk_models import ask, load, placed, saved
from tests.support.reference import Reference


@pytest.mark.parametrize(
    ("types", "placements"),
    [
        (("f16", "f16"), ("daemons", "one")),
        (("bf16", "bf16"), ("three", "one")),
        (("q8_0", "q4_0"), ("daemons", "three")),
    ],
    ids=["f16", "bf16", "q8_0-q4_0"],
)
@pytest.mark.parametrize(
    "name", ["qwen3-a-F32", "qwen35-a-F32", "qwen35moe-a-F32", "laguna-a-F32", "gemma4-e-F32", "gemma4-moe-F32"]
)
def test_stored_types(name: str, types: tuple[str, str], placements: tuple[str, ...], tmp_path: Path) -> None:
    reference = Reference(name)
    prompt = reference.expected["prompt_long"].tolist()
    kinds = dict(zip(("cache_type_k", "cache_type_v"), types, strict=True))
    with load(reference.path, tmp_path / "cache", **kinds) as model:
        expected = ask(model, prompt, 20)
    # What one shard of this process wrote, then what those of the first placement did.
    found = []
    for placement in placements:
        with placed(reference, tmp_path / "cache", placement, **kinds) as model:
            assert ask(model, prompt, 20) == (expected[0], saved(model, prompt), "disk")
            found.append(ask(model, prompt[::-1], 20))
    assert [tier for _, _, tier in found] == ["none", "disk"]
    assert found[0][0] == found[1][0]
    with load(reference.path, tmp_path / "cache") as model:
        assert ask(model, prompt, 20)[1:] == (0, "none")
        disk = model.engine.stats().cache.disk
        assert disk is not None
        k, v = types
        assert [other.reason for other in disk.unused] == [
            f"--cache-type-k is auto here and {k} there, --cache-type-v is auto here and {v} there"
        ]
