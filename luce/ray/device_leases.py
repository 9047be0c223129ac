"""Which device of a node belongs to which actor. Pure.

Ray counts `luce_cuda`, it does not number the devices. A detached actor on each node has this table: an actor that got
a unit asks for an index. The lease of an actor that is gone goes to the next one that asks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from luce.errors import DeviceError


class DeviceLeases:
    """Devices by kind: `counts` says how many a node has, numbered from 0."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = dict(counts)
        #: by (kind, index), the owner
        self._owners: dict[tuple[str, int], str] = {}

    def acquire(self, kind: str, owner: str, alive: Collection[str]) -> int:
        """The index of a device that `owner` gets. `alive`: the owners that still run; the leases of others end.

        Raises DeviceError if all are leased, which Ray's count should prevent.
        """
        self._owners = {place: holder for place, holder in self._owners.items() if holder in alive}
        for index in range(self._counts.get(kind, 0)):
            if (kind, index) not in self._owners:
                self._owners[kind, index] = owner
                return index
        raise DeviceError(f"{kind}: all {self._counts.get(kind, 0)} devices of this node are leased")
