"""The drafter that settings name, in this process or in a daemon."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from luce.backend.shard import Shard
from luce.config import Config
from luce.draft.drafter import Drafter
from luce.draft.ends import Ends
from luce.draft.ngram import NgramDrafter
from luce.draft.recipe import Recipe, Target, read_recipe
from luce.draft.remote import RemoteDrafter
from luce.draft.resident import ResidentDrafter
from luce.errors import UsageError
from luce.gguf.reader import GGUFFile
from luce.layers.features import FeatureRing
from luce.models.spec import ModelSpec
from luce.ops.deltanet import RECURRENT_ROWS
from luce.remote.device import RemoteDevice
from luce.remote.open import open_draft_daemon
from luce.runtime.device import Device, DeviceName
from luce.runtime.host import HostDevice
from luce.runtime.open import named, open_device


@dataclass(frozen=True)
class Prepared:
    """A drafter that is still without its target.

    ring  where the target leaves what the drafter reads of it, None if that is nothing
    open  the drafter, for the target's first and last shard; whoever calls it closes the drafter
    """

    ring: FeatureRing | None
    open: Callable[[Shard, Shard], Drafter]


def verified_rows(config: Config) -> int:
    """Most rows of a sequence that are verified at once, 0 if nothing is drafted."""
    return (config.verify_width or RECURRENT_ROWS) if config.draft else 0


def open_drafter(
    opened: contextlib.ExitStack,
    config: Config,
    file: GGUFFile,
    spec: ModelSpec,
    devices: Sequence[Device],
    *,
    context: int,
) -> Prepared | None:
    """What --draft names for a target of `context` positions on `devices`; None if nothing is to be drafted.

    `opened` closes files and devices that only the drafter has; a daemon loads while the caller goes on. Raises
    UsageError, and ModelError or DeviceError naming the file or the device that cannot be used.
    """
    if not config.draft:
        return None
    if config.draft == "ngram":
        ngram = NgramDrafter(block=verified_rows(config) - 1 or 1)
        return Prepared(None, lambda first, last: ngram)
    target = Target(file, spec, config.parallel, min(context, config.draft_ctx_max))
    recipe = read_recipe(opened, target, config.draft, config.draft_swa)
    device = _device(opened, config, devices)
    if isinstance(device, RemoteDevice):
        return _in_daemon(config, target, recipe, device)
    ring = target.ring(device, recipe.layers) if recipe.layers else None

    def open(first: Shard, last: Shard) -> Drafter:
        ends = Ends(device, first, last)
        keep = config.draft_residency != "request-scoped"
        return ResidentDrafter(
            lambda: recipe.make(device, ring, ends), keep=keep, block=recipe.block, facts=recipe.facts
        )

    return Prepared(ring, open)


def _in_daemon(config: Config, target: Target, recipe: Recipe, device: RemoteDevice) -> Prepared:
    # Here the rings of all slots outlive the daemon.
    ring = target.ring(HostDevice(), recipe.layers) if recipe.layers else None
    keep = config.draft_residency != "request-scoped"
    drafter = RemoteDrafter(device, target, recipe, ring, window=config.draft_swa, keep=keep)

    def open(first: Shard, last: Shard) -> Drafter:
        drafter.wait_loaded()
        return drafter

    return Prepared(ring, open)


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
    return opened.enter_context(contextlib.closing(open_device(name)))


def _name(config: Config, devices: Sequence[Device]) -> DeviceName:
    if config.draft_device != "auto":
        (name, *more) = named([config.draft_device])
        if more:
            raise UsageError(f"--draft-device {config.draft_device}: expected one device", param="draft_device")
        return name
    # Beside the head, which every proposal passes, if that is in this process; then on this machine.
    own = [device for device in devices if not device.shared] or [device for device in devices if not device.name.place]
    return own[-1].name if own else named(["cpu:0"])[0]
