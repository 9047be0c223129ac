"""The content blocks of a reply of /v1/messages, from its parts: as stream events while they grow, and as a list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from luce.server.response import new_id
from luce.server.stream import ServerSentEvent
from luce.text.reply_parser import CallArguments, CallEnded, CallStarted, Part, ReasoningPart, TextPart

_Json = dict[str, Any]

_TEXT, _THINKING, _CALL = "text", "thinking", "tool_use"


class ContentBlocks:
    """Blocks in the order of the reply. One is open at a time; it is opened when it has content, so white space alone
    is no text block.

    `sign` makes the signature of a thinking block; `omits_thinking`: only the signature is sent.
    """

    def __init__(self, sign: Callable[[str], str], *, omits_thinking: bool) -> None:
        self._sign = sign
        self._omits_thinking = omits_thinking
        #: blocks that are complete
        self.closed: list[_Json] = []
        #: type of the block that grows, and its pieces
        self._kind = ""
        self._pieces: list[str] = []
        #: the block as content_block_start has it; None while the text is white space
        self._open: _Json | None = None

    @property
    def calls(self) -> bool:
        """Whether a tool was called."""
        return self._kind == _CALL or any(block["type"] == _CALL for block in self.closed)

    def extend(self, parts: Iterable[Part]) -> Iterator[ServerSentEvent]:
        """The events for further parts."""
        for part in parts:
            if isinstance(part, TextPart):
                yield from self._text(_TEXT, part.text)
            elif isinstance(part, ReasoningPart):
                yield from self._text(_THINKING, part.text)
            elif isinstance(part, CallStarted):
                yield from self.close()
                self._kind = _CALL
                yield self._start({"type": _CALL, "id": new_id("toolu_"), "name": part.name, "input": {}})
            elif isinstance(part, CallArguments):
                self._pieces.append(part.fragment)
                yield self._delta({"type": "input_json_delta", "partial_json": part.fragment})
            elif isinstance(part, CallEnded):
                yield from self.close()

    def close(self) -> Iterator[ServerSentEvent]:
        """The events that end the block that is open, if there is one."""
        block, text = self._open, "".join(self._pieces)
        self._kind, self._pieces, self._open = "", [], None
        if block is None:
            return
        index = len(self.closed)
        if block["type"] == _THINKING:
            block = {**block, "thinking": "" if self._omits_thinking else text, "signature": self._sign(text)}
            delta = {"type": "signature_delta", "signature": block["signature"]}
            yield _event("content_block_delta", index=index, delta=delta)
        elif block["type"] == _TEXT:
            block = {**block, "text": text}
        else:
            block = {**block, "input": _arguments(text)}
        self.closed.append(block)
        yield _event("content_block_stop", index=index)

    def _text(self, kind: str, text: str) -> Iterator[ServerSentEvent]:
        if self._kind != kind:
            yield from self.close()
            self._kind = kind
        self._pieces.append(text)
        if self._open is None:
            text = "".join(self._pieces)
            if not text.strip():
                return
            empty: _Json = {"type": kind, kind: ""}
            yield self._start(empty if kind == _TEXT else {**empty, "signature": ""})
        if not (kind == _THINKING and self._omits_thinking):
            yield self._delta({"type": f"{kind}_delta", kind: text})

    def _start(self, block: _Json) -> ServerSentEvent:
        self._open = block
        return _event("content_block_start", index=len(self.closed), content_block=block)

    def _delta(self, delta: _Json) -> ServerSentEvent:
        return _event("content_block_delta", index=len(self.closed), delta=delta)


def _event(name: str, **fields: Any) -> ServerSentEvent:
    return ServerSentEvent({"type": name, **fields}, name)


def _arguments(text: str) -> _Json:
    """The arguments of a call; empty for one that was cut, whose text is no JSON."""
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}
