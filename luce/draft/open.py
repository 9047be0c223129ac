"""The drafter that settings name, in this process or in a daemon."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from luce.backend.placement import Claim, usable
from luce.config.settings import FIELDS, Config
from luce.draft.drafter import Drafter
from luce.draft.feature_tail import FeatureTails
from luce.draft.ngram import NgramDrafter
from luce.draft.on_demand import OnDemandDrafter
from luce.draft.remote import RemoteDrafter
from luce.draft.spec import DrafterSpec, Target, read_drafter
from luce.draft.target_head import TargetHead
from luce.errors import UsageError
from luce.gguf.reader import GGUFFile
from luce.ipc.device import is_remote
from luce.ipc.open import open_draft_daemon
from luce.layers.build import head_bytes
from luce.layers.features import FeatureRing
from luce.models.spec import ModelSpec
from luce.ops.deltanet import RECURRENT_ROWS
from luce.runtime.device import Device, DeviceName
from luce.runtime.host import HostDevice
from luce.runtime.open import named, open_all
from luce.runtime.step import MAX_TREE_ROWS
from luce.shard.shard import Shard


@dataclass(frozen=True)
class PreparedDrafter:
    """A drafter that is still without its target.

    ring    where the target leaves what the drafter reads of it, None if that is nothing
    open    the drafter, for the target's first and last shard; whoever calls it closes the drafter
    claims  what it is going to take of devices
    tails   what of the ring is kept with prefixes
    """

    ring: FeatureRing | None
    open: Callable[[Shard, Shard], Drafter]
    claims: Sequence[Claim] = ()
    tails: FeatureTails | None = None


@dataclass(frozen=True)
class DraftPlan:
    """A drafter with weights on its device, before anything of it is there. Sizes in bytes.

    Of `sizes`, weights and state are its own, features those of the ring, and ends the target's embedding and head,
    which a daemon needs as well. The ring of a daemon's drafter is in this machine's memory too.
    """

    target: Target
    spec: DrafterSpec
    device: Device

    @cached_property
    def sizes(self) -> dict[str, int]:
        """weights, state, features, ends."""
        weights, state = self.spec.bytes(self.device)
        ends = head_bytes(self.target.file, self.target.spec, self.device) if self.remote and self.spec.ends else 0
        return {"weights": weights, "state": state, "features": self._ring, "head": ends}

    @property
    def remote(self) -> bool:
        """Whether it is in a daemon."""
        return self.device.remote

    @property
    def _ring(self) -> int:
        return self.target.ring_bytes(self.spec.layers)

    def claims(self, *, allocated: bool = False) -> tuple[Claim, ...]:
        """What it is going to take of devices. `allocated`: its ring is there already, which a GPU's free memory shows
        and the host's does not before it is written to."""
        own, far = sum(self.sizes.values()), self.device.name.place
        if self.remote:
            here = Claim(HostDevice(), self._ring)
            return (here,) if far else (Claim(self.device, own), here)
        return (Claim(self.device, own - (self._ring if allocated and not self.device.host else 0)),)

    @property
    def free(self) -> int:
        """Bytes of the device that it may take now."""
        return usable(self.device)


def verified_rows(config: Config) -> int:
    """Most rows of a sequence that are verified at once, 0 if nothing is drafted."""
    return (config.verify_width or RECURRENT_ROWS) if config.draft else 0


def branch_pages(config: Config) -> int:
    """Pages of each group for branches of trees: two for each row of a step that may be a branch."""
    return 2 * (MAX_TREE_ROWS - 1) if config.ddtree else 0


def plan_drafter(
    opened: contextlib.ExitStack,
    config: Config,
    file: GGUFFile,
    spec: ModelSpec,
    devices: Sequence[Device],
    *,
    context: int,
) -> DraftPlan | None:
    """What --draft names for a target of `context` positions on `devices`; None if that has no weights.

    `opened` closes files and devices that only the drafter has. Raises UsageError, and ModelError or DeviceError naming
    the file or the device that cannot be used.
    """
    if config.draft in ("", "ngram"):
        return None
    target = Target(file, spec, config.parallel, min(context, config.draft_ctx_max))
    drafter_spec = read_drafter(opened, target, config.draft, config.draft_swa)
    if config.ddtree and not drafter_spec.trees:
        raise UsageError(f"--ddtree: {drafter_spec.path or config.draft} is no DFlash draft", param="ddtree")
    if not drafter_spec.layers and config.draft_feature_tail not in (0, FIELDS["draft_feature_tail"].default):
        raise UsageError(f"--draft-feature-tail: {drafter_spec.path} reads no features", param="draft_feature_tail")
    return DraftPlan(target, drafter_spec, _device(opened, config, devices))


def open_drafter(
    opened: contextlib.ExitStack,
    config: Config,
    file: GGUFFile,
    spec: ModelSpec,
    devices: Sequence[Device],
    *,
    context: int,
) -> PreparedDrafter | None:
    """The drafter for a target of `context` positions on `devices`; None if nothing is to be drafted. A daemon loads
    while the caller goes on. Otherwise as plan_drafter."""
    if config.draft == "ngram":
        ngram = NgramDrafter(block=verified_rows(config) - 1 or 1)
        return PreparedDrafter(None, lambda first, last: ngram)
    plan = plan_drafter(opened, config, file, spec, devices, context=context)
    if plan is None:
        return None
    drafter_spec, device, target = plan.spec, plan.device, plan.target
    keep = config.draft_residency != "request-scoped"
    facts = drafter_spec.facts | {f"{name}_bytes": size for name, size in plan.sizes.items()}
    if config.ddtree:
        facts |= {"ddtree_budget": min(config.ddtree_budget, MAX_TREE_ROWS - 1)}
    # Of a drafter in a daemon here too, where the rings of all slots outlive the daemon.
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

        return PreparedDrafter(ring, wait, claims, tails)

    def open(first: Shard, last: Shard) -> Drafter:
        ends = TargetHead(device, first.ends, last.ends)
        return OnDemandDrafter(
            lambda: drafter_spec.make(device, ring, ends), keep=keep, block=drafter_spec.block, facts=facts
        )

    return PreparedDrafter(ring, open, claims, tails)


def _device(opened: contextlib.ExitStack, config: Config, devices: Sequence[Device]) -> Device:
    """The device of --draft-device: one of the target's in this process, one that is opened for the drafter, or one in
    a daemon of its own."""
    name = _name(config, devices)
    daemon = open_draft_daemon(config, name, devices)
    if daemon is not None:
        return opened.enter_context(contextlib.closing(daemon))
    for device in devices:
        if device.name == name:
            return device
    here = [device.name for device in devices if not device.remote]
    (opening,) = open_all([name], "draft_device", beside=here)
    return opened.enter_context(contextlib.closing(opening))


def _name(config: Config, devices: Sequence[Device]) -> DeviceName:
    if config.draft_device != "auto":
        (name, *more) = named([config.draft_device])
        if more:
            raise UsageError(f"--draft-device {config.draft_device}: expected one device", param="draft_device")
        return name
    # Beside the head, which every proposal passes, if that is in this process; then on this machine.
    own = [device for device in devices if not device.remote] or [device for device in devices if not device.name.place]
    return own[-1].name if own else named(["cpu:0"])[0]
