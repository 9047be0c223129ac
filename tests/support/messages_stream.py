"""Streams of /v1/messages: reads them, holds them to the protocol's order of events, and joins them to the message."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from typing import Any

from tests.support.http_server import Running

Json = dict[str, Any]

#: for each type of block: the deltas that may extend it, and their fields
_DELTAS = {
    "text": {"text_delta": "text"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}


def read(text: str) -> list[Json]:
    """The events of a stream's text; each has its name as `type` too."""
    assert text.endswith("\n\n")
    events = []
    for block in text[:-2].split("\n\n"):
        name, data = block.split("\n")
        assert name.startswith("event: ") and data.startswith("data: ")
        event = json.loads(data[6:])
        assert event["type"] == name[7:]
        events.append(event)
    return events


class StreamedMessage:
    """Takes the events of one stream in order. `message` is what they say so far."""

    def __init__(self) -> None:
        self.message: Json = {}
        self.ended = False
        self.error: Json | None = None
        self._open: Json | None = None
        self._pieces: list[str] = []
        self._signed = False

    def take(self, event: Json) -> None:
        """One more event. Fails if it may not stand here."""
        kind = event["type"]
        assert not self.ended, f"{kind} behind the end"
        if kind == "ping":
            return
        if kind == "error":
            self.error, self.ended = event["error"], True
            return
        assert (kind == "message_start") == (not self.message), f"{kind} at the start, or message_start later"
        getattr(self, f"_{kind}")(event)

    def _message_start(self, event: Json) -> None:
        message = event["message"]
        assert message["content"] == [] and message["stop_reason"] is None and message["stop_sequence"] is None
        assert message["role"] == "assistant" and message["type"] == "message" and message["id"].startswith("msg_")
        assert message["usage"]["output_tokens"] == 1
        self.message = copy.deepcopy(message)

    def _content_block_start(self, event: Json) -> None:
        assert self._open is None, "two blocks at once"
        assert self.message["stop_reason"] is None
        assert event["index"] == len(self.message["content"]), "indexes have a gap"
        block = event["content_block"]
        assert block.get("text", "") == "" and block.get("thinking", "") == "" and block.get("input", {}) == {}
        self._open, self._pieces, self._signed = dict(block), [], False
        self.message["content"].append(self._open)

    def _content_block_delta(self, event: Json) -> None:
        block, delta = self._open, event["delta"]
        assert block is not None and event["index"] == len(self.message["content"]) - 1
        piece = delta[_DELTAS[block["type"]][delta["type"]]]
        assert not self._signed, "a delta behind the signature"
        if delta["type"] == "signature_delta":
            self._signed, block["signature"] = True, piece
        else:
            assert piece, "an empty delta"
            self._pieces.append(piece)

    def _content_block_stop(self, event: Json) -> None:
        block, text = self._open, "".join(self._pieces)
        assert block is not None and event["index"] == len(self.message["content"]) - 1
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
        elif block["type"] == "thinking":
            assert self._signed and block["signature"]
            block["thinking"] = text
        else:
            assert text.strip(), "a text block without text"
            block["text"] = text
        self._open = None

    def _message_delta(self, event: Json) -> None:
        assert self._open is None and self.message["stop_reason"] is None
        assert event["delta"]["stop_reason"] in ("end_turn", "max_tokens", "stop_sequence", "tool_use")
        self.message |= event["delta"]
        self.message["usage"] |= event["usage"]
        self.message["finish_details"] = event["finish_details"]

    def _message_stop(self, event: Json) -> None:
        assert self.message["stop_reason"] is not None
        self.ended = True


def joined(events: Iterable[Json]) -> Json:
    """The message of a whole stream that succeeded."""
    found = StreamedMessage()
    for event in events:
        found.take(event)
    assert found.ended and found.error is None, found.error
    return found.message


async def streamed(here: Running, body: Json, **options: Any) -> list[Json]:
    """The events of a streamed request, checked."""
    path = here.url + "/v1/messages"
    async with here.client.post(path, json={**body, "stream": True}, **options) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        events = read((await response.read()).decode())
    found = StreamedMessage()
    for event in events:
        found.take(event)
    assert found.ended
    return events
