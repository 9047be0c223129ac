"""members.json: the members of a cluster and the number of its last placement, for a coordinator that starts again."""

from __future__ import annotations

import dataclasses
import time

import msgspec

from luce import __version__
from luce.cluster.cluster_files import ClusterFiles, is_cluster_name
from luce.cluster.membership import Member, Membership


class _Saved(msgspec.Struct):
    """A member."""

    name: str
    certificate: bytes
    label: str
    proven: bool


class _SavedMembers(msgspec.Struct):
    """The content of members.json."""

    epoch: int
    members: list[_Saved]


def read_members(files: ClusterFiles) -> Membership:
    """The membership of a coordinator that starts: nobody is connected. Raises UsageError."""
    saved = files.read("members.json", _SavedMembers) or _SavedMembers(0, [])
    now = time.monotonic()
    members = [Member(s.name, s.certificate, s.label, "joining", now, s.proven) for s in saved.members]
    return restored(__version__, [m for m in members if is_cluster_name(m.name)], saved.epoch, now)


def write_members(files: ClusterFiles, membership: Membership) -> None:
    """Keep the members, durably. Raises UsageError."""
    members = [_Saved(m.name, m.certificate, m.label, m.proven) for m in membership.members.values()]
    files.write("members.json", _SavedMembers(membership.epoch, members))


def restored(luce: str, members: list[Member], epoch: int, now: float) -> Membership:
    """The membership of a coordinator that starts again: nobody is connected."""
    fresh = {m.name: dataclasses.replace(m, state="joining", since=now, session=None, reason="") for m in members}
    return Membership(luce, fresh, epoch)
