"""The routing state of an ingress, shared by its router, which Serve runs on a thread of its own, and what feeds it."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from luce.ray.routing_state import RoutingState


class SharedRouting:
    """A RoutingState with a lock and a clock, and the requests that are under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = RoutingState()
        #: by the id of a request, its replica and keys, None before it went to one
        self._under_way: dict[str, tuple[str, Sequence[bytes]] | None] = {}

    def keep(self, names: Collection[str]) -> None:
        """These replicas run, and no others."""
        with self._lock:
            self._state.keep(names)

    def names(self) -> list[str]:
        """The replicas."""
        with self._lock:
            return list(self._state.replicas)

    def followed(self, name: str) -> tuple[str, int]:
        """Life and number of a replica's last report, -1 if the whole list is needed."""
        with self._lock:
            view = self._state.replicas.get(name)
            return ("", -1) if view is None else (view.life, view.sequence)

    def apply(self, name: str, report: Mapping[str, Any]) -> bool:
        """As RoutingState.apply."""
        with self._lock:
            return self._state.apply(name, report, time.monotonic())

    def ranked(self, keys: Sequence[bytes], among: Collection[str]) -> list[str]:
        """As RoutingState.ranked."""
        with self._lock:
            return self._state.ranked(keys, time.monotonic(), among)

    def asked(self, request: str) -> None:
        """A request is about to be routed. `began` counts it only between this call and `ended`."""
        with self._lock:
            self._under_way[request] = None

    def began(self, request: str, name: str, keys: Sequence[bytes]) -> None:
        """A request went to a replica; nothing if it has ended by then, as its client has left."""
        with self._lock:
            if request in self._under_way:
                self._under_way[request] = name, keys
                self._state.began(name, keys)

    def ended(self, request: str) -> None:
        """A request has ended, also one that went to no replica; others are not known."""
        with self._lock:
            if (found := self._under_way.pop(request, None)) is not None:
                self._state.ended(*found, time.monotonic())

    def loads(self) -> dict[str, dict[str, Any]]:
        """By replica, what `luce ray status` shows."""
        with self._lock:
            return {
                name: {"life": view.life, "requests": view.load, "parallel": view.parallel, "blocks": len(view.keys)}
                for name, view in self._state.replicas.items()
            }


_ROUTINGS: dict[str, SharedRouting] = {}


def routing_of(name: str) -> SharedRouting:
    """That of an application in this process: the ingress and its router find the same one."""
    return _ROUTINGS.setdefault(name, SharedRouting())
