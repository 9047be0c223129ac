"""The drafters that --draft and its companion flags open, and the settings that they refuse."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import luce
from luce import assembly
from luce.backend.layersplit import LayerSplitBackend
from luce.backend.serving_options import Claim
from luce.config.resolve import resolve
from luce.draft.dflash.model import DFlashModel
from luce.draft.drafter import Draftable, Drafter
from luce.draft.ngram import NgramDrafter
from luce.draft.on_demand import OnDemandDrafter
from luce.draft.open import DraftPlan, PreparedDrafter, open_drafter
from luce.draft.spec import Target
from luce.errors import FormatError, LuceError, ModelError, OutOfMemoryError, UnsupportedError, UsageError
from luce.gguf.reader import open_gguf
from luce.layers.features import FeatureRing
from luce.runtime.device import Array, Device
from luce.runtime.host import HostDevice
from luce.runtime.step import Span
from tests.support.daemons import HERE, children
from tests.support.drafts import DRAFTS
from tests.support.made_drafts import MadeDraft
from tests.support.proposals import loaded_drafter
from tests.support.reference import Reference

FIT = DRAFTS / "qwen35-a-draft-fit-F32.gguf"
TARGET = Reference("qwen35-a-F32")


def prepare(
    stack: ExitStack,
    draft: str | Path,
    devices: list[Device] | None = None,
    reference: Reference = TARGET,
    **settings: Any,
) -> PreparedDrafter | None:
    file = stack.enter_context(open_gguf(reference.path))
    config = resolve({"draft": str(draft), "parallel": 2, **settings}, env={})
    return open_drafter(stack, config, file, reference.spec, devices or [HostDevice(0)], context=512)


@pytest.fixture
def stack() -> Any:
    with ExitStack() as stack:
        yield stack


def test_nothing(stack: ExitStack) -> None:
    assert prepare(stack, "") is None


def test_prompt_lookup(stack: ExitStack) -> None:
    prepared = prepare(stack, "ngram")
    assert prepared is not None and prepared.ring is None


@pytest.mark.parametrize("draft", [FIT, DRAFTS / "qwen35-a-draft-hf", DRAFTS / "qwen35-a-draft-hf/model.safetensors"])
def test_a_draft_reads_the_layers_that_it_names(draft: Path, stack: ExitStack) -> None:
    prepared = prepare(stack, draft)
    assert prepared is not None and prepared.ring is not None
    assert prepared.ring.layers == ((0, 2, 5) if draft == FIT else (1, 3, 6))
    assert (prepared.ring.slots, prepared.ring.capacity, prepared.ring.hidden) == (2, 512, 64)


def test_the_cap_of_its_context(stack: ExitStack) -> None:
    prepared = prepare(stack, FIT, draft_ctx_max=128)
    assert prepared is not None and prepared.ring is not None and prepared.ring.capacity == 128


@pytest.mark.parametrize(("trained", "reach"), [(192, 192), (4096, 256)])
def test_it_sees_no_more_than_it_was_trained_with(trained: int, reach: int, tmp_path: Path) -> None:
    made = MadeDraft.random(0, hidden=64, vocab_size=768, dflash__mask_token_id=5, context_length=trained)
    path = made.write(tmp_path / "made.gguf")
    with luce.load(TARGET.path, target_devices="cpu:0", max_ctx=256, draft=str(path)) as model:
        assert loaded_drafter(model).context.reach == reach


@pytest.mark.parametrize(
    ("device", "takes"), [("cpu:0", (np.int32, 1)), ("cpu:1", (np.float32, 2)), ("cpu:2", (np.float32, 2))]
)
def test_it_embeds_where_the_target_does(device: str, takes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts, given, draft_block = set(), set(), DFlashModel.draft_block

    def recorded(model: DFlashModel, slots: Sequence[int], seeds: Array) -> Array:
        drafts.add(model)
        given.add((seeds.dtype.type, seeds.ndim))
        return draft_block(model, slots, seeds)

    monkeypatch.setattr(DFlashModel, "draft_block", recorded)
    fields = {"target_devices": "cpu:0,cpu:1", "max_ctx": 256, "draft": str(FIT), "draft_device": device}
    with luce.load(TARGET.path, **fields) as model:
        reply = model.generate(TARGET.expected["prompt_17"].tolist(), max_tokens=8, temperature=0, ignore_eos=True)
        assert [token.id for token in reply] == TARGET.expected["greedy_17"].tolist()[:8]
        assert given == {takes}
        loaded_drafter(model).close()
    # Its graphs would read a table that may be gone.
    assert [draft.embeds for draft in drafts] == [False]


def test_the_model_s_own_block(stack: ExitStack) -> None:
    prepared = prepare(stack, "mtp", reference=Reference("qwen35-b-Q4_K_M"))
    assert prepared is not None and prepared.ring is not None and prepared.ring.layers == (5,)
    with pytest.raises(ModelError, match=r"qwen35-a-F32.gguf: --draft mtp: has no layer"):
        prepare(stack, "mtp")


def test_devices(stack: ExitStack) -> None:
    devices: list[Device] = [HostDevice(0), HostDevice(1)]
    for name, index in (("auto", 1), ("cpu:0", 0), ("cpu:1", 1)):
        prepared = prepare(stack, FIT, devices, draft_device=name)
        assert prepared is not None and prepared.ring is not None and prepared.ring.device is devices[index]
    prepared = prepare(stack, FIT, devices, draft_device="cpu:3")
    assert prepared is not None and prepared.ring is not None and str(prepared.ring.device.name) == "cpu:3"
    with pytest.raises(UsageError, match=r"^--draft-device cuda:77: ") as caught:
        prepare(stack, FIT, devices, draft_device="cuda:77")
    assert (caught.value.param, caught.value.exit_code) == ("draft_device", 2)
    with pytest.raises(UsageError, match="network daemons require --shard-key-file"):
        prepare(stack, FIT, devices, draft_device="tcp://far:1/cpu:0")


def test_the_window_option(stack: ExitStack) -> None:
    with pytest.raises(UsageError, match=r"--draft-swa: .*qwen35-a-F32.gguf is not a DFlash draft"):
        prepare(stack, TARGET.path, draft_swa=64)
    with pytest.raises(UsageError, match=r"--ddtree: .*qwen35-a-F32.gguf is not a DFlash draft"):
        prepare(stack, TARGET.path, ddtree=True)


def test_a_tail_of_what_is_not_read(stack: ExitStack) -> None:
    with pytest.raises(UsageError, match=r"--draft-feature-tail: .*qwen35-a-F32.gguf reads no features"):
        prepare(stack, TARGET.path, draft_feature_tail=64)
    assert prepare(stack, TARGET.path, draft_feature_tail=0) is not None


@pytest.mark.parametrize(
    ("draft", "error", "message"),
    [
        ("nowhere.gguf", ModelError, "nowhere.gguf: No such file"),
        (str(Reference("gemma4-e-F32").path), ModelError, "has another vocabulary than"),
        (str(DRAFTS / "qwen35-b-draft-BF16.gguf"), ModelError, "this draft expects hidden size 256; the model has 64"),
    ],
)
def test_files_that_cannot_draft(draft: str, error: type[LuceError], message: str, stack: ExitStack) -> None:
    with pytest.raises(error, match=message):
        prepare(stack, draft)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 700}, "this draft expects a vocabulary of 700 tokens; the model has 768"),
        ({"dflash__target_layer_ids": [2, 8]}, "reads layer 8 of the model, which has 8 layers"),
        ({"dflash__mask_token_id": None}, "dflash.mask_token_id 248070 is not a token of the model"),
        ({"dflash__domino__enabled": 1}, "dflash.domino.vocab_size' is missing"),
        ({"rope__freq_base": None}, "rope.freq_base' is missing"),
    ],
)
def test_replies_go_on_without_a_refused_draft(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    draft = MadeDraft.random(0, hidden=64, **{"vocab_size": 768, "dflash__mask_token_id": 5, **changes})
    path = draft.write(tmp_path / "made.gguf")
    with ExitStack() as stack, pytest.raises((ModelError, FormatError, UnsupportedError), match=message):
        prepare(stack, path)
    state = undrafted(draft=str(path), ddtree=True)
    assert message in state and str(path) in state


def undrafted(**settings: Any) -> str:
    """The state of a drafter that is done without; replies are the expected ones."""
    with luce.load(TARGET.path, target_devices="cpu:0", max_ctx=256, **settings) as model:
        prompt = TARGET.expected["prompt_17"].tolist()
        reply = model.generate(prompt, max_tokens=16, temperature=0, ignore_eos=True)
        assert [token.id for token in reply] == TARGET.expected["greedy_17"][:16].tolist()
        stats = model.engine.stats().draft
    assert stats is not None and stats.state.startswith("refused: ") and not stats.steps
    return stats.state


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft": "nowhere.gguf"}, "nowhere.gguf: No such file"),
        ({"draft": "mtp"}, "--draft mtp: has no layer"),
    ],
)
def test_replies_go_on_without_a_missing_draft(
    settings: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert message in undrafted(**settings)
    assert "replies go on without drafting: " in caplog.text and message in caplog.text


@pytest.mark.parametrize("settings", [{}, {"draft_ipc_bin": str(HERE), "shard_start_timeout": 60.0}])
def test_layers_are_loaded_once_where_a_draft_is_refused_beside_them(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    made = assembly.open_backend

    def counted(*given: Any, **options: Any) -> LayerSplitBackend:
        loads.append(made(*given, **options))
        return loads[-1]

    monkeypatch.setattr(assembly, "open_backend", counted)
    draft = MadeDraft.random(0, hidden=64, vocab_size=768, dflash__mask_token_id=5)
    del draft.tensors["blk.1.ffn_up.weight"]
    path = str(draft.write(tmp_path / "made.gguf"))
    assert "tensor blk.1.ffn_up.weight is missing" in undrafted(draft=path, ddtree=True, **settings)
    assert len(loads) == 1
    assert not children()


@pytest.mark.parametrize("where", ["ring", "layers"])
def test_replies_go_on_without_a_draft_for_which_there_is_no_room(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> FeatureRing:
        raise OutOfMemoryError("cpu:0: 9 bytes asked")

    if where == "ring":
        monkeypatch.setattr(Target, "ring", full)
        assert "9 bytes asked" in undrafted(draft=str(FIT))
    else:
        monkeypatch.setattr(DraftPlan, "claims", lambda self, allocated: (Claim(self.device, 1 << 60),))
        assert f"0 are free beside {1 << 60} for the draft" in undrafted(draft=str(FIT))


def test_flags_that_are_wrong_end_the_start() -> None:
    for settings, message in (
        ({"draft": str(TARGET.path), "draft_swa": 9}, "--draft-swa: .* is not a DFlash draft"),
        ({"draft": str(TARGET.path), "ddtree": True}, "--ddtree: .* is not a DFlash draft"),
        ({"draft": str(TARGET.path), "draft_device": "cuda:77"}, "cuda:77"),
    ):
        with pytest.raises(UsageError, match=message):
            luce.load(TARGET.path, target_devices="cpu:0", max_ctx=256, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_residency": "request-scoped"}, "--draft-residency: requires --draft with a file or mtp"),
        ({"draft_device": "cpu:1", "draft": "ngram"}, "--draft-device: requires --draft with a file or mtp"),
        ({"draft_swa": 9}, "--draft-swa: requires --draft"),
        ({"verify_width": 4}, "--verify-width: requires --draft"),
        ({"ddtree": True}, "--ddtree: requires --draft with a DFlash draft"),
        ({"ddtree": True, "draft": "mtp"}, "--ddtree: requires --draft with a DFlash draft"),
        ({"ddtree_budget": 8, "draft": "x"}, "--ddtree-budget: requires --ddtree"),
        ({"ddtree_budget": 65, "ddtree": True, "draft": "x"}, "--ddtree-budget: expected"),
        ({"draft_residency": "sometimes", "draft": "x"}, "--draft-residency: expected auto or persistent"),
    ],
)
def test_options_that_would_do_nothing(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(settings, env={})


class Loads:
    """A maker of drafters, which counts."""

    def __init__(self, fail: int = 0) -> None:
        self.made = self.closed = 0
        self.fail = fail

    def __call__(self) -> Drafter:
        if self.fail:
            self.fail -= 1
            raise OutOfMemoryError("cpu:0: 9 bytes asked")
        self.made += 1
        drafter = NgramDrafter(block=3)
        drafter.close = self.close  # type: ignore[method-assign]
        return drafter

    def close(self) -> None:
        self.closed += 1


ASKED = [Draftable(0, np.array([1, 2, 3, 1, 2], np.int32), 2)]


def test_request_scoped() -> None:
    loads = Loads()
    drafter = OnDemandDrafter(loads, keep=False, block=3, facts={"file": "x"})
    assert (loads.made, loads.closed, drafter.describe()) == (1, 1, {"file": "x", "loaded": "no"})
    drafter.observe([Span(0, 0, 5, 0)])
    assert list(drafter.propose(ASKED)()[0].tokens) == [3, 1]
    assert (loads.made, loads.closed, drafter.describe()["loaded"]) == (2, 1, "yes")
    drafter.idle()
    drafter.idle()
    drafter.close()
    assert (loads.made, loads.closed) == (2, 2)


def test_persistent() -> None:
    loads = Loads()
    drafter = OnDemandDrafter(loads, keep=True, block=3)
    drafter.propose(ASKED)()
    drafter.idle()
    assert (loads.made, loads.closed) == (1, 0)
    drafter.close()
    drafter.close()
    assert (loads.made, loads.closed) == (1, 1)


def test_no_memory_at_first(caplog: pytest.LogCaptureFixture) -> None:
    loads = Loads(fail=2)
    drafter = OnDemandDrafter(loads, keep=True, block=3)
    assert "the draft is not loaded: cpu:0: 9 bytes asked" in caplog.text
    assert drafter.describe() == {"loaded": "no"}
    with pytest.raises(OutOfMemoryError):
        drafter.propose(ASKED)()
    assert list(drafter.propose(ASKED)()[0].tokens) == [3, 1]


def test_a_small_model_drafts(tmp_path: Path) -> None:
    # The target itself: whatever it proposes is right.
    expected = TARGET.expected["greedy_17"].tolist()
    settings = {"target_devices": "cpu:0", "max_ctx": 256, "draft": str(TARGET.path), "verify_width": 5}
    with luce.load(TARGET.path, **settings) as model:
        prompt = TARGET.expected["prompt_17"].tolist()
        reply = model.generate(prompt, max_tokens=32, temperature=0, ignore_eos=True)
        assert [token.id for token in reply] == expected
        stats = model.engine.stats().draft
    assert stats is not None and stats.state == "on"
    assert stats.facts["kind"] == "model" and stats.facts["file"] == str(TARGET.path)
    assert stats.accepted == stats.proposed > 15
