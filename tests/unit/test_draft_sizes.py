"""Memory of drafters: the planned sizes are those of the load, plans reserve them, and inspect shows them."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import pytest

import luce
from luce.backend.placement import plan_shards
from luce.backend.serving_options import Claim, ServingOptions
from luce.cli.main import main
from luce.config.resolve import resolve
from luce.draft.dflash.drafter import DFlashDrafter
from luce.draft.mtp import MTPDrafter
from luce.draft.open import DraftPlan, plan_drafter
from luce.draft.small_model import ModelDrafter
from luce.gguf.reader import open_gguf
from luce.layers.tensors import placed_bytes
from luce.ops.weight import stored_bytes
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from luce.server import props
from tests.support.daemons import HERE
from tests.support.drafts import DraftReference
from tests.support.proposals import loaded_drafter
from tests.support.reference import Reference
from tests.support.sized_device import GIB, Sized

FIT = DraftReference("qwen35-a-draft-fit-F32")
MTP = Reference("qwen35-b-Q4_K_M")
DRAFTS = [
    (FIT.target, str(FIT.path)),
    (FIT.target, str(DraftReference("qwen35-a-draft-Q8_0").path)),
    (FIT.target, str(DraftReference("qwen35-a-draft-var-F32").path)),
    (MTP, str(DraftReference("qwen35-b-draft-BF16").path)),
    (MTP, "mtp"),
    (FIT.target, str(Reference("qwen35-a-Q8_0").path)),
]


def planned(stack: ExitStack, reference: Reference, draft: str, devices: list[Device], **settings: Any) -> DraftPlan:
    file = stack.enter_context(open_gguf(reference.path))
    config = resolve({"draft": draft, "parallel": 2, "draft_ctx_max": 128, **settings}, env={})
    plan = plan_drafter(stack, config, file, reference.spec, devices, context=512)
    assert plan is not None
    return plan


@pytest.mark.parametrize(("reference", "draft"), DRAFTS)
def test_sizes_are_those_of_the_load(reference: Reference, draft: str) -> None:
    settings = {"parallel": 2, "draft_ctx_max": 128, "max_ctx": 512, "target_devices": "cpu:0"}
    with ExitStack() as stack, luce.load(reference.path, draft=draft, **settings) as model:
        sizes = planned(stack, reference, draft, [HostDevice()]).sizes
        drafter = loaded_drafter(model)
        stats = model.engine.stats().draft
        assert stats is not None
        assert stats.facts.items() >= {f"{name}_bytes": size for name, size in sizes.items()}.items()
        # No size has the name of another fact.
        assert props.speculative_props(stats, paths=True).items() >= stats.facts.items()
        assert isinstance(drafter, DFlashDrafter | MTPDrafter | ModelDrafter)
        taken = drafter.weights, drafter.state
        ring = None if isinstance(drafter, ModelDrafter) else drafter.window.ring
        assert (sizes["weights"], sizes["state"], sizes["head"]) == (*taken, 0)
        assert sizes["features"] == (0 if ring is None else ring.rows.nbytes)


def test_matrices_on_a_gpu_are_as_stored() -> None:
    with open_gguf(FIT.target.path) as file:
        infos = list(file.tensors.values())
        assert placed_bytes(infos, Sized("cuda:0", GIB)) == sum(map(stored_bytes, infos))


@pytest.mark.parametrize(
    ("devices", "device", "left"),
    [
        (("cuda:0", "cuda:1"), "auto", [0, 1]),
        (("cuda:0", "cuda:1"), "cuda:0", [1, 0]),
        (("cuda:0", "cuda:1"), "cpu:0", [0, 0]),
        (("cuda:0", "cpu:0"), "cpu:0", [0, 1]),
        (("cuda:0", "cpu:0"), "cpu:3", [0, 1]),
    ],
)
def test_plans_leave_room(devices: tuple[str, ...], device: str, left: list[int]) -> None:
    opened: list[Device] = [Sized(name, GIB) for name in devices]
    with ExitStack() as stack:
        plan = planned(stack, FIT.target, str(FIT.path), opened, draft_device=device)
        options: dict[str, Any] = {"layer_split": (1.0, 1.0), "slots": 2, "context": 512}
        before = plan_shards(plan.target.file, FIT.target.spec, opened, ServingOptions(**options))
        for allocated in (False, True):
            (claim,) = plan.claims(allocated=allocated)
            ring = 0 if claim.device.host or not allocated else plan.sizes["features"]
            assert claim.bytes == sum(plan.sizes.values()) - ring > 100_000
            after = plan_shards(plan.target.file, FIT.target.spec, opened, ServingOptions(**options, claims=(claim,)))
            assert [b.free - a.free for b, a in zip(before, after, strict=True)] == [n * claim.bytes for n in left]
            assert [shard.claimed for shard in after] == [n * claim.bytes for n in left]


def test_layers_move_to_where_the_draft_is_not() -> None:
    opened: list[Device] = [Sized("cuda:0", GIB), Sized("cuda:1", GIB)]
    with open_gguf(FIT.target.path) as file:
        even, shifted = (
            plan_shards(file, FIT.target.spec, opened, ServingOptions(context=64, claims=claims))
            for claims in ((), (Claim(opened[1], GIB - (80 << 20)),))
        )
    assert len(shifted[0].layers) > len(even[0].layers)


def test_in_a_daemon() -> None:
    with ExitStack() as stack:
        here = planned(stack, FIT.target, str(FIT.path), [HostDevice()])
        settings = {"draft_ipc_bin": str(HERE), "cpu_weights": "float32"}
        there = planned(stack, FIT.target, str(FIT.path), [HostDevice()], **settings)
        with open_gguf(FIT.target.path) as file:
            head = file.tensors["token_embd.weight" if FIT.target.spec.tied_head else "output.weight"]
            norm = file.tensors["output_norm.weight"]
        size = 4 * (head.rows * head.cols + norm.cols)
        assert there.sizes == {**here.sizes, "head": size}
        own, ring = there.claims()
        assert (own.bytes, ring.bytes) == (sum(there.sizes.values()), here.sizes["features"])


def test_the_plan_shows_the_draft(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--draft", str(FIT.path), "--target-device", "cpu:0", "--max-ctx", "512", "--draft-ctx-max", "128"]
    for command in (["inspect"], ["run", "--dry-run"]):
        name, *rest = command
        assert main([name, str(FIT.target.path), *rest, *flags, "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        with ExitStack() as stack:
            sizes = planned(stack, FIT.target, str(FIT.path), [HostDevice()], parallel=1).sizes
        draft = facts["draft"]
        assert {key: draft[key] for key in sizes} == sizes and draft["fits"] and facts["fits"]
        assert (draft["device"], draft["kind"], draft["file"]) == ("cpu:0", "dflash", str(FIT.path))
        assert facts["plan"][0]["activation_bytes_per_token"] == 2 * 3 * 64
    assert main(["inspect", str(FIT.target.path), *flags]) == 0
    assert "draft" in capsys.readouterr().out


def test_a_draft_that_does_not_fit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftPlan, "free", 1000)
    flags = ["--draft", str(FIT.path), "--target-device", "cpu:0", "--draft-device", "cpu:1", "--max-ctx", "512"]
    assert main(["run", str(FIT.target.path), "--dry-run", *flags]) == 3
    assert "luce: cpu:1: the draft needs" in capsys.readouterr().err
