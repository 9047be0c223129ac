"""Responses of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from luce.api import Model
from luce.engine.events import Token
from luce.server.choice import Choice
from luce.server.prepare import Job
from luce.server.response import Json, ResponseBuilder, finite
from luce.text.reasoning import Delta


class ChatResponse(ResponseBuilder):
    """/v1/chat/completions."""

    whole_object = "chat.completion"
    prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"

    def __init__(self, job: Job, model: Model, version: str) -> None:
        super().__init__(job, model, version)
        for choice in self.choices:
            choice.splitter = model.chat.splitter(choice.prompt)

    def opening(self, index: int) -> Json | None:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._chunk(choice) | ({} if index else self._request_ids())

    def _request_ids(self) -> Json:
        """As vLLM: all choices of a chat have one prompt."""
        return {"prompt_token_ids": list(self.choices[0].prompt)} if self._job.token_ids else {}

    def _chunk_choice(self, index: int, delta: Delta | None) -> Json:
        fields: Json = {}
        if delta is not None and delta.reasoning:
            fields |= _reasoning(delta.reasoning)
        if delta is not None and (delta.content or not delta.reasoning):
            fields["content"] = delta.content
        return {"index": index, "delta": fields, "logprobs": None, "finish_reason": None}

    def _logprobs(self, choice: Choice, tokens: Sequence[Token]) -> Json:
        content = []
        for token in tokens:
            entry = self._entry(token.id, token.logprob)
            entry["top_logprobs"] = [self._entry(i, logprob) for i, logprob in token.top]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> Json:
        tokenizer = self._model.tokenizer
        data = tokenizer.token_bytes(token)
        return {"token": tokenizer.token_text(token), "logprob": finite(logprob), "bytes": list(data)}

    def _whole(self, choice: Choice) -> Json:
        return {
            "index": choice.index,
            "message": {
                "role": "assistant",
                "content": choice.content,
                "refusal": None,
                **(_reasoning(choice.reasoning) if choice.reasoning else {}),
            },
            "logprobs": self._logprobs(choice, choice.tokens) if self._job.logprobs is not None else None,
            **self._ids(choice),
        }


def _reasoning(text: str) -> Json:
    """The reasoning, under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}
