"""Responses of /v1/responses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from luce.api import Model
from luce.config.sampling import SAMPLERS
from luce.engine.events import Finished, Token
from luce.errors import LuceError
from luce.server.choice import Choice
from luce.server.errors import openai_error
from luce.server.finish_details import finish_details, was_cut
from luce.server.logprobs import scored
from luce.server.output_items import OutputItems, ReasoningForm
from luce.server.prepare import Job
from luce.server.response import Json, ResponseBuilder
from luce.server.responses_tools import Offered
from luce.server.stream import ServerSentEvent
from luce.server.text_tokens import TextTokens
from luce.server.thinking_signature import sign
from luce.text.reply_parser import Part, ReplyParser, joined


@dataclass(frozen=True)
class ResponsesDetails:
    """Job.details of /v1/responses."""

    #: fields of the request that the response repeats
    echo: Mapping[str, Any]
    #: the tools that the model is shown, by its names for them
    tools: Mapping[str, Offered]
    #: reasoning is shown as a summary
    summarised: bool
    #: reasoning comes encrypted as well
    encrypted: bool


class ResponsesResponse(ResponseBuilder):
    """/v1/responses: one reply, of output items."""

    prefix = "resp_"

    def __init__(self, job: Job, model: Model) -> None:
        super().__init__(job, model)
        assert isinstance(job.details, ResponsesDetails)
        self._details = job.details
        self._sequence_number = 0
        self._items = self._new_items()
        #: None: the request does not ask for log probabilities
        self._text_tokens = None if job.logprobs is None else TextTokens(model.tokenizer.is_control)

    def _parser(self, index: int) -> ReplyParser:
        return self._model.chat.reply_parser(self._job.prompts[index], self._job.tools)

    def _parts(self, choice: Choice, token: Token) -> list[Part]:
        parts = super()._parts(choice, token)
        return parts if self._text_tokens is None else self._text_tokens.of(parts, token, token.text)

    def _last_parts(self, choice: Choice, finished: Finished) -> list[Part]:
        parts = super()._last_parts(choice, finished)
        return parts if self._text_tokens is None else self._text_tokens.of(parts, None, finished.text)

    def _new_items(self) -> OutputItems:
        encrypt = partial(sign, model=self._model.fingerprint, carries=True) if self._details.encrypted else None
        form = ReasoningForm(self._details.summarised, encrypt)
        return OutputItems(self._event, self._details.tools, form, partial(scored, tokenizer=self._model.tokenizer))

    # --- stream

    def opening(self, index: int) -> Iterable[ServerSentEvent]:
        """The response without its output, twice, as the protocol has it."""
        yield self._event("response.created", response=self._response("in_progress", []))
        yield self._event("response.in_progress", response=self._response("in_progress", []))

    def ping(self) -> bytes:
        """The response once more: Codex and others close a stream in which no event comes, whatever comments do."""
        response = self._response("in_progress", self._items.closed)
        return self._event("response.in_progress", response=response).encoded()

    def extension(self, index: int, parts: Sequence[Part], tokens: Sequence[Token] = ()) -> Iterable[ServerSentEvent]:
        """The events of the items that grow."""
        return self._items.extend(parts)

    def closing(self, index: int) -> Iterable[ServerSentEvent]:
        """The end of the last item."""
        return self._items.close(cut=self._status() == "incomplete")

    def ending(self) -> Iterable[ServerSentEvent]:
        """The whole response."""
        status = self._status()
        yield self._event(f"response.{status}", response=self._response(status, self._items.closed))

    @staticmethod
    def refusal(error: LuceError) -> Iterable[ServerSentEvent]:
        """The event of the protocol that belongs to no response."""
        body = openai_error(error)["error"]
        what = {"code": body["code"] or body["type"], "message": body["message"], "param": body["param"]}
        return (ServerSentEvent({"type": "error", **what, "sequence_number": 0}, "error"),)

    def failure(self, error: LuceError) -> Iterable[ServerSentEvent]:
        """The response with its error, and the items before it."""
        body = openai_error(error)["error"]
        what = {"code": body["code"] or body["type"], "message": body["message"]}
        response = {**self._response("failed", self._items.closed), "error": what}
        return (self._event("response.failed", response=response),)

    def _event(self, kind: str, /, **fields: Any) -> ServerSentEvent:
        number = self._sequence_number
        self._sequence_number += 1
        return ServerSentEvent({"type": kind, "sequence_number": number, **fields}, kind)

    # --- whole reply

    def reply(self) -> Json:
        """The response. Takes time in proportion to its size."""
        items, status = self._new_items(), self._status()
        for _ in (*items.extend(joined(self.choices[0].parts)), *items.close(cut=status == "incomplete")):
            pass
        return self._response(status, items.closed)

    def _status(self) -> str:
        return "incomplete" if was_cut(self.choices[0]) else "completed"

    def _response(self, status: str, output: list[Json]) -> Json:
        params = self._job.params
        ended = status in ("completed", "incomplete")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._job.model,
            "output": list(output),
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            **{name: getattr(params, name) for name in SAMPLERS if name != "max_tokens"},
            "top_logprobs": self._job.logprobs or 0,
            "truncation": "disabled",
            **self._details.echo,
            "usage": self._usage() if ended else None,
            **({"finish_details": finish_details(self.choices[0], self._job)} if ended else {}),
        }

    def _usage(self) -> Json:
        (choice,) = self.choices
        assert choice.finished is not None
        prompt, generated = choice.reading.original, choice.finished.timings.predicted_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": choice.finished.timings.cached_tokens},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": choice.parser.reasoning_tokens},
            "total_tokens": prompt + generated,
        }
