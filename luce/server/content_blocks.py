"""The content blocks of a reply of /v1/messages, from its parts: as stream events while they grow, and as a list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from luce.server.response import new_id
from luce.server.segments import Closed, Extended, Kind, Opened, Segments, Step
from luce.server.stream import ServerSentEvent
from luce.text.reply_parser import Part

_Json = dict[str, Any]

_RAW = msgspec.json.Decoder(msgspec.Raw)


class ContentBlocks:
    """Blocks in the order of the reply, one for each segment.

    `sign` makes the signature of a thinking block; `omits_thinking`: only the signature is sent.
    """

    def __init__(self, sign: Callable[[str], str], *, omits_thinking: bool) -> None:
        self._sign = sign
        self._omits_thinking = omits_thinking
        self._segments = Segments()
        #: blocks that are complete
        self.closed: list[_Json] = []
        #: whether a tool was called
        self.calls = False
        #: the kind of the block that grows, and the block as content_block_start has it
        self._kind = Kind.TEXT
        self._open: _Json = {}

    def extend(self, parts: Iterable[Part]) -> Iterator[ServerSentEvent]:
        """The events for further parts."""
        return self._events(self._segments.extend(parts))

    def close(self) -> Iterator[ServerSentEvent]:
        """The events that end the block that is open, if there is one."""
        return self._events(self._segments.close())

    def _events(self, steps: Iterable[Step]) -> Iterator[ServerSentEvent]:
        for step in steps:
            if isinstance(step, Opened):
                self._kind, self._open = step.kind, self._block(step)
                self.calls |= step.kind is Kind.CALL
                yield _event("content_block_start", index=len(self.closed), content_block=self._open)
            elif isinstance(step, Extended):
                yield from self._extended(step.text)
            else:
                yield from self._closed(step)

    def _block(self, opened: Opened) -> _Json:
        if opened.kind is Kind.CALL:
            return {"type": "tool_use", "id": new_id("toolu_"), "name": opened.name, "input": {}}
        if opened.kind is Kind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "text", "text": ""}

    def _extended(self, text: str) -> Iterator[ServerSentEvent]:
        if self._kind is Kind.CALL:
            yield self._delta({"type": "input_json_delta", "partial_json": text})
        elif self._kind is Kind.TEXT:
            yield self._delta({"type": "text_delta", "text": text})
        elif not self._omits_thinking:
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _closed(self, closed: Closed) -> Iterator[ServerSentEvent]:
        block, text = self._open, closed.text
        if self._kind is Kind.REASONING:
            block = {**block, "thinking": "" if self._omits_thinking else text, "signature": self._sign(text)}
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        elif self._kind is Kind.TEXT:
            block = {**block, "text": text}
        else:
            block = {**block, "input": _arguments(text)}
        yield _event("content_block_stop", index=len(self.closed))
        self.closed.append(block)

    def _delta(self, delta: _Json) -> ServerSentEvent:
        return _event("content_block_delta", index=len(self.closed), delta=delta)


def _event(name: str, **fields: Any) -> ServerSentEvent:
    return ServerSentEvent({"type": name, **fields}, name)


def _arguments(text: str) -> msgspec.Raw:
    """The arguments of a call as the model wrote them, as a number may be one that no float holds; empty for a call
    that was cut, whose text is no JSON."""
    try:
        return _RAW.decode(text)
    except msgspec.DecodeError:
        return msgspec.Raw(b"{}")
