"""OpenAI's response objects and stream chunks: the part of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

from luce import __version__
from luce.api import Model
from luce.engine.events import Progress, Timings, Token
from luce.server.choice import Choice
from luce.server.finish_details import finish_details, was_cut
from luce.server.prepare import Job
from luce.server.response import Json, ResponseBuilder
from luce.server.stream import ServerSentEvent
from luce.text.reply_parser import CallEnded, Part


class OpenAIResponse(ResponseBuilder):
    """Chunks of one choice each, and a usage over all of them."""

    whole_object: str
    chunk_object: str
    end = b"data: [DONE]\n\n"

    def __init__(self, job: Job, model: Model) -> None:
        super().__init__(job, model)
        self._head = {
            "id": self.id,
            "created": self.created,
            "model": job.model,
            "system_fingerprint": f"luce-{__version__}-{model.fingerprint}",
        }

    # --- stream

    def opening(self, index: int) -> Iterable[ServerSentEvent]:
        """The first chunk of a reply; none if it would be empty."""
        choice = self._opening(index)
        return () if choice is None else (self._chunk(choice),)

    @abstractmethod
    def _opening(self, index: int) -> Json | None:
        """The choice of a reply's first chunk."""

    @abstractmethod
    def _chunk_choice(self, index: int, parts: Sequence[Part] | None) -> Json:
        """A choice of a chunk; `parts` None: without a part of the reply."""

    @abstractmethod
    def _logprobs(self, choice: Choice, tokens: Sequence[Token]) -> Json:
        """The `logprobs` of generated tokens; called once for each, in order."""

    def extension(self, index: int, parts: Sequence[Part], tokens: Sequence[Token] = ()) -> Iterable[ServerSentEvent]:
        """One chunk for a step; none if it would be empty."""
        per_token = self._job.logprobs is not None or self._job.token_ids
        choice = self._chunk_choice(index, parts)
        # The end of a call has no event.
        if all(isinstance(part, CallEnded) for part in parts) and not (tokens and per_token):
            return
        if self._job.logprobs is not None and tokens:
            choice["logprobs"] = self._logprobs(self.choices[index], tokens)
        if self._job.token_ids:
            choice["token_ids"] = [token.id for token in tokens]
        running = {"timings": timings([self.choices[index].so_far()])} if self._job.running_timings else {}
        yield self._chunk(choice, **running)

    def progress(self, index: int, event: Progress) -> Iterable[ServerSentEvent]:
        """One chunk, if the request sets `return_progress`."""
        if not self._job.progress:
            return
        yield self._chunk(self._chunk_choice(index, None), prompt_progress=self.choices[index].prompt_progress(event))

    def closing(self, index: int) -> Iterable[ServerSentEvent]:
        """The chunk with the finish reason."""
        return (self._chunk({**self._chunk_choice(index, None), **self._ending(self.choices[index])}),)

    def ending(self) -> Iterable[ServerSentEvent]:
        """The usage, if the request sets `stream_options.include_usage`."""
        if self._job.include_usage:
            yield self._chunk(usage=self._usage(self._finished()), timings=timings(self._finished()))

    def _chunk(self, *choices: Json, **fields: Json) -> ServerSentEvent:
        usage: Json = {"usage": None} if self._job.include_usage else {}
        if self._job.running_usage:
            usage = {"usage": self._usage([choice.so_far() for choice in self.choices])}
        return ServerSentEvent({**self._head, "object": self.chunk_object, "choices": list(choices), **usage, **fields})

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
            "usage": self._usage(self._finished()),
            "timings": timings(self._finished()),
            **self._request_ids(),
        }

    def _request_ids(self) -> Json:
        """The ids of the prompt, where they belong to the whole response."""
        return {}

    def _ending(self, choice: Choice) -> Json:
        reason = "length" if was_cut(choice) else "tool_calls" if choice.parser.calls else "stop"
        if reason == "tool_calls" and self._job.named_tool and "openai" in self._model.config.compat:
            reason = "stop"
        return {"finish_reason": reason, "finish_details": finish_details(choice, self._job)}

    def _ids(self, choice: Choice) -> Json:
        """The ids of a choice."""
        return {"token_ids": [token.id for token in choice.tokens]} if self._job.token_ids else {}

    def _usage(self, done: Sequence[Timings]) -> Json:
        """The usage of all replies, from the timings of each."""
        own = _lucebox(done) if "lucebox" in self._model.config.compat else {}
        prompt = sum(reading.original for reading in self._job.readings)
        effective = sum(len(ids) for ids in self._job.prompts)
        completion = sum(part.predicted_tokens for part in done)
        cached = sum(part.cached_tokens for part in done[:: self._job.n])
        accepted = sum(part.accepted - part.forced_accepted for part in done)
        rejected = sum(_refused(part) for part in done)
        rate = {"accept_rate": round(accepted / (accepted + rejected), 4)} if accepted + rejected else {}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": cached,
                **({} if effective == prompt else {"effective_tokens": effective}),
            },
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.parser.reasoning_tokens for choice in self.choices),
                # What is forced is no prediction.
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            },
            **rate,
            **own,
        }


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
        **({"draft_state": parts[-1].draft_state} if parts and parts[-1].draft_state else {}),
    }


def _lucebox(parts: Sequence[Timings]) -> Json:
    """What Lucebox has in `usage`: its benchmarks read it there."""
    seconds, drafted = sum(part.predicted for part in parts), sum(part.drafted for part in parts)
    speed = round(sum(part.predicted_tokens for part in parts) / seconds, 3) if seconds > 0 else 0.0
    return {
        "timings": {
            "prefill_ms": round(sum(part.prompt for part in parts) * 1000, 3),
            "decode_ms": round(seconds * 1000, 3),
            "decode_tokens_per_sec": speed,
        },
        "accept_rate": round(sum(part.accepted for part in parts) / drafted, 4) if drafted else 0.0,
    }


def _refused(part: Timings) -> int:
    """Draft tokens of a drafter that are not in the reply."""
    return (part.drafted - part.forced_drafted) - (part.accepted - part.forced_accepted)
