"""Prometheus metrics. One registry per server; no label holds text from a client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from luce.api import Model
from luce.cluster.wire import Status
from luce.compress.compression_options import Verdict
from luce.engine.drafted import DraftStats
from luce.engine.masks import MaskStats
from luce.engine.sequence import DraftState
from luce.kvcache.disk.stats import DiskStats
from luce.kvcache.paging import PagingStats
from luce.kvcache.prefix_cache import CacheStats
from luce.server.cluster_metrics import ClusterCollector
from luce.server.llamacpp_metrics import llamacpp_metrics
from luce.shard.timing import BOUNDS, Durations

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class Metrics:
    """The server's counters, and a collector that reads those of the engines and of the shards of the loaded models:
    (name, or None where there is only one; model). `compat`: with those that llama.cpp has too, by its names;
    `cluster`: what returns the state of the server's cluster, None without one."""

    def __init__(
        self,
        models: Callable[[], Sequence[tuple[str | None, Model]]],
        *,
        compat: bool = False,
        cluster: Callable[[], Status] | None = None,
    ) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "luce_requests", "Requests answered, by route and status.", ("endpoint", "status"), registry=registry
        )
        self.request_seconds = Histogram(
            "luce_request_seconds",
            "Seconds from the headers of a request to the end of its response.",
            ("endpoint",),
            registry=registry,
            buckets=_SECONDS,
        )
        self.queue_seconds = Histogram(
            "luce_queue_seconds", "Seconds that sequences waited for a slot.", registry=registry, buckets=_SECONDS
        )
        self.time_to_first_token = Histogram(
            "luce_time_to_first_token_seconds",
            "Seconds from the headers of a request to the first token of a sequence.",
            registry=registry,
            buckets=_SECONDS,
        )
        self.inter_token_latency = Histogram(
            "luce_inter_token_latency_seconds",
            "Seconds between two tokens of a sequence.",
            registry=registry,
            buckets=_TOKEN_SECONDS,
        )
        self.cancelled = Counter(
            "luce_cancelled_sequences",
            "Sequences cancelled, by stage (queued, prefill, decode).",
            ("stage",),
            registry=registry,
        )
        self.unknown_fields = Counter(
            "luce_unknown_request_fields", "Fields of request bodies that Luce does not know.", registry=registry
        )
        self.skipped_tools = Counter(
            "luce_skipped_tools",
            "Tools of request bodies that only the servers of their API could run.",
            registry=registry,
        )
        self.grammar_refused = Counter(
            "luce_grammar_refused",
            "Requests whose schema, regular expression or grammar was refused, by the error's code.",
            ("code",),
            registry=registry,
        )
        self.grammar_relaxed = Counter(
            "luce_grammar_relaxed", "Keywords of schemas that replies do not follow.", registry=registry
        )
        self.bad_tool_calls = Counter(
            "luce_bad_tool_calls",
            "Tool calls of replies that were malformed: text in the response, or cut.",
            registry=registry,
        )
        registry.register(_ModelsCollector(models, compat=compat))
        if cluster is not None:
            registry.register(ClusterCollector(cluster))

    def text(self) -> bytes:
        """All metrics in the Prometheus text format. Any thread may call it."""
        return generate_latest(self._registry)


class _ModelsCollector(Collector):
    """The metrics of each model; with the label `model` where there are several."""

    def __init__(self, models: Callable[[], Sequence[tuple[str | None, Model]]], *, compat: bool) -> None:
        self._models = models
        self._compat = compat

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for name, model in self._models():
            parts = [
                part.collect()
                for part in (
                    _EngineCollector(model),
                    _CompilerCollector(model),
                    _CompressionCollector(model),
                    _ShardCollector(model),
                )
            ]
            if self._compat:
                parts.append(llamacpp_metrics(model.engine.stats()))
            for metric in chain(*parts):
                family = families.setdefault(metric.name, metric)
                if name is not None:
                    own = [sample._replace(labels={**sample.labels, "model": name}) for sample in metric.samples]
                    family.samples = own if family is metric else [*family.samples, *own]
        yield from families.values()


class _EngineCollector:
    def __init__(self, model: Model) -> None:
        self._model = model

    def collect(self) -> Iterator[Metric]:
        stats = self._model.engine.stats()
        yield GaugeMetricFamily("luce_queued_sequences", "Sequences that wait for a slot.", stats.waiting)
        slots = GaugeMetricFamily("luce_slots", "Slots for sequences, by state.", labels=["state"])
        slots.add_metric(["busy"], stats.running)
        slots.add_metric(["idle"], stats.slots - stats.running)
        yield slots
        pages = GaugeMetricFamily("luce_kv_pages", "Pages of the key-value cache, by state.", labels=["state"])
        pages.add_metric(["used"], stats.pages_used)
        pages.add_metric(["free"], stats.pages_total - stats.pages_used)
        yield pages
        prompt = CounterMetricFamily(
            "luce_prompt_tokens",
            "Prompt tokens, by source: computed, or reused from a tier of the prefix cache.",
            labels=["source"],
        )
        prompt.add_metric(["computed"], stats.prompt_tokens)
        prompt.add_metric(["ram"], stats.cache.reused_tokens)
        prompt.add_metric(["disk"], 0 if stats.cache.disk is None else stats.cache.disk.reused_tokens)
        yield prompt
        yield from _cache_metrics(stats.cache)
        yield CounterMetricFamily("luce_generated_tokens", "Tokens generated.", stats.predicted_tokens)
        yield CounterMetricFamily("luce_steps", "Steps (forward passes).", stats.steps)
        yield CounterMetricFamily("luce_replies_resumed", "Replies that went on behind a lost member.", stats.resumed)
        if stats.draft is not None:
            yield from _draft_metrics(stats.draft)
        if stats.masks is not None:
            yield from _grammar_metrics(stats.masks, stats.forced)
        if stats.paging is not None:
            yield from _paging_metrics(stats.paging)
        yield GaugeMetricFamily(
            "luce_stalled_seconds", "Seconds without progress while there is work to do.", stats.stalled
        )


def _draft_metrics(stats: DraftStats) -> Iterator[Metric]:
    yield GaugeMetricFamily("luce_draft_enabled", "Whether tokens are drafted: 0 after a failure.", float(stats.on))
    yield CounterMetricFamily("luce_draft_verifications", "Verifications of a sequence's draft tokens.", stats.steps)
    yield CounterMetricFamily("luce_draft_tokens", "Draft tokens that were verified.", stats.proposed)
    yield CounterMetricFamily("luce_draft_accepted_tokens", "Draft tokens that were accepted.", stats.accepted)
    yield CounterMetricFamily(
        "luce_draft_refused_tokens", "Draft tokens that a grammar refused before they were verified.", stats.refused
    )
    yield CounterMetricFamily(
        "luce_draft_copied_tokens", "Accepted draft tokens that repeat an earlier text.", stats.copied
    )
    sequences = GaugeMetricFamily(
        "luce_draft_sequences",
        "Sequences that run, by whether the drafter is asked for them, or why not.",
        labels=["state"],
    )
    for state in DraftState:
        sequences.add_metric([state.value], stats.states.get(state, 0))
    yield sequences
    yield CounterMetricFamily("luce_draft_seconds", "Seconds spent on drafting.", stats.seconds)


def _grammar_metrics(stats: MaskStats, forced: tuple[int, int]) -> Iterator[Metric]:
    rows = CounterMetricFamily(
        "luce_grammar_rows",
        "Rows of constrained replies: any token may come (open), the mask is constant (free) or made, or none (left).",
        labels=["kind"],
    )
    for kind, count in stats.rows.items():
        rows.add_metric([kind], count)
    yield rows
    for name, text, times in (
        ("mask", "Seconds that a thread took for the masks of one reply in a step.", stats.made),
        ("wait", "Seconds that a step waited for masks when its layers were queued.", stats.waits),
    ):
        family = HistogramMetricFamily(f"luce_grammar_{name}_seconds", text)
        family.add_metric((), _buckets(times), times.total)
        yield family
    tokens = CounterMetricFamily(
        "luce_grammar_forced_tokens", "Tokens that grammars forced, verified as drafts, by outcome.", labels=["outcome"]
    )
    tokens.add_metric(["accepted"], forced[1])
    tokens.add_metric(["refused"], forced[0] - forced[1])
    yield tokens


def _paging_metrics(stats: PagingStats) -> Iterator[Metric]:
    pages = GaugeMetricFamily(
        "luce_kvflash_pages",
        "Pages of running sequences, on the devices (resident) or in host memory.",
        labels=["place"],
    )
    pages.add_metric(["resident"], stats.resident_pages)
    pages.add_metric(["host"], stats.host_pages)
    yield pages
    host = GaugeMetricFamily("luce_kvflash_host_bytes", "Host memory for pages: used, and its limit.", labels=["kind"])
    host.add_metric(["used"], stats.host_bytes)
    host.add_metric(["limit"], stats.host_budget)
    yield host
    events = CounterMetricFamily(
        "luce_kvflash_swapped_pages", "Pages swapped out of the devices or back in.", labels=["direction"]
    )
    events.add_metric(["out"], stats.swapped_out)
    events.add_metric(["in"], stats.swapped_in)
    yield events
    for name, text, value in (
        ("swapped_bytes", "Bytes copied between devices and host memory for swapping.", stats.moved_bytes),
        ("resident_hits", "Pages that the policy selected and that were resident already.", stats.resident_hits),
        ("lost_pages", "Pages dropped because the host memory for pages was full.", stats.lost_pages),
        ("rescores", "Times that the policy scored the pages of a sequence.", stats.rescores),
        ("rescore_seconds", "Seconds spent on scoring and on the swapping that followed.", stats.rescore_seconds),
    ):
        yield CounterMetricFamily(f"luce_kvflash_{name}", text, value)


def _cache_metrics(stats: CacheStats) -> Iterator[Metric]:
    disk = stats.disk or DiskStats()
    yield GaugeMetricFamily("luce_prefix_cache_pages", "Pages on the devices that the prefix cache holds.", stats.pages)
    yield _tiers(GaugeMetricFamily, "bytes", "Bytes of the prefix cache.", stats.bytes, disk.bytes)
    yield _tiers(
        GaugeMetricFamily,
        "entries",
        "Checkpoints: prefixes at which a sequence can resume.",
        stats.checkpoints,
        disk.snapshots,
    )
    yield _tiers(CounterMetricFamily, "hits", "Sequences that resumed from a cached prefix.", stats.hits, disk.hits)
    yield _tiers(
        CounterMetricFamily, "evictions", "Checkpoints evicted to free memory.", stats.evictions, disk.evictions
    )
    yield CounterMetricFamily("luce_prefix_cache_misses", "Sequences without a cached prefix.", stats.misses)
    text = "Seconds that computing the reused tokens would have taken, less the seconds that resuming took."
    yield CounterMetricFamily("luce_prefix_cache_seconds_saved", text, stats.seconds_saved)
    yield GaugeMetricFamily("luce_snapshot_queue", "Snapshots that are being written or wait to be.", disk.queued)
    unused = CounterMetricFamily("luce_snapshot_misses", "Snapshots found but not used, by reason.", labels=["reason"])
    for reason in ("damaged", "unreadable", "slow", "refused"):
        unused.add_metric([reason], getattr(disk, reason))
    yield unused
    for name, text, value in (
        ("saves", "Snapshots written.", disk.saves),
        ("save_failures", "Snapshots that could not be written.", disk.failures),
        ("saves_skipped", "Snapshots not written because the queue was full.", disk.skipped),
        ("quarantines", "Damaged snapshots moved to quarantine.", disk.quarantines),
        ("raw_bytes", "Bytes of written snapshots before compression.", disk.raw_bytes),
        ("written_bytes", "Bytes of written snapshots.", disk.written_bytes),
        ("save_seconds", "Seconds of work of the writing thread.", disk.save_seconds),
        ("load_seconds", "Seconds that sequences waited for snapshots to load.", disk.load_seconds),
    ):
        yield CounterMetricFamily(f"luce_snapshot_{name}", text, value)


def _tiers(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, ram: float, disk: float
) -> Metric:
    metric = family(f"luce_prefix_cache_{name}", text, labels=["tier"])
    metric.add_metric(["ram"], ram)
    metric.add_metric(["disk"], disk)
    return metric


class _CompilerCollector:
    def __init__(self, model: Model) -> None:
        self._model = model

    def collect(self) -> Iterator[Metric]:
        stats = self._model.grammars.stats()
        seconds = HistogramMetricFamily("luce_grammar_compile_seconds", "Seconds that a grammar took to compile.")
        seconds.add_metric((), _buckets(stats.seconds), stats.seconds.total)
        yield seconds
        yield CounterMetricFamily("luce_grammar_cache_hits", "Grammars that were compiled already.", stats.hits)
        yield CounterMetricFamily("luce_grammar_cache_misses", "Grammars that had to be compiled.", stats.misses)


class _CompressionCollector:
    def __init__(self, model: Model) -> None:
        self._model = model

    def collect(self) -> Iterator[Metric]:
        compressor = self._model.compression.compressor
        if compressor is None:
            return
        stats = compressor.stats()
        yield GaugeMetricFamily(
            "luce_compression_enabled", "Whether prompts can be compressed: 0 after failures.", stats.state == "on"
        )
        prompts = CounterMetricFamily(
            "luce_compression_prompts", "Prompts, by the result of compression.", labels=["result"]
        )
        for verdict in Verdict:
            if verdict is not Verdict.OFF:
                prompts.add_metric([verdict.value], stats.prompts.get(verdict, 0))
        yield prompts
        tokens = CounterMetricFamily(
            "luce_compression_tokens", "Tokens of compressed prompts: original, and kept.", labels=["kind"]
        )
        tokens.add_metric(["original"], stats.original)
        tokens.add_metric(["kept"], stats.kept)
        yield tokens
        yield CounterMetricFamily(
            "luce_compression_reused_prompts",
            "Prompts whose kept tokens were known from an earlier prompt.",
            stats.reused,
        )
        yield CounterMetricFamily(
            "luce_compression_seconds", "Seconds that the small model read prompts.", stats.seconds
        )


class _ShardCollector:
    def __init__(self, model: Model) -> None:
        self._model = model

    def collect(self) -> Iterator[Metric]:
        model = self._model
        work = HistogramMetricFamily(
            "luce_shard_seconds",
            "Seconds that a shard's device computed for one step or microbatch.",
            labels=("shard", "device"),
        )
        copies = HistogramMetricFamily(
            "luce_transfer_seconds",
            "Seconds of one copy of activations to the next shard; a transfer through host memory is two copies.",
            labels=("shard", "device"),
        )
        for number, shard in enumerate(model.times()):
            labels = (str(number), shard.device)
            work.add_metric(labels, _buckets(shard.work), shard.work.total)
            if shard.copies is not None:
                copies.add_metric(labels, _buckets(shard.copies), shard.copies.total)
        yield work
        yield copies
        if model.plan is not None:
            predicted = GaugeMetricFamily(
                "luce_predicted_seconds",
                "Predicted seconds of a shard: for a decoding step, and for a piece of a prompt.",
                labels=("shard", "device", "phase"),
            )
            for number, stage in enumerate(model.plan.prediction.shards):
                predicted.add_metric([str(number), stage.shard.device, "decode"], stage.decode.total)
                predicted.add_metric([str(number), stage.shard.device, "piece"], stage.piece.total)
            yield predicted
        memory = GaugeMetricFamily(
            "luce_device_memory_bytes", "Memory of a shard's device: free and total.", labels=["device", "kind"]
        )
        for device, figures in model.memory().items():
            memory.add_metric([device, "free"], figures.free)
            memory.add_metric([device, "total"], figures.total)
        yield memory
        up = GaugeMetricFamily("luce_shard_up", "Whether a shard's daemon is running.", labels=("shard", "device"))
        restarts = CounterMetricFamily(
            "luce_shard_restarts",
            "Times that a shard's daemon was lost after it had loaded.",
            labels=("shard", "device"),
        )
        moved = CounterMetricFamily(
            "luce_ipc_bytes",
            "Bytes to and from a shard's daemon, in messages (stream) and in shared memory.",
            labels=("shard", "device", "transport", "direction"),
        )
        waited = CounterMetricFamily(
            "luce_ipc_wait_seconds",
            "Seconds that threads of the server waited for a shard's daemon.",
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
    """Upper bounds and cumulative counts, as in the text format."""
    return list(zip((*map(str, BOUNDS), "+Inf"), accumulate(durations.counts), strict=True))
