"""What `luce cluster status`, GET /cluster and the metrics show: members with their devices, and the placement."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from luce.cluster.link import Link
from luce.cluster.membership import Member
from luce.cluster.wire import DeviceMemory, MemberStatus, PlanStatus
from luce.remote.device import MEMBER


class Gain(Protocol):
    """How much faster a placement with a member's devices would be, each 0.15 for 15 %."""

    @property
    def decode(self) -> float:
        """By tokens per second of a reply."""

    @property
    def prompt(self) -> float:
        """By tokens per second of a prompt."""


@dataclass(frozen=True)
class ModelFacts:
    """What the server knows of its loaded model. Devices have their full names, as member://box/cuda:0."""

    plan: PlanStatus
    #: of devices with layers, at the last measurement
    memory: Mapping[str, DeviceMemory] = field(default_factory=dict)
    #: bytes per second of an activation's way to a device of a member, where it was measured
    bandwidths: Mapping[str, float] = field(default_factory=dict)
    #: what members without layers would bring, where that is known
    gains: Mapping[str, Gain] = field(default_factory=dict)
    #: members without layers that a new placement would measure
    unmeasured: Collection[str] = ()


def place_of(member: str) -> str:
    """The place of a member's devices, as in luce.runtime.device.DeviceName."""
    return f"{MEMBER}{member}/"


def full_names(member: Member) -> tuple[str, ...]:
    """The names of a member's devices for the server, as member://box/cuda:0."""
    return tuple(f"{place_of(member.name)}{device}" for device in member.devices)


def span_text(layers: range) -> str:
    """FIRST..LAST."""
    return f"{layers.start}..{layers.stop - 1}"


def placement_text(placement: Mapping[str, range]) -> str:
    """The devices of a placement with their layers, for a line of the log."""
    return ", ".join(f"{device} {span_text(layers)}" for device, layers in placement.items()) or "none"


def broken_members(
    members: Mapping[str, Member], planned: Mapping[str, int | None]
) -> tuple[frozenset[str], frozenset[str]]:
    """Of the members of a placement, with their sessions when it was planned: those that cannot have their weights, and
    those that have been lost since."""
    found = {name: members.get(name) for name in planned}
    unfit = frozenset(name for name, member in found.items() if member is not None and member.file == "absent")
    return unfit, frozenset(n for n, member in found.items() if member is None or member.session != planned[n])


def member_status(
    member: Member, now: float, link: Link | None, layers: Sequence[str], share: float | None, facts: ModelFacts | None
) -> MemberStatus:
    """A member at the monotonic time `now`. `layers`: as in wire.MemberStatus; `share`: of streamed weights that are
    there."""
    names = full_names(member)
    seen = () if link is None or len(link.memory) != len(names) else link.memory
    memory = seen or tuple(DeviceMemory(None, None) for _ in names)
    if facts is not None and member.state in ("serving", "draining"):
        memory = tuple(facts.memory.get(name, own) for name, own in zip(names, memory, strict=True))
    idle = facts if member.state == "idle" else None
    gain = None if idle is None else idle.gains.get(member.name)
    rates = [] if facts is None else [facts.bandwidths[name] for name in names if name in facts.bandwidths]
    return MemberStatus(
        name=member.name,
        label=member.label,
        state=member.state,
        seconds=round(now - member.since, 1),
        address=member.address,
        round_trip_ms=None if link is None or link.round_trip is None else round(1000 * link.round_trip, 2),
        bytes_per_second=min(rates, default=None),
        devices=member.devices,
        memory=memory,
        layers=tuple(layers) if member.state in ("loading", "serving", "draining") else (),
        luce=member.luce,
        file=member.file if share is None else f"{member.file} {share:.0%}",
        losses=member.losses,
        reason=member.reason,
        gain_decode=None if gain is None else round(gain.decode, 3),
        gain_prompt=None if gain is None else round(gain.prompt, 3),
        unmeasured=idle is not None and member.name in idle.unmeasured,
    )
