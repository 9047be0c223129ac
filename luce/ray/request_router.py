"""The request routers: Serve asks one which replica gets a call of the ingress, the other which ingress gets a request.

An alpha interface of Ray Serve, pinned in setup.cfg. Calls of the ingress carry `call` (a name) and `keys` (of the
prompt's blocks, with the salt of the client's group), or `target` (the one replica that is meant).
"""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import LocalityMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from luce.ray.shared_routing import routing_of

#: seconds for the ingress of a machine to take a request that came there
LOCAL_SECONDS = 5.0

Ranks = list[list[RunningReplica]]


class PrefixRouter(RequestRouter):
    """Routes by what replicas have cached and how busy they are."""

    def initialize_state(self, **options: Any) -> None:
        """`app`: name of the application, under which the ingress finds the routing state."""
        self._routing = routing_of(options["app"])

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve tells which replicas run."""
        super().update_replicas(replicas)
        self._routing.keep([replica.replica_id.unique_id for replica in replicas])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> Ranks:
        """The replicas in the order in which they are tried, one a rank."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        call = {} if pending_request is None else pending_request.kwargs
        if pending_request is not None:
            # Otherwise Serve asks again at once, for as long as all replicas are full.
            pending_request.routing_context.should_backoff = True
        if (target := call.get("target")) is not None:
            # A replica that is gone: any other one says that it is not meant.
            return [[by_name[target]]] if target in by_name else [list(candidate_replicas)]
        return [[by_name[name]] for name in self._routing.ranked(call.get("keys", ()), by_name)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count the call there; the ingress tells when it has ended."""
        call = pending_request.kwargs
        if "call" in call:
            self._routing.began(call["call"], replica_id.unique_id, call.get("keys", ()))


class LocalRouter(LocalityMixin, RequestRouter):
    """Routes a request to the ingress of the machine that it came to, so that the reply outlives other machines.

    Serve's own router takes another machine's ingress if this one does not report its load within 0.1 s.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> Ranks:
        """The ingress of this machine; those of others too if it has none, or if the request has waited too long."""
        own, *others = self.rank_replicas_via_locality(candidate_replicas)
        waited = 0.0
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            waited = time.time() - pending_request.created_at
        return [own, *others] if not own or waited > LOCAL_SECONDS else [own]
