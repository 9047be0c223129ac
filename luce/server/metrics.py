"""Prometheus metrics. One registry per server; no label holds anything that a client sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from luce.api import Model
from luce.engine.loop import EngineStats
from luce.engine.speculate import DraftStats
from luce.kvcache.disk.tier import DiskStats
from luce.kvcache.paging import PagingStats
from luce.kvcache.prefix_cache import CacheStats
from luce.shard.timing import BOUNDS, Durations

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class Metrics:
    """The server's counters. `stats` gives the engine's own figures, `model` has the shards', None without a model."""

    def __init__(self, stats: Callable[[], EngineStats | None], model: Callable[[], Model | None]) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "luce_requests", "Requests answered, by route and status.", ("endpoint", "status"), registry=registry
        )
        self.request_seconds = Histogram(
            "luce_request_seconds",
            "Time from a request's head to the end of its reply.",
            ("endpoint",),
            registry=registry,
            buckets=_SECONDS,
        )
        self.queue_seconds = Histogram(
            "luce_queue_seconds", "Time that sequences waited for a slot.", registry=registry, buckets=_SECONDS
        )
        self.ttft_seconds = Histogram(
            "luce_ttft_seconds",
            "Time from a request's head to the first token of a sequence.",
            registry=registry,
            buckets=_SECONDS,
        )
        self.inter_token_seconds = Histogram(
            "luce_inter_token_seconds",
            "Time between two tokens of a sequence.",
            registry=registry,
            buckets=_TOKEN_SECONDS,
        )
        self.cancelled = Counter(
            "luce_cancelled", "Sequences cancelled, by what they were doing.", ("stage",), registry=registry
        )
        self.unknown_fields = Counter(
            "luce_unknown_field", "Fields of request bodies that Luce does not know.", registry=registry
        )
        registry.register(_EngineCollector(stats))
        registry.register(_ShardCollector(model))

    def text(self) -> bytes:
        """All metrics in the Prometheus text format. Any thread may call it."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        yield GaugeMetricFamily("luce_queue_depth", "Sequences that wait for a slot.", stats.queued)
        slots = GaugeMetricFamily("luce_slots", "Slots for sequences, by state.", labels=["state"])
        slots.add_metric(["busy"], stats.running)
        slots.add_metric(["idle"], stats.slots - stats.running)
        yield slots
        pages = GaugeMetricFamily("luce_kv_pages", "Pages of the key-value cache, by state.", labels=["state"])
        pages.add_metric(["used"], stats.pages_used)
        pages.add_metric(["free"], stats.pages_total - stats.pages_used)
        yield pages
        prompt = CounterMetricFamily("luce_prompt_tokens", "Prompt tokens processed, by origin.", labels=["source"])
        prompt.add_metric(["computed"], stats.prompt_tokens)
        prompt.add_metric(["ram"], stats.cache.reused_tokens)
        prompt.add_metric(["disk"], 0 if stats.cache.disk is None else stats.cache.disk.reused_tokens)
        yield prompt
        yield from _cache_metrics(stats.cache)
        yield CounterMetricFamily("luce_generated_tokens", "Tokens generated.", stats.predicted_tokens)
        yield CounterMetricFamily("luce_steps", "Forward passes.", stats.steps)
        if stats.draft is not None:
            yield from _draft_metrics(stats.draft)
        if stats.residency is not None:
            yield from _residency_metrics(stats.residency)
        yield GaugeMetricFamily(
            "luce_stalled_seconds", "Time without progress while there is work to do.", stats.stalled
        )


def _draft_metrics(stats: DraftStats) -> Iterator[Metric]:
    yield GaugeMetricFamily("luce_draft_on", "Whether tokens are drafted: 0 after a failure.", float(stats.on))
    yield CounterMetricFamily("luce_draft_steps", "Verifications of a sequence's drafted tokens.", stats.steps)
    yield CounterMetricFamily("luce_draft_tokens", "Drafted tokens that were verified.", stats.proposed)
    yield CounterMetricFamily("luce_draft_accepted_tokens", "Of these, tokens that replies have.", stats.accepted)
    yield CounterMetricFamily("luce_draft_seconds", "Time that drafting took.", stats.seconds)


def _residency_metrics(stats: PagingStats) -> Iterator[Metric]:
    pages = GaugeMetricFamily("luce_kvflash_pages", "Pages of sequences that run, by where they are.", labels=["place"])
    pages.add_metric(["resident"], stats.resident_pages)
    pages.add_metric(["host"], stats.host_pages)
    yield pages
    host = GaugeMetricFamily("luce_kvflash_host_bytes", "Host memory for pages: in use, and at most.", labels=["kind"])
    host.add_metric(["used"], stats.host_bytes)
    host.add_metric(["budget"], stats.host_budget)
    yield host
    events = CounterMetricFamily(
        "luce_kvflash_page_events", "Pages that left the devices or came back.", labels=["way"]
    )
    events.add_metric(["out"], stats.swapped_out)
    events.add_metric(["in"], stats.swapped_in)
    yield events
    for name, text, value in (
        ("moved_bytes", "Bytes copied between devices and host memory for that.", stats.moved_bytes),
        ("recall_hits", "Pages that the policy wanted and that were there already.", stats.resident_hits),
        ("lost_pages", "Pages that host memory had no room for.", stats.lost_pages),
        ("rescores", "Times that the policy looked at a sequence's pages.", stats.rescores),
        ("rescore_seconds", "Time that it took, with the pages that moved.", stats.rescore_seconds),
    ):
        yield CounterMetricFamily(f"luce_kvflash_{name}", text, value)


def _cache_metrics(stats: CacheStats) -> Iterator[Metric]:
    disk = stats.disk or DiskStats()
    yield GaugeMetricFamily("luce_prefix_cache_pages", "Pages on the devices that hold prefixes.", stats.pages)
    yield _tiers(GaugeMetricFamily, "bytes", "Bytes of the prefix cache.", stats.bytes, disk.bytes)
    yield _tiers(GaugeMetricFamily, "entries", "Lengths that can be resumed.", stats.checkpoints, disk.snapshots)
    yield _tiers(CounterMetricFamily, "hits", "Sequences that were resumed.", stats.hits, disk.hits)
    yield _tiers(CounterMetricFamily, "evictions", "Lengths given up for room.", stats.evictions, disk.evictions)
    yield CounterMetricFamily("luce_prefix_cache_misses", "Sequences of which no prefix was known.", stats.misses)
    text = "Time that reading the reused tokens would have taken, less the time that it took to resume."
    yield CounterMetricFamily("luce_prefix_cache_seconds_saved", text, stats.seconds_saved)
    yield GaugeMetricFamily("luce_snapshot_queue", "Snapshots being written, or to be.", disk.queued)
    unused = CounterMetricFamily("luce_snapshot_misses", "Snapshots found and not resumed, by why.", labels=["reason"])
    for reason in ("damaged", "unreadable", "slow", "refused"):
        unused.add_metric([reason], getattr(disk, reason))
    yield unused
    for name, text, value in (
        ("saves", "Snapshots written.", disk.saves),
        ("save_failures", "Snapshots that could not be written.", disk.failures),
        ("saves_skipped", "Snapshots not written because too many waited.", disk.skipped),
        ("quarantines", "Damaged snapshots that were put aside.", disk.quarantines),
        ("raw_bytes", "Bytes of written snapshots before compression.", disk.raw_bytes),
        ("written_bytes", "Bytes of written snapshots.", disk.written_bytes),
        ("save_seconds", "Work of the writing thread.", disk.save_seconds),
        ("load_seconds", "Time that sequences waited for snapshots.", disk.load_seconds),
    ):
        yield CounterMetricFamily(f"luce_snapshot_{name}", text, value)


def _tiers(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, ram: float, disk: float
) -> Metric:
    metric = family(f"luce_prefix_cache_{name}", text, labels=["tier"])
    metric.add_metric(["ram"], ram)
    metric.add_metric(["disk"], disk)
    return metric


class _ShardCollector(Collector):
    def __init__(self, model: Callable[[], Model | None]) -> None:
        self._model = model

    def collect(self) -> Iterator[Metric]:
        model = self._model()
        if model is None:
            return
        work = HistogramMetricFamily(
            "luce_shard_seconds", "Time of a shard's device for one step or piece of one.", labels=("shard", "device")
        )
        copies = HistogramMetricFamily(
            "luce_transfer_seconds",
            "Time of one copy of what a shard hands to the next; by way of host memory there are two.",
            labels=("shard", "device"),
        )
        for number, shard in enumerate(model.times()):
            labels = (str(number), shard.device)
            work.add_metric(labels, _buckets(shard.work), shard.work.total)
            if shard.copies is not None:
                copies.add_metric(labels, _buckets(shard.copies), shard.copies.total)
        yield work
        yield copies
        memory = GaugeMetricFamily(
            "luce_device_memory_bytes", "Memory of a shard's device: free, and all.", labels=["device", "kind"]
        )
        for device, left in model.memory().items():
            memory.add_metric([device, "free"], left.free)
            memory.add_metric([device, "total"], left.total)
        yield memory
        up = GaugeMetricFamily("luce_shard_up", "Whether a shard's daemon is there.", labels=("shard", "device"))
        restarts = CounterMetricFamily(
            "luce_shard_restarts",
            "Times that a shard's daemon was lost after it had loaded.",
            labels=("shard", "device"),
        )
        moved = CounterMetricFamily(
            "luce_ipc_bytes",
            "Bytes to and from a shard's daemon, in messages (stream) and through shared memory.",
            labels=("shard", "device", "transport", "direction"),
        )
        waited = CounterMetricFamily(
            "luce_ipc_wait_seconds",
            "Time that threads of the server waited for what a shard's daemon was at.",
            labels=("shard", "device"),
        )
        for daemon in model.daemons():
            labels = (str(daemon.shard), daemon.device)
            up.add_metric(labels, float(daemon.up))
            restarts.add_metric(labels, daemon.restarts)
            for way, count in daemon.moved.items():
                moved.add_metric((*labels, *way), count)
            if daemon.waited is not None:
                waited.add_metric(labels, daemon.waited)
        yield up
        yield restarts
        yield moved
        yield waited


def _buckets(durations: Durations) -> list[tuple[str, float]]:
    """Upper bounds and cumulative counts, as the text format has them."""
    return list(zip((*map(str, BOUNDS), "+Inf"), accumulate(durations.counts), strict=True))
