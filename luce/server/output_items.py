"""The output items of a response, from the parts of the reply: as stream events while they grow, and as a list."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from luce.engine.events import Token
from luce.server.response import new_id
from luce.server.responses_tools import Offered
from luce.server.segments import Closed, Extended, Kind, Opened, Segments, Step
from luce.server.stream import ServerSentEvent
from luce.server.string_argument import StringArgument
from luce.text.reply_parser import Part

_Json = dict[str, Any]


@dataclass(frozen=True)
class ReasoningForm:
    """How a response shows reasoning."""

    #: as a summary, otherwise as content
    summarised: bool
    #: makes `encrypted_content`; None: the request does not ask for it
    encrypt: Callable[[str], str] | None


class OutputItems:
    """Items in the order of the reply, one for each segment.

    `event` makes the next event of a type; `tools`: those that the model was shown, by its names for them; `scored`
    makes an entry of `logprobs` of a token.
    """

    def __init__(
        self,
        event: Callable[..., ServerSentEvent],
        tools: Mapping[str, Offered],
        reasoning: ReasoningForm,
        scored: Callable[[Token], _Json],
    ) -> None:
        self._event = event
        self._tools = tools
        self._reasoning = reasoning
        self._scored = scored
        self._segments = Segments()
        #: items that are complete
        self.closed: list[_Json] = []
        self._kind = Kind.TEXT
        self._item: _Json = {}
        #: reads the input of the custom tool that is called
        self._input: StringArgument | None = None

    def extend(self, parts: Iterable[Part]) -> Iterator[ServerSentEvent]:
        """The events for further parts."""
        return self._events(self._segments.extend(parts), cut=False)

    def close(self, *, cut: bool) -> Iterator[ServerSentEvent]:
        """The events that end the item that is open, if there is one; `cut`: the reply ended at a limit."""
        return self._events(self._segments.close(), cut=cut)

    def _events(self, steps: Iterable[Step], *, cut: bool) -> Iterator[ServerSentEvent]:
        for step in steps:
            if isinstance(step, Opened):
                yield from self._opened(step)
            elif isinstance(step, Extended):
                yield from self._extended(step)
            else:
                yield from self._closed(step, cut=cut)

    # --- an item begins

    def _opened(self, opened: Opened) -> Iterator[ServerSentEvent]:
        self._kind = opened.kind
        if opened.kind is Kind.CALL:
            self._item = self._call(opened.name)
        elif opened.kind is Kind.REASONING:
            self._item = {"id": new_id("rs_"), "type": "reasoning", "status": "in_progress", "summary": []}
            if not self._reasoning.summarised:
                self._item["content"] = []
        else:
            self._item = {
                "id": new_id("msg_"),
                "type": "message",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
        yield self._event("response.output_item.added", output_index=len(self.closed), item=self._item)
        if self._kind is Kind.TEXT:
            yield self._grown("response.content_part.added", content_index=0, part=_text_part("", []))
        elif self._kind is Kind.REASONING and self._reasoning.summarised:
            yield self._grown("response.reasoning_summary_part.added", summary_index=0, part=_summary_part(""))
        elif self._kind is Kind.REASONING:
            yield self._grown("response.content_part.added", content_index=0, part=_reasoning_part(""))

    def _call(self, name: str) -> _Json:
        tool = self._tools.get(name)
        custom = tool is not None and tool.custom
        self._input = StringArgument() if custom else None
        item: _Json = {
            "id": new_id("ctc_" if custom else "fc_"),
            "type": "custom_tool_call" if custom else "function_call",
            "status": "in_progress",
            "call_id": new_id("call_"),
            "name": name if tool is None else tool.name,
            "input" if custom else "arguments": "",
        }
        # Agents find a tool of a namespace only where both names stand apart.
        return item if tool is None or tool.namespace is None else {**item, "namespace": tool.namespace}

    # --- it grows

    def _extended(self, extended: Extended) -> Iterator[ServerSentEvent]:
        text = extended.text
        if self._kind is Kind.TEXT:
            logprobs = _without_bytes(self._logprobs(extended.tokens))
            yield self._grown("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)
        elif self._kind is Kind.REASONING and self._reasoning.summarised:
            yield self._grown("response.reasoning_summary_text.delta", summary_index=0, delta=text)
        elif self._kind is Kind.REASONING:
            yield self._grown("response.reasoning_text.delta", content_index=0, delta=text)
        elif self._input is None:
            yield self._grown("response.function_call_arguments.delta", delta=text)
        elif piece := self._input.push(text):
            yield self._grown("response.custom_tool_call_input.delta", delta=piece)

    # --- it ends

    def _closed(self, closed: Closed, *, cut: bool) -> Iterator[ServerSentEvent]:
        # A text ends where the reply does; a call says itself when it is over.
        whole = closed.whole or not (cut or self._kind is Kind.CALL)
        if self._kind is Kind.TEXT:
            part = _text_part(closed.text, self._logprobs(closed.tokens))
            logprobs = _without_bytes(part["logprobs"])
            yield self._grown("response.output_text.done", content_index=0, text=closed.text, logprobs=logprobs)
            yield self._grown("response.content_part.done", content_index=0, part=part)
            fields: _Json = {"content": [part]}
        elif self._kind is Kind.REASONING:
            fields = yield from self._reasoned(closed.text)
        elif self._input is None:
            fields = {"arguments": closed.text}
            if whole:
                name = self._item["name"]
                yield self._grown("response.function_call_arguments.done", name=name, arguments=closed.text)
        else:
            fields = {"input": self._input.whole(closed.text)}
            if whole:
                yield self._grown("response.custom_tool_call_input.done", input=fields["input"])
        item = {**self._item, **fields, "status": "completed" if whole else "incomplete"}
        yield self._event("response.output_item.done", output_index=len(self.closed), item=item)
        self.closed.append(item)

    def _reasoned(self, text: str) -> Generator[ServerSentEvent, None, _Json]:
        encrypt = self._reasoning.encrypt
        fields: _Json = {} if encrypt is None else {"encrypted_content": encrypt(text)}
        if self._reasoning.summarised:
            part = _summary_part(text)
            yield self._grown("response.reasoning_summary_text.done", summary_index=0, text=text)
            yield self._grown("response.reasoning_summary_part.done", summary_index=0, part=part)
            return {"summary": [part], **fields}
        part = _reasoning_part(text)
        yield self._grown("response.reasoning_text.done", content_index=0, text=text)
        yield self._grown("response.content_part.done", content_index=0, part=part)
        return {"content": [part], **fields}

    def _logprobs(self, tokens: Iterable[Token]) -> list[_Json]:
        return [self._scored(token) for token in tokens]

    def _grown(self, kind: str, **fields: Any) -> ServerSentEvent:
        return self._event(kind, item_id=self._item["id"], output_index=len(self.closed), **fields)


def _text_part(text: str, logprobs: list[_Json]) -> _Json:
    return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": text}


def _without_bytes(logprobs: Iterable[_Json]) -> list[_Json]:
    """The entries of `logprobs` as events have them."""
    names = ("token", "logprob")
    return [
        {
            **{name: entry[name] for name in names},
            "top_logprobs": [{n: one[n] for n in names} for one in entry["top_logprobs"]],
        }
        for entry in logprobs
    ]


def _summary_part(text: str) -> _Json:
    return {"type": "summary_text", "text": text}


def _reasoning_part(text: str) -> _Json:
    return {"type": "reasoning_text", "text": text}
