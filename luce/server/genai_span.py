"""What a trace says of a request: the attributes of OpenTelemetry's semantic conventions for generative AI, and the
stages of its replies. Nothing that a client sent or a model wrote is in it, but the name of the model.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from luce.config.sampling import SAMPLERS, SamplingParams
from luce.server.prepare import Job
from luce.server.response import ResponseBuilder


@dataclass(frozen=True)
class Stage:
    """One stage of a reply, as a span below that of the request."""

    #: queue, prefill or decode
    name: str
    choice: int
    #: monotonic times
    start: float
    end: float


@dataclass(frozen=True)
class GenAISpan:
    """The span of a request whose job was made."""

    #: `chat MODEL` or `text_completion MODEL`
    name: str
    attributes: dict[str, Any]
    stages: tuple[Stage, ...]


def genai_span(job: Job, builder: ResponseBuilder, arrived: float, now: float) -> GenAISpan:
    """The span of a request that ends at `now`; both times are monotonic."""
    operation = "chat" if job.chat else "text_completion"
    finished = [choice.finished for choice in builder.choices if choice.finished is not None]
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "luce",
        "gen_ai.request.model": job.model,
        "gen_ai.response.model": job.model,
        "gen_ai.response.id": builder.id,
        "gen_ai.request.stream": job.stream,
        "gen_ai.response.finish_reasons": [end.reason.value for end in finished],
        "gen_ai.usage.input_tokens": sum(map(len, job.prompts)),
        "gen_ai.usage.output_tokens": sum(len(choice.tokens) for choice in builder.choices),
        "gen_ai.usage.cache_read.input_tokens": sum(choice.cached for choice in builder.choices),
        "gen_ai.output.type": "json" if job.reply_format is not None else "text",
    }
    if job.choices != 1:
        attributes["gen_ai.request.choice.count"] = job.choices
    attributes |= {f"gen_ai.request.{name}": value for name, value in _sampling(job.params)}
    firsts = [choice.first_token for choice in builder.choices if choice.first_token is not None]
    if firsts:
        attributes["gen_ai.response.time_to_first_chunk"] = min(firsts) - arrived
    stages = []
    for choice in builder.choices:
        started, first = choice.started, choice.first_token
        stages.append(Stage("queue", choice.index, arrived, now if started is None else started))
        if started is not None:
            stages.append(Stage("prefill", choice.index, started, now if first is None else first))
        if first is not None:
            stages.append(Stage("decode", choice.index, first, now))
    return GenAISpan(f"{operation} {job.model}", attributes, tuple(stages))


def _sampling(params: SamplingParams) -> list[tuple[str, Any]]:
    # Samplers that the conventions do not know are named as the others.
    values = [(name, getattr(params, name)) for name in SAMPLERS]
    return [(name, value) for name, value in values if value is not None]
