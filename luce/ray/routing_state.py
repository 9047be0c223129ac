"""What replicas have cached and how busy they are, and which of them gets a prompt. Pure: the caller gives the time.

Score of a replica = cached tokens * seconds to read a token - WAITING_WEIGHT * seconds that the request would wait;
equal scores go to the least loaded. A replica with more than twice as many requests as it serves at once is left out.
If none has anything of the prompt, rendezvous hashing of its fourth key chooses among those where it would wait least,
so that the same prompt goes to the same replica before that one has reported it.

Reports come in order, each with what has changed behind the one before. A gap, or another life of the replica, makes
its whole list necessary. Between two reports the router counts what it has sent itself.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from luce.kvcache.block_keys import TOKENS

#: key by which prompts that nobody has cached are spread: a longer one would separate the turns of a conversation
SPREAD_KEY = 4
#: how much a second of waiting counts against a second of reading: who waits holds up those behind it, and a replica
#: that reads a shared beginning has it for all that follow
WAITING_WEIGHT = 4.0
#: a replica with more requests than this many times its slots is left out
CROWDED = 2
#: seconds for which the keys of a request that has ended count before the replica reports them
ASSUMED_SECONDS = 3.0
#: before a replica has measured: seconds to read a token, and of a request
PREFILL_SECONDS, REPLY_SECONDS = 0.001, 5.0


@dataclass
class ReplicaView:
    """What the router knows of a replica."""

    life: str = ""
    #: number of the last report; -1: the whole list is needed
    sequence: int = -1
    keys: set[bytes] = field(default_factory=set)
    #: by key of a request that was sent there, until when the replica is taken to have it
    assumed: dict[bytes, float] = field(default_factory=dict)
    #: requests there at the last report, and those sent less those ended since then
    reported: int = 0
    unreported: int = 0
    parallel: int = 1
    prefill_seconds: float = 0.0
    reply_seconds: float = 0.0
    #: number of the router's choice that last fell on it
    chosen: int = 0

    @property
    def load(self) -> int:
        """Requests there now."""
        return max(0, self.reported + self.unreported)

    @property
    def waiting_seconds(self) -> float:
        """How long one more request would wait for a slot."""
        ahead = max(0, self.load + 1 - self.parallel)
        return ahead / self.parallel * (self.reply_seconds or REPLY_SECONDS)

    def cached_blocks(self, keys: Sequence[bytes], now: float) -> int:
        """How many of a prompt's blocks it has. Who has a block has all before it."""
        return bisect_left(keys, True, key=lambda key: key not in self.keys and self.assumed.get(key, now) <= now)


class RoutingState:
    """The replicas by their name."""

    def __init__(self) -> None:
        self.replicas: dict[str, ReplicaView] = {}
        self._choices = 0

    def keep(self, names: Collection[str]) -> None:
        """These replicas run, and no others."""
        self.replicas = {name: self.replicas.get(name) or ReplicaView() for name in names}

    def apply(self, name: str, report: Mapping[str, Any], now: float) -> bool:
        """Note a report; False if it does not follow the last one, and the whole list is needed.

        `report`: `life`, `since` and `sequence` (numbers of the report before and of this one; `since` -1: this is the
        whole list), `added` and `removed` (keys), `running`, `waiting`, `parallel`, `prefill_seconds`,
        `reply_seconds`.
        """
        view = self.replicas.get(name)
        if view is None:
            return True
        whole = report["since"] < 0
        if not whole and (report["life"], report["since"]) != (view.life, view.sequence):
            view.sequence = -1
            return False
        if whole:
            view.keys = set()
        view.keys.difference_update(report["removed"])
        view.keys.update(report["added"])
        view.life, view.sequence = report["life"], report["sequence"]
        view.reported, view.unreported = report["running"] + report["waiting"], 0
        view.parallel = max(1, report["parallel"])
        view.prefill_seconds, view.reply_seconds = report["prefill_seconds"], report["reply_seconds"]
        view.assumed = {key: until for key, until in view.assumed.items() if until > now}
        return True

    def ranked(self, keys: Sequence[bytes], now: float, among: Collection[str] | None = None) -> list[str]:
        """The replicas for a prompt with these keys, the best one first. `among`: those that may be chosen."""
        views = {name: view for name, view in self.replicas.items() if among is None or name in among}
        free = {name: view for name, view in views.items() if view.load <= CROWDED * view.parallel} or views
        cached = {name: view.cached_blocks(keys, now) for name, view in free.items()}
        spread = keys[min(SPREAD_KEY, len(keys)) - 1] if keys else b""
        unknown = not any(cached.values())

        def order(name: str) -> tuple[float, ...]:
            view = free[name]
            if not keys:
                return view.waiting_seconds, view.load, view.chosen
            if unknown:
                return view.waiting_seconds, -_weight(spread, name)
            saved = cached[name] * TOKENS * (view.prefill_seconds or PREFILL_SECONDS)
            return WAITING_WEIGHT * view.waiting_seconds - saved, view.load, -_weight(spread, name)

        return sorted(free, key=order)

    def began(self, name: str, keys: Sequence[bytes]) -> None:
        """A request was sent to a replica."""
        view = self.replicas.get(name)
        if view is not None:
            self._choices += 1
            view.chosen = self._choices
            view.unreported += 1
            view.assumed.update(dict.fromkeys(keys, math.inf))

    def ended(self, name: str, keys: Sequence[bytes], now: float) -> None:
        """A request that was sent to a replica has ended."""
        view = self.replicas.get(name)
        if view is not None:
            view.unreported -= 1
            view.assumed.update(dict.fromkeys(keys, now + ASSUMED_SECONDS))


def _weight(key: bytes, name: str) -> int:
    """Rendezvous hashing: a key goes to the replica with the greatest weight, and moves only if that one is gone."""
    return int.from_bytes(hashlib.sha256(key + name.encode()).digest()[:8])
