"""Which keys of blocks a group of API keys may know of. Pure.

A replica's prefix cache is one for all. A router that told a group that another one's prompt is cached would let it
probe for texts by timing. So a replica reports a block only under the salts of the groups that have sent it themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from luce.kvcache.block_keys import salted

#: most blocks of prompts that are not cached, which are remembered for the groups that sent them
MOST_ABSENT = 1 << 16


class GroupKeys:
    """The groups that have sent the blocks of a replica, and which keys are reported for these."""

    def __init__(self) -> None:
        #: by key of a block, the salts of the groups that have sent it, the block that was sent last behind the others
        self._salts: dict[bytes, set[bytes]] = {}
        self._held: set[bytes] = set()

    def sent(self, keys: Sequence[bytes], salt: bytes) -> list[bytes]:
        """A group has sent a prompt with these keys; returns what is to be added to the reports: the blocks among them
        that are held already."""
        added = []
        for key in keys:
            salts = self._salts.pop(key, set())
            if salt not in salts and key in self._held:
                added.append(salted(key, salt))
            self._salts[key] = salts | {salt}
        if len(self._salts) - len(self._held) > MOST_ABSENT:
            self._forget()
        return added

    def changed(self, added: Iterable[bytes], removed: Iterable[bytes]) -> tuple[list[bytes], list[bytes]]:
        """The keys to report as added and removed for blocks that are now held, or no longer."""
        gone = [key for key in removed if key in self._held]
        self._held.difference_update(gone)
        new = [key for key in added if key not in self._held]
        self._held.update(new)
        return self._reported(new), self._reported(gone)

    def held(self) -> list[bytes]:
        """All keys to report."""
        return self._reported(self._held)

    def clear(self) -> list[bytes]:
        """Nothing is held any more; returns the keys to report as removed."""
        gone = self.held()
        self._held.clear()
        return gone

    def _reported(self, keys: Iterable[bytes]) -> list[bytes]:
        return [salted(key, salt) for key in keys for salt in self._salts.get(key, ())]

    def _forget(self) -> None:
        """Forget the older half of the blocks that are not held."""
        absent = [key for key in self._salts if key not in self._held]
        for key in absent[: len(absent) // 2]:
            del self._salts[key]
