"""Responses of llama.cpp's own endpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from luce.api import Model
from luce.config.sampling import SAMPLERS
from luce.engine.events import FinishReason, Progress, Token
from luce.server.choice import Choice
from luce.server.logprobs import finite
from luce.server.openai_response import timings
from luce.server.prepare import Job
from luce.server.response import Json, ResponseBuilder
from luce.server.stream import ServerSentEvent
from luce.text.reply_parser import Part, TextPart

_STOP_TYPES = {
    FinishReason.EOS: "eos",
    FinishReason.STOP: "word",
    FinishReason.LENGTH: "limit",
    FinishReason.CONTEXT: "limit",
    FinishReason.DEADLINE: "limit",
}
#: sampling values that llama.cpp names otherwise
_NAMES = {"repetition_penalty": "repeat_penalty"}


@dataclass(frozen=True)
class NativeDetails:
    """Job.details of llama.cpp's own endpoints."""

    #: the text of each prompt; empty for a stream
    prompts: tuple[str, ...]
    #: the whole reply is a list
    listed: bool
    #: the whole reply has the ids of its tokens; a stream always has them
    returns_tokens: bool
    #: the fields of the reply, by paths with slashes; None: all
    fields: list[str] | None


class NativeResponse(ResponseBuilder):
    """/completion and /infill: an object for each reply; a stream ends without a mark."""

    prefix = "cmpl-"

    def __init__(self, job: Job, model: Model) -> None:
        super().__init__(job, model)
        assert isinstance(job.details, NativeDetails)
        self._details = job.details

    # --- stream

    def opening(self, index: int) -> Iterable[ServerSentEvent]:
        """Nothing."""
        return ()

    def extension(self, index: int, parts: Sequence[Part], tokens: Sequence[Token] = ()) -> Iterable[ServerSentEvent]:
        """One event for a step."""
        if not parts and not tokens:
            return
        choice = self.choices[index]
        event = self._event(choice, _text(parts), [token.id for token in tokens])
        if self._job.logprobs is not None and tokens:
            event["completion_probabilities"] = self._probabilities(tokens)
        if self._job.running_timings:
            event["timings"] = timings([choice.so_far()])
        yield ServerSentEvent(event)

    def progress(self, index: int, event: Progress) -> Iterable[ServerSentEvent]:
        """One event, if the request sets `return_progress`."""
        if self._job.progress:
            choice = self.choices[index]
            yield ServerSentEvent({**self._event(choice, "", []), "prompt_progress": choice.prompt_progress(event)})

    def closing(self, index: int) -> Iterable[ServerSentEvent]:
        """The last event of a reply: its figures, without its text."""
        return (ServerSentEvent(self._chosen({**self._figures(self.choices[index]), "content": "", "tokens": []})),)

    def ending(self) -> Iterable[ServerSentEvent]:
        """Nothing."""
        return ()

    def _event(self, choice: Choice, content: str, tokens: list[int]) -> Json:
        return {
            "index": choice.index,
            "content": content,
            "tokens": tokens,
            "stop": False,
            "tokens_predicted": len(choice.tokens),
            "tokens_evaluated": len(choice.prompt),
        }

    # --- whole reply

    def reply(self) -> Any:
        """The object of the reply, or a list of several. Takes time in proportion to its size."""
        found = [self._chosen(self._whole(choice)) for choice in self.choices]
        return found if self._details.listed else found[0]

    def _whole(self, choice: Choice) -> Json:
        tokens = [token.id for token in choice.tokens] if self._details.returns_tokens else []
        whole = {
            **self._figures(choice),
            "content": choice.content,
            "tokens": tokens,
            "prompt": self._details.prompts[choice.index // self._job.n],
        }
        if self._job.logprobs is not None:
            whole["completion_probabilities"] = self._probabilities(choice.tokens)
        return whole

    def _figures(self, choice: Choice) -> Json:
        finished = choice.finished
        assert finished is not None
        word = finished.stop if isinstance(finished.stop, str) else None
        kind = _STOP_TYPES.get(finished.reason, "none")
        return {
            "index": choice.index,
            "stop": True,
            "model": self._job.model,
            "tokens_predicted": finished.timings.predicted_tokens,
            "tokens_evaluated": len(choice.prompt),
            "generation_settings": self._settings(finished.seed),
            "has_new_line": any("\n" in part.text for part in choice.parts if isinstance(part, TextPart)),
            "truncated": finished.reason is FinishReason.CONTEXT,
            # A token that ends the reply is no word.
            "stop_type": "eos" if kind == "word" and word is None else kind,
            "stopping_word": word or "",
            "tokens_cached": finished.timings.cached_tokens,
            "timings": timings([finished.timings]),
        }

    def _settings(self, seed: int) -> Json:
        job, params = self._job, self._job.params
        values = {_NAMES.get(name, name): getattr(params, name) for name in SAMPLERS}
        limit = -1 if params.max_tokens is None else params.max_tokens
        return {
            **values,
            "n_ctx": self._model.context,
            "n_predict": limit,
            "max_tokens": limit,
            "seed": seed,
            "logit_bias": [{"token": token, "bias": bias} for token, bias in params.logit_bias.items()],
            "ignore_eos": params.ignore_eos,
            "stop": list(job.stops),
            "stream": job.stream,
            "n_probs": job.logprobs or 0,
            "timings_per_token": job.running_timings,
        }

    def _probabilities(self, tokens: Sequence[Token]) -> list[Json]:
        return [
            {
                **self._probability(token.id, token.logprob),
                "top_logprobs": [self._probability(*one) for one in token.top],
            }
            for token in tokens
        ]

    def _probability(self, token: int, logprob: float | None) -> Json:
        tokenizer = self._model.tokenizer
        data = list(tokenizer.token_bytes(token))
        return {"id": token, "token": tokenizer.token_text(token), "bytes": data, "logprob": finite(logprob)}

    def _chosen(self, reply: Json) -> Json:
        """The fields that the request names; one inside another has its whole path as its name."""
        if self._details.fields is None:
            return reply
        found = {}
        for path in self._details.fields:
            value: Any = reply
            for key in path.split("/"):
                value = value.get(key, _MISSING) if isinstance(value, dict) else _MISSING
            if value is not _MISSING:
                found[path] = value
        return found


_MISSING = object()


def _text(parts: Sequence[Part]) -> str:
    return "".join([part.text for part in parts if isinstance(part, TextPart)])
