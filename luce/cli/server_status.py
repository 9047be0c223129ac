"""What a running server does, read over HTTP: /v1/models, /props, /slots and /metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from prometheus_client.parser import text_string_to_metric_families

from luce.cli.repl.server_client import ServerClient
from luce.errors import ServerError

Json = dict[str, Any]
#: counters of which a rate is shown, by its name
_RATES = {
    "generated": ("luce_generated_tokens_total", {}),
    "prompt": ("luce_prompt_tokens_total", {"source": "computed"}),
    "requests": ("luce_requests_total", {}),
}


@dataclass(frozen=True)
class Reading:
    """The state of a server at one time."""

    #: time.monotonic()
    at: float
    #: entries of /v1/models
    models: list[Json]
    props: Json
    slots: list[Json]
    #: by name: labels and value
    samples: Mapping[str, list[tuple[Mapping[str, str], float]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The model that it is about."""
        return str(self.props.get("model_alias", ""))

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric over the samples with these labels, those of the model where it has a label for it."""
        return sum(
            value
            for found, value in self.samples.get(name, ())
            if found.get("model", self.name) == self.name and all(found.get(k) == v for k, v in labels.items())
        )


def read(client: ServerClient, model: str | None) -> Reading:
    """The state of a server now, of one of its models. Raises ServerError."""
    query = "" if model is None else f"?model={quote(model, safe='')}"
    listed = client.get("/models")
    props = client.get(f"/props{query}", root=True)
    slots = client.get(f"/slots{query}", root=True)
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(client.text("/metrics", root=True)):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise ServerError(f"{client.url}: /metrics is not in the Prometheus text format: {error}") from None
    models = listed.get("data") if isinstance(listed, dict) else None
    if not (isinstance(models, list) and isinstance(props, dict) and isinstance(slots, list) and "runtime" in props):
        raise ServerError(f"{client.url}: is not a server of Luce")
    return Reading(time.monotonic(), models, props, slots, samples)


def summary(now: Reading, before: Reading | None) -> Json:
    """What is shown: numbers of this moment, and rates since `before`, null without it.

    model; models: id, state, pinned; busy: how many slots are; slots: id, busy, prompt and prompt_done in tokens,
    generated; queued sequences; per_second: generated and prompt tokens, requests; time_to_first_token in seconds, the
    mean of the replies since `before`, null without any; devices: device, layers, weights, free and total bytes; cache:
    ram and disk in bytes, hits, misses; draft: on, acceptance; null without drafts; daemons: device, up, restarts
    """
    if before is not None and before.name != now.name:
        before = None
    runtime = now.props["runtime"]
    return {
        "model": now.name,
        "models": [{key: model.get(key) for key in ("id", "state", "pinned")} for model in now.models],
        "busy": sum(bool(slot.get("is_processing")) for slot in now.slots),
        "slots": [_slot(slot) for slot in now.slots],
        "queued": now.total("luce_queued_sequences"),
        "per_second": {rate: _rate(now, before, name, labels) for rate, (name, labels) in _RATES.items()},
        "time_to_first_token": _mean(now, before, "luce_time_to_first_token_seconds"),
        "devices": [_device(shard) for shard in runtime.get("target_sharding", [])],
        "cache": {
            "ram": now.total("luce_prefix_cache_bytes", tier="ram"),
            "disk": now.total("luce_prefix_cache_bytes", tier="disk"),
            "hits": now.total("luce_prefix_cache_hits_total"),
            "misses": now.total("luce_prefix_cache_misses_total"),
        },
        "draft": _draft(now),
        "daemons": [{k: daemon.get(k) for k in ("device", "up", "restarts")} for daemon in runtime.get("daemons", [])],
    }


def _slot(slot: Json) -> Json:
    token = slot.get("next_token") or {}
    return {
        "id": slot.get("id"),
        "busy": bool(slot.get("is_processing")),
        "prompt": slot.get("n_prompt_tokens", 0),
        "prompt_done": slot.get("n_prompt_tokens_processed", 0),
        "generated": token.get("n_decoded", 0),
    }


def _device(shard: Json) -> Json:
    memory = shard.get("memory") or {}
    return {
        "device": shard.get("device"),
        "layers": shard.get("layers"),
        "weights": shard.get("weights"),
        "free": memory.get("free"),
        "total": memory.get("total"),
    }


def _draft(now: Reading) -> Json | None:
    if "luce_draft_enabled" not in now.samples:
        return None
    proposed = now.total("luce_draft_tokens_total")
    acceptance = now.total("luce_draft_accepted_tokens_total") / proposed if proposed else None
    return {"on": bool(now.total("luce_draft_enabled")), "acceptance": acceptance}


def _rate(now: Reading, before: Reading | None, name: str, labels: Mapping[str, str]) -> float | None:
    """What a counter grew by in a second; a server that was started anew counts from 0."""
    if before is None or now.at <= before.at:
        return None
    return max(0.0, now.total(name, **labels) - before.total(name, **labels)) / (now.at - before.at)


def _mean(now: Reading, before: Reading | None, name: str) -> float | None:
    """The mean of a histogram's values since `before`; of all without it."""
    count, total = (now.total(f"{name}_{part}") for part in ("count", "sum"))
    if before is not None and before.total(f"{name}_count") <= count:
        count, total = count - before.total(f"{name}_count"), total - before.total(f"{name}_sum")
    return total / count if count else None
