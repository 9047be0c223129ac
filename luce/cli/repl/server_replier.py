"""Replies of a server that speaks OpenAI's API."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypedDict

import msgspec

from luce.cli.repl.replier import Ending, Messages, Replier, Reply, Request
from luce.cli.repl.server_client import Json, ListedModel, ServerClient, Stream
from luce.config.sampling import SAMPLERS
from luce.errors import ServerError, UsageError
from luce.models.spec import Markers
from luce.text.reasoning import Delta, ReasoningSplitter

#: what most models write around their reasoning where the server leaves it in the text
_MARKERS = Markers("<think>", "</think>")


class ServerReply(Reply):
    """The reply in an event stream. `retry` repeats the request without `stream_options`, which older servers refuse;
    None: it had none."""

    def __init__(self, stream: Stream, retry: Callable[[], Stream] | None) -> None:
        self._stream = stream
        self._retry = retry
        self._splitter = ReasoningSplitter(_MARKERS)
        self._reason = ""
        self._usage: Json = {}
        self._timings: Json = {}
        self._flushed = False

    def __next__(self) -> Delta:
        while (event := self._next_event()) is not None:
            delta = self._take(event)
            if delta is not None:
                self.tokens += 1
                return delta
        if self._flushed:
            raise StopIteration
        self._flushed = True
        if not self._reason:
            raise ServerError("the server ended its response without saying why: the reply is not complete")
        self._end()
        return self._splitter.flush()

    def close(self) -> None:
        """Cancel the reply. Idempotent."""
        self._stream.close()

    def _next_event(self) -> Json | None:
        retry, self._retry = self._retry, None  # only the first event may be a refusal
        try:
            return self._stream.next()
        except ServerError as error:
            if retry is None or "stream_options" not in str(error):
                raise
        self._stream = retry()
        return self._stream.next()

    def _take(self, event: Json) -> Delta | None:
        """The text of an event; None if it has none."""
        self._usage = _object(event, "usage") or self._usage
        self._timings = _object(event, "timings") or self._timings
        choices: Any = event.get("choices")
        choice: Json = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        cause = _object(choice, "finish_details").get("cause")
        self._reason = str(cause or choice.get("finish_reason") or self._reason)
        delta = _object(choice, "delta") or _object(choice, "message")
        reasoning = _text(delta, "reasoning_content") or _text(delta, "reasoning")
        text = _text(delta, "content") or _text(delta, "refusal")
        if not (text or reasoning):
            return None
        split = self._splitter.push(text) if text else Delta("")
        return Delta(split.content, reasoning + split.reasoning)

    def _end(self) -> None:
        usage, timings = self._usage, self._timings
        self.prompt = _number(usage.get("prompt_tokens"))
        cached = _number(_object(usage, "prompt_tokens_details").get("cached_tokens"))
        drafted, accepted = (_number(timings.get(name)) or 0 for name in ("draft_n", "draft_n_accepted"))
        self.ending = Ending(
            self._reason,
            tokens=_number(usage.get("completion_tokens")),
            prompt=self.prompt,
            cached=cached or 0,
            drafted=drafted,
            accepted=accepted,
            draft_state=_text(timings, "draft_state"),
            details=(f"drafted {drafted:,}, accepted {accepted:,}",) if drafted else (),
        )


class ServerReplier(Replier):
    """Answers with a server's model: `model`, or the first that it lists. Raises ServerError, UsageError."""

    def __init__(self, client: ServerClient, model: str | None) -> None:
        self._client = client
        models: list[ListedModel] = []
        try:
            models = client.models()
        except ServerError:
            if model is None:
                raise
        if model is None and not models:
            raise UsageError(f"MODEL: missing, and {client.url} lists none", param="model")
        self.name = model or models[0].names[0]
        self.context = next((entry.context for entry in models if self.name in entry.names), None) or None
        self._last: ServerReply | None = None
        #: whether the server has refused stream_options: its replies have no counts
        self._usage_refused = False

    def reply(self, messages: Messages, request: Request, on_progress: Callable[[int, int], None]) -> Reply:
        """As in Replier. The reasoning of earlier replies stays here: servers differ in what they make of it."""
        body: Json = {
            "model": self.name,
            "messages": [{"role": m["role"], "content": m["content"]} for m in messages],
            "stream": True,
            **request.sampling,
        }
        if request.think in ("on", "off"):
            body["chat_template_kwargs"] = {"enable_thinking": request.think == "on"}
        elif isinstance(request.think, int):
            # As vLLM and llama.cpp spell it; Luce takes both.
            body |= {"thinking_token_budget": request.think, "thinking_budget_tokens": request.think}
        elif request.think is not None:
            body["reasoning_effort"] = request.think
        if request.response_format is not None:
            body["response_format"] = request.response_format
        if not self._usage_refused:
            body["stream_options"] = {"include_usage": True}
        stream = self._client.stream("/chat/completions", body)
        self._last = ServerReply(stream, None if self._usage_refused else lambda: self._without_usage(body))
        return self._last

    def _without_usage(self, body: Json) -> Stream:
        self._usage_refused = True
        return self._client.stream("/chat/completions", {n: v for n, v in body.items() if n != "stream_options"})

    def count(self, text: str) -> int | None:
        """Not known."""
        return None

    def prompt_tokens(self, messages: Messages) -> int | None:
        """Not known."""
        return None

    def check(self, request: Request, origin: str) -> None:
        """Nothing: the server refuses what it cannot do."""

    def default(self, name: str) -> Any:
        """The server's own."""
        return SAMPLERS[name].unset or "the server's"

    def info(self) -> dict[str, Any]:
        """As in Replier."""
        context = "not told" if self.context is None else f"{self.context:,} tokens"
        return {"name": self.name, "server": self._client.url, "context": context}

    def template(self) -> str:
        """As in Replier."""
        template = _text(self._props("/show template"), "chat_template")
        if not template:
            raise UsageError("/show template: the server's /props has no chat_template")
        return template

    def devices(self) -> list[dict[str, Any]]:
        """As in Replier."""
        runtime = _object(self._props("/show devices"), "runtime")
        try:
            return [dict(shard) for shard in msgspec.convert(runtime.get("target_sharding"), list[_Shard])]
        except msgspec.ValidationError:
            raise UsageError("/show devices: the server's /props has no runtime.target_sharding") from None

    def cache(self) -> dict[str, Any]:
        """What the last reply told."""
        ending = None if self._last is None else self._last.ending
        if ending is None or ending.prompt is None:
            raise UsageError("/show cache: the server has not told yet what it cached")
        return {"last prompt": f"{ending.cached:,} of {ending.prompt:,} tokens were cached"}

    def _props(self, origin: str) -> Json:
        try:
            found = self._client.get("/props", root=True)
        except ServerError as error:
            raise UsageError(f"{origin}: the server does not tell: {error}") from None
        return found if isinstance(found, dict) else {}

    def close(self) -> None:
        """End the connection. Idempotent."""
        with contextlib.suppress(ServerError):
            self._client.close()


class _Shard(TypedDict):
    """As in Luce's /props: a device, its first and last layer, bytes."""

    device: str
    layers: tuple[int, int]
    weights: int
    state: int


def _object(value: Json, name: str) -> Json:
    """A member that is an object; empty if it is none."""
    found: Any = value.get(name)
    return found if isinstance(found, dict) else {}


def _text(value: Json, name: str) -> str:
    """A member that is a text; empty if it is none."""
    found = value.get(name)
    return found if isinstance(found, str) else ""


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
