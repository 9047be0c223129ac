"""The plan of `--dry-run` and of `luce inspect` against what a load takes: figures, and bytes that devices count."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import luce
import luce.assembly
import luce.cli.plan
from luce.cli.main import main
from luce.config.settings import Config
from luce.errors import OutOfMemoryError
from luce.runtime.device import Device, DeviceName, Memory
from luce.runtime.host import HostDevice
from luce.runtime.step import PAGE
from tests.support.daemons import HERE
from tests.support.drafts import DraftReference
from tests.support.emulated import EmulatedDevice
from tests.support.reference import Reference

FIT = DraftReference("qwen35-a-draft-fit-F32")
HYBRID, SHARING, MTP = FIT.target, Reference("gemma4-e-Q4_0"), Reference("qwen35-b-Q4_K_M")
MODEL = str(Reference("qwen35-a-Q8_0").path)
#: what is on a device beside the plan: tables of angles, a few words of each layer
_SMALL = 4096
MEMORY = 1 << 30

#: settings that change what is taken
SETTINGS: list[tuple[Reference, dict[str, Any]]] = [
    (HYBRID, {}),
    (HYBRID, {"parallel": 3, "max_ctx": 1999, "cache_type_k": "q8_0", "cache_type_v": "f16"}),
    (HYBRID, {"draft": "ngram", "verify_width": 3}),
    (HYBRID, {"draft": str(FIT.path)}),
    (HYBRID, {"draft": str(FIT.path), "ddtree": True}),
    (HYBRID, {"draft": str(FIT.path), "ddtree": True, "ddtree_budget": 30, "parallel": 2, "verify_width": 9}),
    (HYBRID, {"draft": str(FIT.path), "kvflash": "512", "parallel": 2}),
    (HYBRID, {"draft": MODEL, "kvflash": "auto:768", "draft_ctx_max": 100}),
    (HYBRID, {"draft": "ngram", "kvflash": "700", "kvflash_policy": "lru"}),
    (MTP, {"draft": "mtp", "kvflash": "512"}),
    (SHARING, {"kvflash": "512", "draft": "ngram", "parallel": 2}),
    (SHARING, {"target_layer_split": "4,1,3"}),
]


#: beside --draft MODEL on the same device, and on another one
SMALL_MODELS = {
    "shared": {"prefill_drafter": MODEL},
    "alone": {"prefill_drafter": MODEL, "draft_device": "cpu:7"},
}


class Gpu(EmulatedDevice):
    """A GPU whose memory becomes less by what is allocated."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.name = DeviceName("cuda", index)

    @property
    def allocated(self) -> int:
        return int(self.describe()["allocated"])

    def memory(self) -> Memory:
        return Memory(MEMORY - self._used, MEMORY)


def planned(capsys: pytest.CaptureFixture[str], path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What `luce run --dry-run` prints; `luce inspect` says the same."""
    flags = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in settings.items()]
    told = []
    for command in (["run", str(path), "--dry-run"], ["inspect", str(path)]):
        assert main([*command, "--json", *(flag for flag in flags if takes(command[0], flag))]) == 0
        told.append(json.loads(capsys.readouterr().out))
    facts: dict[str, Any] = told[0]
    figures = ("device", "layers", "weights", "state", "buffers", "activation_bytes_per_token", "kv_per_token")
    if "kvflash_policy" not in settings:
        for shard, other in zip(facts["plan"], told[1]["plan"], strict=True):
            assert [shard[name] for name in figures] == [other[name] for name in figures]
    return facts


def takes(verb: str, flag: str) -> bool:
    return verb == "run" or not flag.startswith("--kvflash-policy")


def as_loaded(facts: dict[str, Any], model: luce.Model) -> None:
    """Fails unless the model has what the plan says."""
    figures = ("device", "layers", "weights", "state", "activation_bytes_per_token")
    loaded = model.placement
    assert [[s[n] for n in figures] for s in loaded] == [[s[n] for n in figures] for s in facts["plan"]]
    assert all(s["unpacked"] <= p["unpacked_at_most"] for s, p in zip(loaded, facts["plan"], strict=True))
    paging = model.engine.stats().paging
    resident = None if paging is None else paging.max_resident_pages * PAGE
    assert facts.get("kvflash", {"max_resident_tokens": None})["max_resident_tokens"] == resident
    if "draft" in facts:
        stats = model.engine.stats().draft
        assert stats is not None
        assert stats.facts["kind"] == facts["draft"]["kind"]
        for name in ("weights", "state", "features", "head"):
            assert stats.facts[f"{name}_bytes"] == facts["draft"][name]
    assert (facts["served"]["context"], facts["fits"]) == (model.context, True)


@pytest.mark.parametrize(("reference", "settings"), SETTINGS, ids=str)
@pytest.mark.parametrize("prompt_weights", ["auto", "packed"])
def test_gpus_have_what_was_planned(
    reference: Reference,
    settings: dict[str, Any],
    prompt_weights: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    opened: list[Gpu] = []

    def open_placement(config: Config, *connects: object) -> Sequence[Device]:
        opened[:] = [Gpu(index) for index in range(3)]
        return list(opened)

    for module in (luce.assembly, luce.cli.plan):
        monkeypatch.setattr(module, "open_placement", open_placement)
    given = {"target_devices": "cuda:0,cuda:1,cuda:2", "max_ctx": 1000, "prompt_weights": prompt_weights, **settings}
    facts = planned(capsys, reference.path, given)
    with luce.load(reference.path, **given) as model:
        as_loaded(facts, model)
        for gpu, shard, part in zip(opened, facts["plan"], model.placement, strict=True):
            needed = shard["weights"] + shard["state"] + shard["buffers"] + part["unpacked"]
            if facts.get("draft", {}).get("device") == shard["device"]:
                needed += sum(facts["draft"][name] for name in ("weights", "state", "features", "head"))
            assert 0 <= gpu.allocated - needed <= _SMALL


def test_weights_that_small_models_share_are_planned_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(HostDevice, "memory", lambda self: Memory(MEMORY, MEMORY))
    given = {"target_devices": "cpu:0", "max_ctx": 1000, "draft": MODEL}
    facts = {}
    for name, more in SMALL_MODELS.items():
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in (given | more).items()]
        assert main(["run", str(HYBRID.path), "--dry-run", "--json", *flags]) == 0
        facts[name] = json.loads(capsys.readouterr().out)
    alone, shared = facts["alone"]["prefill_drafter"], facts["shared"]["prefill_drafter"]
    assert shared["bytes"] + shared["shared_weights"] == alone["bytes"] and "shared_weights" not in alone
    # The layers have as much more room.
    free = [facts[name]["plan"][0]["free"] for name in ("shared", "alone")]
    assert free[0] - free[1] == shared["shared_weights"]
    with luce.load(HYBRID.path, **(given | SMALL_MODELS["shared"])) as model:
        assert model.compression.compressor is not None
        assert model.compression.compressor.facts["bytes"] == shared["bytes"]


def test_a_small_model_is_parked_where_only_so_the_layers_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"target_devices": "cpu:0", "cpu_weights": "float32", "max_ctx": 1000, "prefill_drafter": MODEL}

    def facts(memory: int, **more: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(HostDevice, "memory", lambda self: Memory(memory, memory))
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in (given | more).items()]
        status = main(["run", str(HYBRID.path), "--dry-run", "--json", *flags])
        return status, json.loads(capsys.readouterr().out)

    status, wide = facts(MEMORY)
    shard, scorer = wide["plan"][0], wide["prefill_drafter"]
    assert status == 0 and "weights" not in scorer
    needed = shard["weights"] + shard["state"] + shard["buffers"] + scorer["bytes"]
    # 6 % of the free memory stay free.
    short = int(needed / 0.94) - 10_000
    status, narrow = facts(short)
    assert status == 0 and narrow["prefill_drafter"]["weights"] == "parked"
    saved = scorer["bytes"] - narrow["prefill_drafter"]["bytes"]
    assert 10_000 < saved < scorer["bytes"]
    assert facts(short, draft_residency="persistent")[0] != 0
    assert facts(int((needed - saved) / 0.94) - 10_000)[0] != 0
    with pytest.raises(OutOfMemoryError, match=r"need \d+ bytes .* \d+ are free beside \d+ for the draft"):
        luce.load(HYBRID.path, **given)
    monkeypatch.setattr(HostDevice, "memory", lambda self: Memory(short, short))
    with luce.load(HYBRID.path, **given) as model:
        assert model.compression.compressor is not None
        assert model.compression.compressor.facts["weights"] == "parked"


@pytest.mark.parametrize(("reference", "settings"), SETTINGS, ids=str)
def test_the_host_has_what_was_planned(
    reference: Reference,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(HostDevice, "memory", lambda self: Memory(MEMORY, MEMORY))
    given = {"target_devices": "cpu:0,cpu:1,cpu:2", "max_ctx": 1000, **settings}
    facts = planned(capsys, reference.path, given)
    with luce.load(reference.path, **given) as model:
        as_loaded(facts, model)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_shard_ipc_bin": str(HERE), "draft": str(FIT.path), "ddtree": True},
        {"target_shard_ipc_bin": str(HERE), "isolate_shards": True, "draft": MODEL, "kvflash": "512", "parallel": 2},
        {"draft": str(FIT.path), "draft_ipc_bin": str(HERE), "kvflash": "512"},
    ],
    ids=str,
)
def test_daemons_have_what_was_planned(settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    # By shares, as what is free changes meanwhile.
    given = {"target_devices": "cpu:0,cpu:1,cpu:2", "target_layer_split": "3,2,3", "max_ctx": 1000, **settings}
    facts = planned(capsys, HYBRID.path, given)
    with luce.load(HYBRID.path, **given) as model:
        as_loaded(facts, model)


@pytest.mark.parametrize("kvflash", [[], ["--kvflash", "512"]])
def test_layers_add_up_to_shards(kvflash: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--devices", "cpu:0,cpu:1", "--max-ctx", "1000", "--draft", "ngram", *kvflash]
    assert main(["inspect", str(HYBRID.path), "--json", *flags]) == 0
    facts = json.loads(capsys.readouterr().out)
    for name in ("kv_per_token", "state_per_sequence"):
        layers = sum(layer[name] for layer in facts["per_layer"])
        assert layers == sum(shard[name] for shard in facts["plan"]) == facts[name] > 0


def test_a_list_of_one_is_one_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostDevice, "memory", lambda self: Memory(MEMORY, MEMORY))
    shown = []
    for flag in ("--target-device", "--target-devices"):
        assert main(["run", str(HYBRID.path), "--dry-run", "--json", flag, "cpu:4"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and json.loads(shown[0])["plan"][0]["device"] == "cpu:4"


@pytest.mark.parametrize("flags", [["--target-device", "cpu:0"], ["--target-devices", "cpu:0,cpu:1"]])
def test_what_does_not_fit_ends_a_start_as_it_ends_a_dry_run(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostDevice, "memory", lambda self: Memory(4 * 10**6, 10**9))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    for more in (["--dry-run"], []):
        assert main(["run", str(HYBRID.path), "hi", *flags, *more]) == 3
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("luce: shard 0 (cpu:0): layers 0..") and "--max-ctx" in error
