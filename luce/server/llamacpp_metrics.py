"""The figures of a model under the names that llama.cpp's server gives them, for dashboards made for it.

Names and types: "Available metrics" of llama.cpp's tools/server/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from luce.engine.drafted import DraftStats
from luce.engine.engine_options import EngineStats


def llamacpp_metrics(stats: EngineStats) -> Iterator[Metric]:
    """The metrics that Luce has too. Seconds, and tokens per second, are those of sequences that have finished."""
    done, draft = stats.finished, stats.draft or DraftStats()
    computed = done.prompt_tokens - done.cached_tokens
    for name, text, count in (
        ("prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens),
        ("prompt_seconds", "Seconds that prompts took.", done.prompt),
        ("tokens_predicted", "Tokens generated.", stats.predicted_tokens),
        ("tokens_predicted_seconds", "Seconds that replies took behind their prompts.", done.predicted),
        ("n_decode", "Steps (forward passes).", stats.steps),
        ("spec_decode_num_draft_tokens", "Draft tokens that were verified.", draft.proposed),
        ("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", draft.accepted),
        ("spec_decode_num_drafts", "Verifications of a sequence's draft tokens.", draft.steps),
    ):
        yield CounterMetricFamily(f"llamacpp:{name}", text, count)
    for name, text, value in (
        ("prompt_tokens_seconds", "Prompt tokens computed per second.", _rate(computed, done.prompt)),
        ("predicted_tokens_seconds", "Tokens generated per second.", _rate(done.predicted_tokens, done.predicted)),
        ("requests_processing", "Sequences that have a slot.", stats.running),
        ("requests_deferred", "Sequences that wait for a slot.", stats.waiting),
    ):
        yield GaugeMetricFamily(f"llamacpp:{name}", text, value)


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0
