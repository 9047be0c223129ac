"""Streams of /v1/responses: reads them, holds them to the order of the events, and joins them to the response."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from tests.support import messages_stream
from tests.support.http_server import Running

Json = dict[str, Any]

#: events that extend an item, by its type: the event's name, the field of a piece, the field of the whole
_TEXTS = {
    "message": ("response.output_text", "delta", "text"),
    "function_call": ("response.function_call_arguments", "delta", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "delta", "input"),
}
_PARTS = {
    "response.content_part": ("content_index", "content"),
    "response.reasoning_summary_part": ("summary_index", "summary"),
}


class StreamedResponse:
    """Takes the events of one stream in order. `output` is what they say so far."""

    def __init__(self) -> None:
        self.output: list[Json] = []
        self.response: Json = {}
        self._taken = 0
        self._item: Json | None = None
        self._pieces: list[str] = []
        self._part: str | None = None
        self._text_done = False

    @property
    def ended(self) -> bool:
        return bool(self.response) and self.response["status"] != "in_progress"

    def take(self, event: Json) -> None:
        """One more event. Fails if it may not stand here."""
        kind = event["type"]
        assert event["sequence_number"] == self._taken, "sequence numbers have a gap"
        self._taken += 1
        assert not self.ended, f"{kind} behind the end"
        assert (kind == "response.created") == (self._taken == 1)
        assert (kind == "response.in_progress") or self._taken != 2
        if "response" in event:
            self._whole(kind, event["response"])
        elif kind == "response.output_item.added":
            self._added(event)
        else:
            self._extended(kind, event)

    def _whole(self, kind: str, response: Json) -> None:
        status = kind.removeprefix("response.")
        assert response["object"] == "response" and response["id"].startswith("resp_")
        assert response["status"] == ("in_progress" if status == "created" else status)
        assert response["id"] == self.response.get("id", response["id"])
        if response["status"] in ("completed", "incomplete"):
            assert self._item is None, "an item is open at the end"
        assert response["output"] == self.output
        assert (response["error"] is not None) == (status == "failed")
        assert (response["incomplete_details"] is not None) == (status == "incomplete")
        self.response = response

    def _added(self, event: Json) -> None:
        assert self._item is None, "two items at once"
        assert event["output_index"] == len(self.output), "indexes have a gap"
        item = copy.deepcopy(event["item"])
        assert item["status"] == "in_progress"
        assert all(not item.get(key) for key in ("content", "summary", "arguments", "input"))
        self._item, self._pieces, self._part, self._text_done = item, [], None, False

    def _extended(self, kind: str, event: Json) -> None:
        item = self._item
        assert item is not None, f"{kind} without an item"
        assert event["output_index"] == len(self.output)
        if kind == "response.output_item.done":
            self._done(item, event["item"])
            return
        assert event["item_id"] == item["id"]
        name, _, what = kind.rpartition(".")
        if name in _PARTS:
            index, _ = _PARTS[name]
            assert event[index] == 0
            if what == "added":
                assert self._part is None and event["part"]["text"] == ""
                self._part = event["part"]["type"]
            else:
                assert self._text_done and event["part"]["text"] == "".join(self._pieces)
                item[_PARTS[name][1]] = [event["part"]]
            return
        assert name == self._name(item), f"{kind} in an item of type {item['type']}"
        if what == "delta":
            assert event["delta"] and not self._text_done
            self._pieces.append(event["delta"])
        else:
            assert what == "done" and not self._text_done
            whole = event[_TEXTS.get(item["type"], ("", "", "text"))[2]]
            assert whole == "".join(self._pieces)
            self._text_done = True

    def _name(self, item: Json) -> str:
        if item["type"] != "reasoning":
            return _TEXTS[item["type"]][0]
        return {
            "summary_text": "response.reasoning_summary_text",
            "reasoning_text": "response.reasoning_text",
        }[str(self._part)]

    def _done(self, item: Json, done: Json) -> None:
        field = {"function_call": "arguments", "custom_tool_call": "input"}.get(item["type"])
        assert done["status"] in ("completed", "incomplete")
        if field is not None:
            assert done[field] == "".join(self._pieces)
            assert self._text_done == (done["status"] == "completed")
            item[field] = done[field]
        else:
            assert self._text_done
        item["status"] = done["status"]
        if "encrypted_content" in done:
            item["encrypted_content"] = done["encrypted_content"]
        assert item == done
        self.output.append(item)
        self._item = None


def joined(events: Iterable[Json]) -> Json:
    """The response of a whole stream."""
    found = StreamedResponse()
    for event in events:
        found.take(event)
    assert found.ended
    return found.response


async def streamed(here: Running, body: Json, **options: Any) -> list[Json]:
    """The events of a streamed request, checked."""
    async with here.client.post(here.url + "/v1/responses", json={**body, "stream": True}, **options) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        events = messages_stream.read((await response.read()).decode())
    joined(events)
    return events
