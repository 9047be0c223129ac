"""Responses of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from luce.api import Model
from luce.engine.events import Finished, Token
from luce.server.choice import Choice
from luce.server.logprobs import scored
from luce.server.openai_response import OpenAIResponse
from luce.server.prepare import Job
from luce.server.response import Json, new_id
from luce.server.shown_reasoning import ShownReasoning
from luce.server.stream import ServerSentEvent
from luce.text.reply_parser import CallArguments, CallStarted, Part, ReasoningPart, ReplyParser, TextPart


class ChatResponse(OpenAIResponse):
    """/v1/chat/completions."""

    whole_object = "chat.completion"
    prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"

    def __init__(self, job: Job, model: Model) -> None:
        super().__init__(job, model)
        markers = model.chat.reasoning_markers
        self._shown = [ShownReasoning(job.reasoning_format, markers) for _ in self.choices]

    def _parser(self, index: int) -> ReplyParser:
        return self._model.chat.reply_parser(self._job.prompts[index // self._job.n], self._job.tools)

    def _parts(self, choice: Choice, token: Token) -> list[Part]:
        return self._shown[choice.index].of(super()._parts(choice, token))

    def _last_parts(self, choice: Choice, finished: Finished) -> list[Part]:
        return self._shown[choice.index].of(super()._last_parts(choice, finished))

    def _opening(self, index: int) -> Json:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def opening(self, index: int) -> Iterable[ServerSentEvent]:
        """The first chunk; that of the first reply has the ids of the prompt, as vLLM sends them."""
        return (self._chunk(self._opening(index), **({} if index else self._request_ids())),)

    def _request_ids(self) -> Json:
        """As vLLM: all choices of a chat have one prompt."""
        return {"prompt_token_ids": list(self.choices[0].prompt)} if self._job.token_ids else {}

    def _chunk_choice(self, index: int, parts: Sequence[Part] | None) -> Json:
        reasoning = "".join([part.text for part in parts or () if isinstance(part, ReasoningPart)])
        content = "".join([part.text for part in parts or () if isinstance(part, TextPart)])
        calls = _call_deltas(parts or ())
        fields: Json = self._reasoning(reasoning) if reasoning else {}
        if calls:
            fields["tool_calls"] = calls
        if content or (parts is not None and not fields):
            fields["content"] = content
        return {"index": index, "delta": fields, "logprobs": None, "finish_reason": None}

    def _logprobs(self, choice: Choice, tokens: Sequence[Token]) -> Json:
        return {"content": [scored(token, self._model.tokenizer) for token in tokens], "refusal": None}

    def _whole(self, choice: Choice) -> Json:
        calls = [{key: call[key] for key in ("id", "type", "function")} for call in _call_deltas(choice.parts)]
        return {
            "index": choice.index,
            "message": {
                "role": "assistant",
                "content": None if calls and not choice.content else choice.content,
                "refusal": None,
                **(self._reasoning(choice.reasoning) if choice.reasoning else {}),
                **({"tool_calls": calls} if calls else {}),
            },
            "logprobs": self._logprobs(choice, choice.tokens) if self._job.logprobs is not None else None,
            **self._ids(choice),
        }

    def _reasoning(self, text: str) -> Json:
        """The reasoning, under all names that clients read."""
        details = [{"type": "reasoning.text", "text": text}] if self._model.config.reasoning_details else None
        return {"reasoning_content": text, "reasoning": text, **({"reasoning_details": details} if details else {})}


def _call_deltas(parts: Iterable[Part]) -> list[Json]:
    """The `tool_calls` of a chunk: for each call its index, with the parts that are new. Those of all parts of a reply
    are its calls."""
    found: dict[int, Json] = {}
    for part in parts:
        if isinstance(part, CallStarted):
            head = {"index": part.call, "id": part.id or new_id("call_"), "type": "function"}
            found[part.call] = {**head, "function": {"name": part.name, "arguments": ""}}
        elif isinstance(part, CallArguments):
            entry = found.setdefault(part.call, {"index": part.call, "function": {"arguments": ""}})
            entry["function"]["arguments"] += part.fragment
    return list(found.values())
