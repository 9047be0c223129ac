"""Weights that small models share: by file and device, and only while somebody holds them."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

import luce
from luce.gguf.reader import GGUFFile, open_gguf
from luce.layers import weights
from luce.layers.weight_pool import WeightPool
from luce.layers.weights import WeightLoader
from luce.ops.weight import RawTensor, Weight
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support.drafts import DraftReference
from tests.support.reference import Reference

SMALL = Reference("qwen3-a-F32")
SETTINGS: dict[str, Any] = {"target_devices": "cpu:0", "max_ctx": 512, "kv_cache_dir": "off"}
QUERIES = "blk.0.attn_q.weight"
TARGET, MODEL = DraftReference("qwen35-a-draft-fit-F32").target, Reference("qwen35-a-Q8_0")


def queries(file: GGUFFile, device: Device, pool: WeightPool | None) -> Weight:
    cols, rows = file.tensors[QUERIES].shape
    return WeightLoader(file, device, pool).matrix([QUERIES], cols, [rows])


def test_who_shares() -> None:
    pool = WeightPool()
    with open_gguf(SMALL.path) as file, open_gguf(SMALL.path) as again, open_gguf(TARGET.path) as other:
        held = queries(file, HostDevice(), pool)
        assert queries(again, HostDevice(), pool) is held
        assert queries(file, HostDevice(1), pool) is not held and queries(file, HostDevice(), None) is not held
        table = WeightLoader(file, HostDevice(), pool).table("token_embd.weight", SMALL.spec.hidden, SMALL.spec.vocab)
        same = WeightLoader(again, HostDevice(), pool).table("token_embd.weight", SMALL.spec.hidden, SMALL.spec.vocab)
        assert same is table
        wide = WeightLoader(other, HostDevice(), pool).table("token_embd.weight", TARGET.spec.hidden, TARGET.spec.vocab)
        assert wide is not table


def test_weights_go_with_the_last_who_holds_them() -> None:
    pool, loads = WeightPool(), []

    def load() -> Weight:
        loads.append(1)
        return Weight(1, 1, ())

    one = pool.weight(("a",), HostDevice(), load)
    other = pool.weight(("a",), HostDevice(), load)
    del one
    assert pool.weight(("a",), HostDevice(), load) is other and len(loads) == 1
    del other
    gc.collect()
    pool.weight(("a",), HostDevice(), load)
    assert len(loads) == 2


def test_others_get_a_weight_when_it_is_complete() -> None:
    done: list[str] = []

    class Queueing(HostDevice):
        def synchronize(self) -> None:
            done.append("synchronized")

    def load() -> Weight:
        done.append("queued")
        return Weight(1, 1, ())

    pool, device = WeightPool(), Queueing()
    held = [pool.weight(("a",), device, load) for _ in range(2)]
    assert done == ["queued", "synchronized"] and held[0] is held[1]


def test_the_memory_counts_with_the_first_plan() -> None:
    pool = WeightPool()
    with open_gguf(SMALL.path) as file, open_gguf(SMALL.path) as again, open_gguf(TARGET.path) as other:
        plans = [(file, HostDevice()), (again, HostDevice()), (file, HostDevice(1)), (other, HostDevice())]
        assert [pool.plan(*plan) for plan in plans] == [False, True, False, False]


class Remote(HostDevice):
    remote = True


def test_a_daemon_shares_nothing() -> None:
    pool = WeightPool()
    with open_gguf(SMALL.path) as file:
        assert not pool.plan(file, Remote()) and not pool.plan(file, HostDevice())


@pytest.mark.parametrize("residency", ["persistent", "request-scoped"])
def test_drafting_and_compression_give_what_they_give_alone(residency: str) -> None:
    prompt = TARGET.expected["prompt_long"].tolist() * 3
    settings: dict[str, Any] = {
        **SETTINGS,
        "prefill_drafter": str(MODEL.path),
        "prefill_compression": "always",
        "prefill_keep_ratio": "0.3",
        "draft_residency": residency,
    }
    facts, replies = [], []
    for draft in ("", str(MODEL.path)):
        with luce.load(TARGET.path, draft=draft, **settings) as model:
            assert model.compression.compressor is not None
            facts.append(dict(model.compression.compressor.facts))
            replies.append([token.id for token in model.generate(prompt, max_tokens=8, temperature=0, ignore_eos=True)])
    alone, shared = facts
    # What drafting keeps on the device is not parked.
    assert ("weights" in alone, "weights" in shared) == (residency == "request-scoped", False)
    if residency == "persistent":
        assert int(shared["shared_weights"]) + int(shared["bytes"]) == alone["bytes"]
    else:
        assert int(shared["bytes"]) < int(alone["bytes"]) < int(shared["shared_weights"]) + int(shared["bytes"])
    assert replies[0] == replies[1]


def test_the_second_user_uploads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded: Counter[tuple[str, ...]] = Counter()
    real = weights.upload_weight

    def counted(device: Device, tensors: Sequence[RawTensor]) -> Weight:
        uploaded[tuple(tensor.name for tensor in tensors)] += 1
        return real(device, tensors)

    monkeypatch.setattr(weights, "upload_weight", counted)
    counts = []
    for draft, drafter in (("", ""), (str(MODEL.path), ""), (str(MODEL.path), str(MODEL.path))):
        uploaded.clear()
        with luce.load(TARGET.path, draft=draft, prefill_drafter=drafter, **SETTINGS):
            counts.append(uploaded.total())
    assert counts[0] < counts[1] == counts[2]
