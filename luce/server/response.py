"""OpenAI response objects and stream chunks, built from the events of a job's sequences: the part of both endpoints."""

from __future__ import annotations

import math
import secrets
import string
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from luce.api import Model
from luce.engine.events import (
    Event,
    Finished,
    FinishReason,
    Progress,
    PromptScores,
    Started,
    Timings,
    Token,
    Tokens,
)
from luce.server.choice import Choice
from luce.server.prepare import Job
from luce.text.reasoning import Delta

Json = dict[str, Any]

_BASE62 = string.digits + string.ascii_letters
_LENGTH_CAUSES = {
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT: "context",
    FinishReason.DEADLINE: "deadline",
    FinishReason.SHUTDOWN: "shutdown",
    FinishReason.CANCELLED: "cancelled",
}
# JSON has no infinity; OpenAI sends this for a token that cannot occur.
_LEAST_LOGPROB = -9999.0


def new_id(prefix: str) -> str:
    """`prefix` and 24 random base62 characters."""
    return prefix + "".join(secrets.choice(_BASE62) for _ in range(24))


class ResponseBuilder(ABC):
    """Builds the JSON objects of one response. `add` takes every event first; the other methods only read."""

    whole_object: str
    chunk_object: str
    prefix: str

    def __init__(self, job: Job, model: Model, version: str) -> None:
        self._job = job
        self._model = model
        self._head = {
            "id": new_id(self.prefix),
            "created": int(time.time()),
            "model": job.model,
            "system_fingerprint": f"luce-{version}-{model.fingerprint}",
        }
        self.choices = [
            Choice(i, job.prompts[i // job.n], job.echoes[i // job.n] if job.echoes else None, model)
            for i in range(job.choices)
        ]

    # --- events

    def add(self, index: int, event: Event) -> Delta:
        """Take an event; returns the text that it adds to the reply."""
        choice = self.choices[index]
        if isinstance(event, Tokens):
            if choice.first_token is None:
                choice.first_token = time.monotonic()
            choice.tokens += event.tokens
            pieces = [choice.push(token.text) for token in event.tokens]
        elif isinstance(event, Finished):
            choice.finished = event
            pieces = choice.flush(event.text)
        else:
            if isinstance(event, Started):
                choice.started = time.monotonic()
            elif isinstance(event, Progress):
                choice.cached = event.cached
            elif isinstance(event, PromptScores):
                choice.scores = event.tokens
            return Delta("")
        delta = Delta("".join([p.content for p in pieces]), "".join([p.reasoning for p in pieces]))
        choice.deltas.append(delta)
        return delta

    # --- stream

    @abstractmethod
    def opening(self, index: int) -> Json | None:
        """The first chunk of a reply, sent as soon as it is admitted; None: no such chunk."""

    @abstractmethod
    def _chunk_choice(self, index: int, delta: Delta | None) -> Json:
        """A choice of a chunk; `delta` None: without new text."""

    @abstractmethod
    def _logprobs(self, choice: Choice, tokens: Sequence[Token]) -> Json:
        """The `logprobs` of generated tokens; called once for each, in order."""

    def scored(self, index: int) -> Json | None:
        """The chunk after PromptScores. Takes time in proportion to the prompt."""
        return None

    def chunk(self, index: int, delta: Delta, tokens: Sequence[Token] = ()) -> Json | None:
        """The chunk for one step's text and tokens, None if it would be empty."""
        per_token = self._job.logprobs is not None or self._job.token_ids
        if not any(delta) and not (tokens and per_token):
            return None
        choice = self._chunk_choice(index, delta)
        if self._job.logprobs is not None and tokens:
            choice["logprobs"] = self._logprobs(self.choices[index], tokens)
        if self._job.token_ids:
            choice["token_ids"] = [token.id for token in tokens]
        chunk = self._chunk(choice)
        if self._job.running_timings:
            chunk["timings"] = timings([self._so_far(self.choices[index])])
        return chunk

    def progress(self, index: int, event: Progress) -> Json:
        """The chunk for the progress of the prompt."""
        started = self.choices[index].started
        seconds = 0.0 if started is None else time.monotonic() - started
        figures = {
            "total": event.total,
            "cache": event.cached,
            "processed": event.done,
            "time_ms": round(seconds * 1000, 3),
        }
        return {**self._chunk(self._chunk_choice(index, None)), "prompt_progress": figures}

    def closing(self, index: int) -> Json:
        """The chunk that ends a reply."""
        choice = self.choices[index]
        return self._chunk({**self._chunk_choice(index, None), **self._ending(choice)})

    def usage_chunk(self) -> Json:
        """The last chunk if the request sets stream_options.include_usage."""
        return {**self._chunk(), "usage": self._usage(), "timings": self._timings()}

    def _chunk(self, *choices: Json) -> Json:
        usage: Json = {"usage": None} if self._job.include_usage else {}
        return {**self._head, "object": self.chunk_object, "choices": list(choices), **usage}

    # --- whole reply

    @abstractmethod
    def _whole(self, choice: Choice) -> Json:
        """A finished choice, without its finish reason."""

    def reply(self) -> Json:
        """The whole reply. Takes time in proportion to its size."""
        return {
            **self._head,
            "object": self.whole_object,
            "choices": [{**self._whole(choice), **self._ending(choice)} for choice in self.choices],
            "usage": self._usage(),
            "timings": self._timings(),
            **self._request_ids(),
        }

    def _request_ids(self) -> Json:
        """The ids of the prompt, where they belong to the whole response."""
        return {}

    def _ending(self, choice: Choice) -> Json:
        finished = choice.finished
        assert finished is not None
        cause = _LENGTH_CAUSES.get(finished.reason)
        details = {
            "cause": cause or finished.reason.value,
            "stop": finished.stop,
            "seed": finished.seed,
            "thinking_tokens": choice.reasoning_tokens,
            "content_tokens": finished.timings.predicted_tokens - choice.reasoning_tokens,
            "cache": {"tier": finished.timings.cache_tier},
        }
        return {"finish_reason": "length" if cause else "stop", "finish_details": details}

    def _ids(self, choice: Choice) -> Json:
        """The ids of a choice."""
        return {"token_ids": [token.id for token in choice.tokens]} if self._job.token_ids else {}

    def _usage(self) -> Json:
        done = [choice.finished.timings for choice in self.choices if choice.finished is not None]
        prompt = sum(len(ids) for ids in self._job.prompts)
        completion = sum(part.predicted_tokens for part in done)
        cached = sum(part.cached_tokens for part in done[:: self._job.n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in self.choices),
                "accepted_prediction_tokens": sum(part.accepted for part in done),
                "rejected_prediction_tokens": sum(part.drafted - part.accepted for part in done),
            },
        }

    def _timings(self) -> Json:
        return timings(choice.finished.timings for choice in self.choices if choice.finished is not None)

    def _so_far(self, choice: Choice) -> Timings:
        now = time.monotonic()
        first, started = choice.first_token or now, choice.started or now
        return Timings(
            prompt=first - started,
            predicted=now - first,
            prompt_tokens=len(choice.prompt),
            predicted_tokens=len(choice.tokens),
            cached_tokens=choice.cached,
        )

    def log_fields(self, arrived: float) -> Json:
        """Fields about tokens for the log line; `arrived`: monotonic time of the request."""
        finished = [choice.finished for choice in self.choices if choice.finished is not None]
        firsts = [choice.first_token for choice in self.choices if choice.first_token is not None]
        out = sum(len(choice.tokens) for choice in self.choices)
        predicted = max((end.timings.predicted for end in finished), default=0.0)
        return {
            "prompt": sum(len(ids) for ids in self._job.prompts),
            "cached": self._cached(),
            "out": out,
            "finish": ",".join(sorted({end.reason.value for end in finished})) or None,
            "queue": max((end.timings.queued for end in finished), default=None),
            "ttft": min(firsts) - arrived if firsts else None,
            "decode": f"{out / predicted:.1f}t/s" if predicted else None,
        }

    def _cached(self) -> str:
        """Tokens from the prefix cache, and the tier of most of them."""
        done = [choice.finished.timings for choice in self.choices if choice.finished is not None]
        most = max(done, key=lambda timings: timings.cached_tokens, default=Timings())
        return f"{sum(choice.cached for choice in self.choices)}/{most.cache_tier}"


def timings(parts: Iterable[Timings]) -> Json:
    """llama.cpp's `timings` of one or several sequences (times and counts added up)."""
    parts = list(parts)
    cached = sum(part.cached_tokens for part in parts)
    prompt_n = sum(part.prompt_tokens for part in parts) - cached
    predicted_n = sum(part.predicted_tokens for part in parts)
    prompt, predicted = sum(part.prompt for part in parts), sum(part.predicted for part in parts)
    return {
        "cache_n": cached,
        "prompt_n": prompt_n,
        "prompt_ms": round(prompt * 1000, 3),
        "prompt_per_token_ms": round(prompt * 1000 / prompt_n, 3) if prompt_n else 0.0,
        "prompt_per_second": round(prompt_n / prompt, 3) if prompt > 0 else 0.0,
        "predicted_n": predicted_n,
        "predicted_ms": round(predicted * 1000, 3),
        "predicted_per_token_ms": round(predicted * 1000 / predicted_n, 3) if predicted_n else 0.0,
        "predicted_per_second": round(predicted_n / predicted, 3) if predicted > 0 else 0.0,
        "queue_ms": round(sum(part.queued for part in parts) * 1000, 3),
        "draft_n": sum(part.drafted for part in parts),
        "draft_n_accepted": sum(part.accepted for part in parts),
    }


def finite(logprob: float | None) -> float | None:
    """A log probability as a JSON number, None for NaN."""
    return None if logprob is None else max(logprob, _LEAST_LOGPROB) if not math.isnan(logprob) else None
