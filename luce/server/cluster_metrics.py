"""The metrics of a server's cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import get_args

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from luce.cluster.membership import State
from luce.cluster.wire import Status


class ClusterCollector(Collector):
    """Members, placements and streamed weights, as `status` returns them."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """The metrics now."""
        status = self._status()
        counts = Counter(member.state for member in status.members)
        members = GaugeMetricFamily("luce_cluster_members", "Members of the cluster, by state.", labels=["state"])
        for state in get_args(State):
            members.add_metric([state], counts[state])
        yield members
        up = GaugeMetricFamily("luce_member_up", "Whether a member is connected.", labels=["member"])
        trips = GaugeMetricFamily(
            "luce_member_rtt_seconds", "Round trip of a member's control connection.", labels=["member"]
        )
        for member in status.members:
            up.add_metric([member.name], member.state not in ("joining", "lost", "gone"))
            if member.round_trip_ms is not None:
                trips.add_metric([member.name], member.round_trip_ms / 1000)
        yield up
        yield trips
        yield GaugeMetricFamily("luce_cluster_epoch", "Number of the last placement.", status.epoch)
        replans = CounterMetricFamily(
            "luce_replans", "Placements of the model since the start, by their reason.", labels=["reason"]
        )
        for reason, count in status.replans.items():
            replans.add_metric([reason], count)
        yield replans
        yield CounterMetricFamily(
            "luce_weights_streamed_bytes", "Bytes of weights sent to members.", status.streamed_bytes
        )
