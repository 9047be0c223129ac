"""Drafting in predictions: what drafters compute, what their drafts brought servers, and what later plans count on."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import luce
from luce.backend.draft_load import DraftLoad
from luce.config.resolve import resolve
from luce.draft import observed_drafts
from luce.draft.observed_drafts import DraftObservation, draft_load, observed_path
from luce.draft.open import plan_drafter
from luce.gguf.reader import open_gguf
from luce.planner.draft_time import DraftWork
from luce.profiles.draft_cache import DRAFTS, ObservedDrafts
from luce.profiles.profile import DeviceProfile, FormatProfile, LinkProfile
from luce.profiles.profile_cache import profile_path
from luce.runtime.host import HostDevice
from tests.support.drafts import DraftReference, spec_of
from tests.support.reference import Reference

FIT = DraftReference("qwen35-a-draft-fit-F32")
MTP = Reference("qwen35-b-Q4_K_M")
SMALL = Reference("qwen35-a-Q8_0")
with open_gguf(FIT.path) as _file:
    _spec = spec_of(_file, FIT.path)
    BLOCK, LAYERS = _spec.block, len(_spec.layers)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def drafting(reference: Reference, draft: str, **settings: Any) -> tuple[DraftLoad | None, Path]:
    """What a plan takes for a draft, and the file with what it brought."""
    with ExitStack() as stack:
        file = stack.enter_context(open_gguf(reference.path))
        read = {} if draft in ("", "ngram") else {"draft_ctx_max": 128}
        config = resolve({"draft": draft, **read, **settings}, env={})
        plan = plan_drafter(stack, config, file, reference.spec, [HostDevice()], context=512)
        path = observed_path(config, file, None if plan is None else plan.spec)
        return draft_load(config, file, reference.spec, plan), path


def work_of(load: DraftLoad | None) -> DraftWork:
    assert load is not None
    assert load.on is not None
    return load.on.work


def test_without_a_draft_there_is_none() -> None:
    assert drafting(MTP, "")[0] is None


def test_until_it_is_measured_a_step_verifies_all_it_can() -> None:
    assert drafting(SMALL, "ngram")[0] == DraftLoad(16)
    assert drafting(SMALL, "ngram", verify_width=5)[0] == DraftLoad(5)
    for draft, settings, rows in (
        (str(SMALL.path), {}, 9),
        (str(SMALL.path), {"verify_width": 4}, 4),
        (str(FIT.path), {}, BLOCK),
        (str(FIT.path), {"ddtree": True, "ddtree_budget": 11}, 12),
    ):
        load, _ = drafting(FIT.target, draft, **settings)
        assert load is not None
        assert (load.rows, load.tokens) == (rows, None), draft


def test_a_model_computes_a_token_in_a_pass() -> None:
    work = work_of(drafting(FIT.target, str(SMALL.path))[0])
    assert (work.passes, work.rows, work.context, len(work.layers)) == (8, 1, 128, len(SMALL.spec.layers))
    with open_gguf(SMALL.path) as file:
        macs = sum(info.rows * info.cols for name, info in file.tensors.items() if name.startswith("blk."))
    assert sum(layer.macs for layer in work.layers) == macs
    assert work.head.macs == SMALL.spec.vocab * SMALL.spec.hidden
    assert work_of(drafting(FIT.target, str(SMALL.path), verify_width=3)[0]).passes == 2


def test_a_dflash_draft_computes_a_block_in_one_pass() -> None:
    load, _ = drafting(FIT.target, str(FIT.path))
    work = work_of(load)
    assert (work.passes, work.rows, len(work.layers)) == (1, BLOCK, LAYERS)
    assert work.head.macs == FIT.target.spec.vocab * FIT.target.spec.hidden
    with open_gguf(FIT.path) as file:
        own = [info for name, info in file.tensors.items() if name.startswith("blk.")]
        assert sum(layer.bytes for layer in work.layers) == sum(4 * info.rows * info.cols for info in own)
    assert load is not None
    assert load.on is not None
    assert {info.name for info in load.on.tensors} == {info.name for info in own}
    assert load.on.bytes > sum(layer.bytes for layer in work.layers)


def test_mtp_computes_its_layer_for_each_token() -> None:
    load, _ = drafting(MTP, "mtp")
    work = work_of(load)
    assert (work.passes, work.rows, len(work.layers)) == (4, 1, 1)
    with open_gguf(MTP.path) as file:
        own = [info for name, info in file.tensors.items() if name.startswith(f"blk.{len(MTP.spec.layers)}.")]
    assert load is not None
    assert load.on is not None
    assert {info.name for info in load.on.tensors} == {info.name for info in own}
    assert work.layers[0].macs == sum(info.rows * info.cols for info in own)
    assert work_of(drafting(MTP, "mtp", verify_width=3)[0]).passes == 2


def test_later_plans_count_on_what_was_measured() -> None:
    _, path = drafting(FIT.target, str(FIT.path))
    DRAFTS.write(path, ObservedDrafts(6.6, 3.25, 1000))
    load, _ = drafting(FIT.target, str(FIT.path))
    assert load is not None
    assert (load.rows, load.tokens) == (7, 3.25)
    # With other settings, another draft or another model other tokens are accepted.
    for reference, draft, settings in (
        (FIT.target, str(FIT.path), {"verify_width": 4}),
        (FIT.target, str(FIT.path), {"ddtree": True}),
        (FIT.target, str(SMALL.path), {}),
        (FIT.target, "ngram", {}),
    ):
        other, path = drafting(reference, draft, **settings)
        assert other is not None
        assert (other.tokens, path.exists()) == (None, False)


def test_means_are_stored_after_1000_steps_and_when_they_have_doubled() -> None:
    stored: list[ObservedDrafts] = []
    observation = DraftObservation(stored.append)
    rng = np.random.default_rng(1)
    drafted = rng.integers(0, 16, 4500)
    accepted = rng.integers(0, drafted + 1)
    for one, two in zip(drafted.tolist(), accepted.tolist(), strict=True):
        observation.add(one, two)
    assert [found.steps for found in stored] == [1000, 2000, 4000]
    for found in stored:
        newest = slice(found.steps - 1000, found.steps)
        assert found.rows == pytest.approx(1 + drafted[newest].mean())
        assert found.tokens == pytest.approx(1 + accepted[newest].mean())


@pytest.mark.parametrize(
    ("rows", "tokens"), [(4.0, 0.5), (4.0, 5.0), (0.5, 0.5), (1e9, 2.0), (4.0, float("nan")), (float("inf"), 2.0)]
)
def test_what_cannot_be_counts_as_absent(rows: float, tokens: float, caplog: pytest.LogCaptureFixture) -> None:
    path = DRAFTS.path(["a", 1])
    path.parent.mkdir(parents=True)
    content = f'{{"format":2,"measured":{time.time()},"figures":{{"rows":{rows},"tokens":{tokens},"steps":1}}}}'
    path.write_text(content)
    assert DRAFTS.read(path) is None
    assert "profile_invalid" in caplog.text


def test_what_is_old_or_of_another_format_counts_as_absent() -> None:
    path = DRAFTS.path(["a", 1])
    DRAFTS.write(path, ObservedDrafts(4.0, 2.0, 10))
    assert DRAFTS.read(path) == ObservedDrafts(4.0, 2.0, 10)
    for change in ({"measured": time.time() - 91 * 86400}, {"format": 1}):
        content = msgspec.json.decode(path.read_bytes()) | change
        other = path.with_suffix(".other")
        other.write_bytes(msgspec.json.encode(content))
        assert DRAFTS.read(other) is None


def test_a_server_measures_its_drafts_and_the_next_plan_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed_drafts, "STEPS", 5)
    figures = FormatProfile(1e9, {1: 1e9, 512: 1e10}, None, 0.1, False)
    settings: dict[str, Any] = {"max_ctx": 512, "kv_cache_dir": "off", "target_device": "cpu:0"}
    with luce.load(FIT.target.path, **settings) as model:
        path = profile_path(model.backend.shards[0].device)
        known = DeviceProfile(
            "cpu:0", "x", time.time(), 1e-5, 1e-9, LinkProfile(1e-6, 1e9), {"F32": figures}, recurrence=1e9
        )
    path.parent.mkdir(parents=True)
    path.write_bytes(msgspec.json.encode({"format": 3, "profile": known}))
    settings |= {"draft": str(FIT.path), "verify_width": 4}
    with luce.load(FIT.target.path, **settings) as model:
        assert model.plan is not None
        before = model.plan.facts
        prompt = FIT.target.expected["prompt_17"].tolist()
        list(model.generate(prompt, max_tokens=60, ignore_eos=True, temperature=0))
        stats = model.engine.stats().draft
    for thread in threading.enumerate():
        if thread.name == "luce-observed":
            thread.join()
    assert stats is not None
    assert stats.steps >= 5
    assert (before["draft"]["tokens_per_step"], before["draft"]["measured"]) == (1.0, False)
    assert before["draft"]["rows"] == 4
    with luce.load(FIT.target.path, **settings) as model:
        assert model.plan is not None
        facts = model.plan.facts
        assert facts["draft"]["measured"]
        tokens = facts["draft"]["tokens_per_step"]
        assert 1 <= tokens <= 4
        assert facts["draft"]["decode_s"] > 0
        step = model.plan.prediction.decode
        assert facts["decode_tok_s"] == pytest.approx(tokens / step)
        stages = sum(stage["decode_s"] for stage in facts["stages"])
        assert step == pytest.approx(stages + facts["draft"]["decode_s"] + 2e-6)
