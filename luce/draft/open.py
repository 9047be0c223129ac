"""Opens the drafter that the settings name, in this process or in a daemon."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from luce.backend.placement import usable_bytes
from luce.backend.serving_options import Claim
from luce.config.settings import FIELDS, Config
from luce.draft.drafter import Drafter
from luce.draft.feature_tail import FeatureTails
from luce.draft.messages import Response
from luce.draft.ngram import NgramDrafter
from luce.draft.on_demand import OnDemandDrafter
from luce.draft.remote import RemoteDrafter
from luce.draft.spec import DrafterSpec, Target, read_drafter
from luce.draft.target_head import TargetHead
from luce.errors import UsageError
from luce.gguf.reader import GGUFFile
from luce.layers.features import FeatureRing
from luce.layers.tensors import head_bytes
from luce.layers.weight_pool import WeightPool
from luce.models.spec import ModelSpec
from luce.ops.deltanet import RECURRENT_ROWS
from luce.remote.device import is_remote
from luce.remote.open import open_draft_daemon
from luce.runtime.device import Device, DeviceName
from luce.runtime.host import HostDevice
from luce.runtime.open import named, open_all
from luce.runtime.step import MAX_TREE_ROWS
from luce.shard.shard import Shard


@dataclass(frozen=True)
class PreparedDrafter:
    """A drafter before its target is loaded."""

    #: the target writes its features here; None if the drafter reads none
    ring: FeatureRing | None
    #: opens the drafter, from the target's first and last shard; the caller closes it
    open: Callable[[Shard, Shard], Drafter]
    #: memory that the drafter is going to take
    claims: Sequence[Claim] = ()
    #: saves the features before checkpoints; None if the drafter reads none
    tails: FeatureTails | None = None
    #: None for a drafter without weights
    spec: DrafterSpec | None = None


@dataclass(frozen=True)
class DraftPlan:
    """A drafter with weights and its device, before it is loaded."""

    target: Target
    spec: DrafterSpec
    device: Device

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes on its device: `weights` and `state` (its context), `features` (the ring), and `head`: the target's
        embedding and head, which a daemon loads itself. A daemon's ring has a copy in this process's host memory.
        """
        weights, state = self.spec.bytes(self.device)
        copied = self.remote and self.spec.borrows_head
        head = head_bytes(self.target.file, self.target.spec, self.device) if copied else 0
        return {"weights": weights, "state": state, "features": self._ring, "head": head}

    @property
    def remote(self) -> bool:
        """Whether the drafter runs in a daemon."""
        return self.device.remote

    @property
    def _ring(self) -> int:
        return self.target.ring_bytes(self.spec.layers)

    def claims(self, *, allocated: bool = False) -> tuple[Claim, ...]:
        """Memory that the drafter is going to take.

        `allocated`: its ring is allocated already, which lowers a GPU's free memory now, but the host's only once the
        ring is written to.
        """
        own, elsewhere = sum(self.sizes.values()), self.device.name.place
        if self.remote:
            here = Claim(HostDevice(), self._ring)
            return (here,) if elsewhere else (Claim(self.device, own), here)
        return (Claim(self.device, own - (self._ring if allocated and not self.device.host else 0)),)

    @property
    def free(self) -> int:
        """Free memory of the device in bytes."""
        return usable_bytes(self.device)


def verified_rows(config: Config, spec: ModelSpec) -> int:
    """Most rows of a sequence in one verification, 0 without any.

    Without --draft, grammars still force tokens. Verifying them costs no memory, except in recurrent states: half as
    much again as they take otherwise.
    """
    return 0 if spec.recurrent and not config.draft else config.verify_width or RECURRENT_ROWS


def branch_pages(config: Config) -> int:
    """Pages of each group for branches of trees: two for each row of a step that can be a branch."""
    return 2 * (MAX_TREE_ROWS - 1) if config.ddtree else 0


def plan_drafter(
    opened: contextlib.ExitStack,
    config: Config,
    file: GGUFFile,
    spec: ModelSpec,
    devices: Sequence[Device],
    *,
    context: int,
    weights: WeightPool | None = None,
) -> DraftPlan | None:
    """The drafter of --draft for a target of `context` positions on `devices`; None if it has no weights.

    `opened` closes files and devices that only the drafter uses. `weights`: those of small models.
    Raises UsageError, and ModelError or DeviceError naming the file or the device that cannot be used.
    """
    if config.draft in ("", "ngram"):
        return None
    target = Target(file, spec, config.parallel, min(context, config.draft_ctx_max), weights)
    drafter_spec = read_drafter(opened, target, config.draft, config.draft_swa)
    if config.ddtree and not drafter_spec.trees:
        raise UsageError(f"--ddtree: {drafter_spec.path or config.draft} is not a DFlash draft", param="ddtree")
    if not drafter_spec.layers and config.draft_feature_tail not in (0, FIELDS["draft_feature_tail"].default):
        raise UsageError(f"--draft-feature-tail: {drafter_spec.path} reads no features", param="draft_feature_tail")
    device = _device(opened, config, devices)
    if weights is not None and drafter_spec.shared is not None:
        weights.plan(drafter_spec.shared, device)
    return DraftPlan(target, drafter_spec, device)


def open_drafter(
    opened: contextlib.ExitStack,
    config: Config,
    file: GGUFFile,
    spec: ModelSpec,
    devices: Sequence[Device],
    *,
    context: int,
    weights: WeightPool | None = None,
) -> PreparedDrafter | None:
    """The drafter for a target of `context` positions on `devices`; None without --draft. A daemon loads it while the
    caller continues. Otherwise as plan_drafter."""
    if config.draft == "ngram":
        ngram = NgramDrafter(block=verified_rows(config, spec) - 1 or 1)
        return PreparedDrafter(None, lambda first, last: ngram)
    plan = plan_drafter(opened, config, file, spec, devices, context=context, weights=weights)
    if plan is None:
        return None
    drafter_spec, device, target = plan.spec, plan.device, plan.target
    keep = config.draft_residency != "request-scoped"
    facts = drafter_spec.facts | {f"{name}_bytes": size for name, size in plan.sizes.items()}
    if config.ddtree:
        facts |= {"ddtree_budget": min(config.ddtree_budget, MAX_TREE_ROWS - 1)}
    # With a drafter in a daemon the ring is on this host too: it outlives the daemon.
    ring = target.ring(HostDevice() if plan.remote else device, drafter_spec.layers) if drafter_spec.layers else None
    claims = plan.claims(allocated=True)
    tails = None if ring is None else FeatureTails(ring, config.draft_feature_tail)
    if is_remote(device):
        remote = RemoteDrafter(device, target, drafter_spec, ring, window=config.draft_swa, keep=keep, facts=facts)

        def wait(first: Shard, last: Shard) -> Drafter:
            try:
                remote.wait_loaded()
            except BaseException:
                remote.close()
                raise
            return remote

        return PreparedDrafter(ring, wait, claims, tails, drafter_spec)

    def open(first: Shard, last: Shard) -> Drafter:
        head = TargetHead(device, first.ends, last.ends)
        return OnDemandDrafter(
            lambda: drafter_spec.make(device, ring, head), keep=keep, block=drafter_spec.block, facts=facts
        )

    return PreparedDrafter(ring, open, claims, tails, drafter_spec)


def _device(opened: contextlib.ExitStack, config: Config, devices: Sequence[Device]) -> Device:
    """The device of --draft-device: one of the target's in this process, one opened for the drafter, or one in a daemon
    of its own."""
    name = _name(config, devices)
    daemon = open_draft_daemon(config, name, devices, Response)
    if daemon is not None:
        return opened.enter_context(contextlib.closing(daemon))
    for device in devices:
        if device.name == name:
            return device
    here = [device.name for device in devices if not device.remote]
    (opening,) = open_all([name], "draft_device", config.cpu_weights, beside=here)
    return opened.enter_context(contextlib.closing(opening))


def _name(config: Config, devices: Sequence[Device]) -> DeviceName:
    if config.draft_device != "auto":
        (name, *more) = named([config.draft_device])
        if more:
            raise UsageError(f"--draft-device {config.draft_device}: expected one device", param="draft_device")
        return name
    # The target's head computes every proposal, so its device comes first if it is in this process; otherwise the last
    # device of this machine.
    own = [device for device in devices if not device.remote] or [device for device in devices if not device.name.place]
    return own[-1].name if own else named(["cpu:0"])[0]
